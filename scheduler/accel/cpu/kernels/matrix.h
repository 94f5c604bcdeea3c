// Rows of activations times a weight [out, in]: the part of a step that is bound by the speed at which weights are read.
// Weights lie in tiles, are packed to few bits, or are read as they lie. Each row's sums are made in one order, whatever
// rows are beside it.

#pragma once

#include "real.h"
#include "tiled.h"

extern "C" {
int64_t warmturn_skips_products = 0;  // 1: results are zeros, and no weight is read
}

namespace {

struct Weight {
    const void* data;
    int64_t out, in;
    int64_t type;  // 0 float32, 1 bfloat16, 2 float16; 3: bfloat16 in tiles; with PACKED: see packed.h, real.h
};

constexpr int64_t TILED = 3;

// ---- plain -------------------------------------------------------------------------------------------------------

// COLUMNS rows of the weight times ROWS rows of `x`, whose chunks are in the order in which `load` gives elements.
template <int ROWS, int COLUMNS, class T>
inline void products(const T* w, int64_t in, const float* x, int64_t x_row, float* y, int64_t y_row) {
    vf sums[ROWS][COLUMNS] = {};
    int64_t whole = in / CHUNK * CHUNK;
    for (int64_t at = 0; at < whole; at += CHUNK) {
        vf a[COLUMNS], b[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) load(w + c * in + at, a[c], b[c]);
        for (int r = 0; r < ROWS; r++) {
            vf left = load(x + r * x_row + at), right = load(x + r * x_row + at + LANES);
            for (int c = 0; c < COLUMNS; c++) sums[r][c] += left * a[c] + right * b[c];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) {
            float total = fold(sums[r][c], [](vf p, vf q) { return p + q; });
            for (int64_t at = whole; at < in; at++) total += x[r * x_row + at] * get(w[c * in + at]);
            y[r * y_row + c] = total;
        }
}

template <int COLUMNS, class T>
inline void columns(const T* w, int64_t in, const float* x, int64_t x_row, int64_t rows, float* y, int64_t y_row) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) products<4, COLUMNS>(w, in, x + r * x_row, x_row, y + r * y_row, y_row);
    if (r + 2 <= rows) {
        products<2, COLUMNS>(w, in, x + r * x_row, x_row, y + r * y_row, y_row);
        r += 2;
    }
    if (r < rows) products<1, COLUMNS>(w, in, x + r * x_row, x_row, y + r * y_row, y_row);
}

constexpr int64_t PLAIN = LANES == 16 ? 4 : 2;  // columns at a time

template <class T>
void multiply_plain(const Weight& weight, const float* x, int64_t x_row, int64_t rows, float* y, int64_t y_row,
                    int64_t first, int64_t last) {
    const T* w = (const T*)weight.data;
    int64_t c = first;
    for (; c + PLAIN <= last; c += PLAIN)
        columns<PLAIN>(w + c * weight.in, weight.in, x, x_row, rows, y + c, y_row);
    for (; c < last; c++) columns<1>(w + c * weight.in, weight.in, x, x_row, rows, y + c, y_row);
}

// ---- what both need ----------------------------------------------------------------------------------------------

// One of `rows` rows of float32 as a weight of this type wants its input: `to` is where all rows begin.
inline void prepare(int64_t type, const float* from, int64_t in, int64_t row, int64_t rows, void* to) {
    if (type & REAL) return prepare_real(from, in, row, (float*)to);
    if (type & PACKED) return prepare_packed(from, in, row, rows, type, (Quantised*)to);
    if (type == TILED) return prepare_tiled(from, in, row, (Activation*)to);
    float* out = (float*)to + row * in;
    int64_t whole = type == 0 ? 0 : in / CHUNK * CHUNK;
    for (int64_t at = 0; at < whole; at += CHUNK)
        for (int i = 0; i < LANES; i++) {
            out[at + i] = from[at + 2 * i];
            out[at + LANES + i] = from[at + 2 * i + 1];
        }
    std::memcpy(out + whole, from + whole, (in - whole) * sizeof(float));
}

// Parts that columns may be cut into.
inline int64_t column_groups(const Weight& weight) { return (weight.out + GROUP - 1) / GROUP; }

// The column groups first .. last, of rows that are prepared.
inline void multiply(const Weight& weight, const void* x, int64_t rows, float* y, int64_t y_row, int64_t first,
                     int64_t last) {
    if (warmturn_skips_products) {
        int64_t end = last * GROUP < weight.out ? last * GROUP : weight.out;
        for (int64_t row = 0; row < rows; row++)
            std::memset(y + row * y_row + first * GROUP, 0, (end - first * GROUP) * sizeof(float));
        return;
    }
    if (weight.type & REAL)
        return multiply_real(weight.data, weight.type, weight.in, (const float*)x, rows, y, y_row, first, last);
    if (weight.type & PACKED)
        return multiply_packed(weight.data, weight.type, weight.in, (const Quantised*)x, rows, y, y_row, first, last);
    if (weight.type == TILED) {
        multiply_tiled((const uint16_t*)weight.data, depth_of(weight.in), (const Activation*)x, rows, y, y_row, first, last);
        return;
    }
    first *= GROUP;
    last = last * GROUP < weight.out ? last * GROUP : weight.out;
    const float* from = (const float*)x;
    if (weight.type == 0) multiply_plain<float>(weight, from, weight.in, rows, y, y_row, first, last);
    else if (weight.type == 1) multiply_plain<bf16>(weight, from, weight.in, rows, y, y_row, first, last);
    else multiply_plain<f16>(weight, from, weight.in, rows, y, y_row, first, last);
}

}  // namespace
