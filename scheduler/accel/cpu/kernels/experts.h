// Products of rows with the weights of routed experts: every row names the experts that it is multiplied with. Experts
// that no row names are not read, the others once each, in ascending order. What a row gets does not depend on other
// rows: its sums are made by `multiply`, in one order.

#pragma once

#include "matrix.h"

namespace {

struct Experts {
    int64_t count, bytes;  // how many experts, and of the weight of one
    int64_t choices;       // experts of a row; each has `out` results, one choice after the other
    int64_t index;         // floats from the start of a row of the arena: the numbers of its experts
    int64_t from, step;    // and what is multiplied with the first of them, and from there what with the next
    const float* bias;     // [count][out], or null
};

constexpr int64_t ROW_BLOCK = 32;  // rows of what is multiplied are there up to a multiple of it

inline int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The choices (row * choices + choice) of all rows by expert: those of expert e are listed[starts[e]] up to
// listed[starts[e + 1]]. Numbers that are none of an expert are left out.
inline void by_expert(const Experts& experts, const float* arena, int64_t width, int64_t rows, int32_t* starts,
                      int32_t* listed) {
    std::memset(starts, 0, (experts.count + 2) * sizeof(int32_t));
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < experts.choices; k++) {
            float e = arena[row * width + experts.index + k];
            if (e >= 0 && e < float(experts.count)) starts[int64_t(e) + 2]++;
        }
    for (int64_t e = 0; e < experts.count; e++) starts[e + 2] += starts[e + 1];
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < experts.choices; k++) {
            float e = arena[row * width + experts.index + k];
            if (e >= 0 && e < float(experts.count)) listed[starts[int64_t(e) + 1]++] = int32_t(row * experts.choices + k);
        }
}

// A part of a product for rows that are in the arena: some of the column groups of all experts that are named.
// `scratch`: see ``routed_scratch`` in program.py.
class RoutedProduct {
public:
    RoutedProduct(const Experts& experts, const Weight& weight, float* arena, int64_t width, int64_t out, int64_t rows,
                  int64_t chunk, float* scratch)
        : experts(experts), weight(weight), arena(arena), width(width), out(out), rows(rows), most(rounded(chunk, ROW_BLOCK)) {
        starts = (int32_t*)scratch;
        listed = starts + experts.count + 2;
        x = scratch + rounded(experts.count + 2 + chunk * experts.choices, 16);
        y = x + most * rounded(weight.in, DEPTH);
    }

    void run(int64_t part, int64_t parts) const {
        by_expert(experts, arena, width, rows, starts, listed);
        int64_t named = 0, groups = column_groups(weight);
        for (int64_t e = 0; e < experts.count; e++) named += starts[e + 1] > starts[e];
        int64_t first = named * groups * part / parts, last = named * groups * (part + 1) / parts, at = 0;
        for (int64_t e = 0; e < experts.count && at < last; e++) {
            if (starts[e + 1] == starts[e]) continue;
            int64_t from = first > at ? first - at : 0, to = last - at < groups ? last - at : groups;
            if (from < to) expert(e, from, to);
            at += groups;
        }
        if (part == 0) without_expert();
    }

private:
    const Experts& experts;
    const Weight& weight;
    float* arena;
    int64_t width, out, rows, most;
    int32_t *starts, *listed;
    float *x, *y;

    float* result(int64_t choice) const {
        return arena + choice / experts.choices * width + out + choice % experts.choices * weight.out;
    }

    void expert(int64_t e, int64_t first, int64_t last) const {
        Weight own = weight;
        own.data = (const char*)weight.data + e * experts.bytes;
        const float* bias = experts.bias ? experts.bias + e * weight.out : nullptr;
        for (int64_t begin = starts[e]; begin < starts[e + 1]; begin += most) {
            int64_t n = starts[e + 1] - begin < most ? starts[e + 1] - begin : most;
            for (int64_t i = 0; i < n; i++) {
                int64_t choice = listed[begin + i], row = choice / experts.choices;
                const float* values = arena + row * width + experts.from + choice % experts.choices * experts.step;
                prepare(weight.type, values, weight.in, i, n, x);
            }
            for (int64_t g = first; g < last; g++) {
                int64_t column = g * GROUP, many = weight.out - column < GROUP ? weight.out - column : GROUP;
                multiply(own, x, n, y - column, GROUP, g, g + 1);
                for (int64_t i = 0; i < n; i++) {
                    float *to = result(listed[begin + i]) + column, *sums = y + i * GROUP;
                    for (int64_t j = 0; j < many; j++) to[j] = bias ? sums[j] + bias[column + j] : sums[j];
                }
            }
        }
    }

    void without_expert() const {  // zeros for choices of no expert
        for (int64_t choice = 0; choice < rows * experts.choices; choice++) {
            float e = arena[choice / experts.choices * width + experts.index + choice % experts.choices];
            if (!(e >= 0 && e < float(experts.count))) std::memset(result(choice), 0, weight.out * sizeof(float));
        }
    }
};

}  // namespace
