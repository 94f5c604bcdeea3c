// What an adapter adds to a product with a weight: for a row x it is scale * up (down x), with two narrow matrices.
// Rows of one step may have different adapters, or none. `down x` is computed where the row is prepared for its
// products, and is added to their results. A row's sums are made in one order, whatever rows are beside it.

#pragma once

#include "vectors.h"

namespace {

struct LowRank {
    const void *down, *up;  // [rank / 4][in / 16][4][16], [out / 32][rank][32], see below
    int64_t rank, type;     // rank 0: the adapter leaves this weight as it is; 0 float32, 1 bfloat16, 2 float16
    double scale;
};

// Of the step that runs; one for all programs.
struct Adapters {
    const int64_t* of_row;  // the adapter of each row, -1: none; null: no row has one
    const LowRank* maps;    // [adapters][weights]
    int64_t weights, most;  // the highest rank
    float* low;             // `down x`: [rows of a chunk][products of a program][most]
};

inline vf in_order(const float* p) { return load(p); }
inline vf in_order(const bf16* p) { return (vf)(__builtin_convertvector(*(const vh_in_memory*)p, vu) << 16); }
inline vf in_order(const f16* p) { return halves(__builtin_convertvector(*(const vh_in_memory*)p, vu)); }

// Both halves are read from their beginning to their end, whatever their shapes: `down` in strips of 16 elements of four
// of its rows, `up` in strips of 32 columns of all ranks. They are filled with zeros.
constexpr int64_t ELEMENTS = 16, RANKS = 4, COLUMNS = 32;

template <class T>
void compute_low(const LowRank& map, const float* x, int64_t n, float* to) {
    const T* w = (const T*)map.down;
    int64_t whole = n / ELEMENTS, strips = (n + ELEMENTS - 1) / ELEMENTS;
    float rest[ELEMENTS] = {};
    for (int64_t i = whole * ELEMENTS; i < n; i++) rest[i - whole * ELEMENTS] = x[i];
    for (int64_t r = 0; r < map.rank; r += RANKS) {
        vf sums[RANKS] = {};
        for (int64_t strip = 0; strip < strips; strip++, w += RANKS * ELEMENTS) {
            const float* from = strip < whole ? x + strip * ELEMENTS : rest;
            for (int64_t at = 0; at < ELEMENTS; at += LANES) {
                vf value = load(from + at);
                for (int64_t i = 0; i < RANKS; i++) sums[i] += value * in_order(w + i * ELEMENTS + at);
            }
        }
        for (int64_t i = 0; i < RANKS && r + i < map.rank; i++)
            to[r + i] = fold(sums[i], [](vf p, vf q) { return p + q; }) * float(map.scale);
    }
}

// scale * (down x) of one row.
inline void compute_low(const LowRank& map, const float* x, int64_t n, float* to) {
    if (map.type == 0) compute_low<float>(map, x, n, to);
    else if (map.type == 1) compute_low<bf16>(map, x, n, to);
    else compute_low<f16>(map, x, n, to);
}

// `first` is a multiple of COLUMNS.
template <int ROWS, class T>
inline void add_up(const T* up, int64_t rank, const float* low, int64_t low_row, float* y, int64_t y_row, int64_t first,
                   int64_t last) {
    for (int64_t c = first; c < last; c += 2 * LANES) {
        const T* strip = up + c / COLUMNS * rank * COLUMNS + c % COLUMNS;
        if (c + 2 * LANES > last) {
            for (int64_t column = c; column < last; column++)
                for (int i = 0; i < ROWS; i++) {
                    float total = y[i * y_row + column];
                    for (int64_t r = 0; r < rank; r++) total += low[i * low_row + r] * get(strip[r * COLUMNS + column - c]);
                    y[i * y_row + column] = total;
                }
            return;
        }
        vf sums[ROWS][2];
        for (int i = 0; i < ROWS; i++) sums[i][0] = load(y + i * y_row + c), sums[i][1] = load(y + i * y_row + c + LANES);
        for (int64_t r = 0; r < rank; r++) {
            __builtin_prefetch(strip + (2 * rank + r) * COLUMNS);  // what is read for the next 64 columns
            vf a = in_order(strip + r * COLUMNS), b = in_order(strip + r * COLUMNS + LANES);
            for (int i = 0; i < ROWS; i++) {
                vf factor = splat(low[i * low_row + r]);
                sums[i][0] += factor * a, sums[i][1] += factor * b;
            }
        }
        for (int i = 0; i < ROWS; i++) store(y + i * y_row + c, sums[i][0]), store(y + i * y_row + c + LANES, sums[i][1]);
    }
}

template <class T>
void add_up(const LowRank& map, int64_t rows, const float* low, int64_t low_row, float* y, int64_t y_row, int64_t first,
            int64_t last) {
    const T* up = (const T*)map.up;
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) add_up<4>(up, map.rank, low + i * low_row, low_row, y + i * y_row, y_row, first, last);
    for (; i < rows; i++) add_up<1>(up, map.rank, low + i * low_row, low_row, y + i * y_row, y_row, first, last);
}

// Adds to the columns from `first` to `last` of `rows` results; `start` is their first row in the step, `low` what was
// computed of its rows.
inline void add_adapters(const Adapters& adapters, int64_t weight, int64_t start, int64_t rows,
                         const float* low, int64_t low_row, float* y, int64_t y_row, int64_t first, int64_t last) {
    const int64_t* of = adapters.of_row + start;
    for (int64_t row = 0, next; row < rows; row = next) {
        for (next = row + 1; next < rows && of[next] == of[row]; next++) {}
        if (of[row] < 0) continue;
        const LowRank& map = adapters.maps[of[row] * adapters.weights + weight];
        const float* from = low + row * low_row;
        float* to = y + row * y_row;
        if (!map.rank) continue;
        if (map.type == 0) add_up<float>(map, next - row, from, low_row, to, y_row, first, last);
        else if (map.type == 1) add_up<bf16>(map, next - row, from, low_row, to, y_row, first, last);
        else add_up<f16>(map, next - row, from, low_row, to, y_row, first, last);
    }
}

}  // namespace
