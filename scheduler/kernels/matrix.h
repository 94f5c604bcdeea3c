// Rows of activations times a weight [out, in]: the part of a step that is bound by the speed at which weights are read.
//
// Tiled weights are for processors with matrix units (AMX): [out / 64][in / 32][4][16 pairs of in][16 of out][2], padded
// with zeros, so that one stream of memory feeds four tiles. Plain weights are read as they lie. Each row's sums are made in one order, whatever rows are beside it.

#pragma once

#include "tiles.h"
#include "vectors.h"

namespace {

constexpr int64_t GROUP = 64;  // columns of a tiled weight that lie together
constexpr int64_t DEPTH = 32;  // elements of a row that one tile takes
constexpr int64_t TILE = 16 * DEPTH;
constexpr int64_t AHEAD = 8 * TILE;  // bytes: what the next step reads is asked for now, worth a tenth
constexpr int64_t PANEL = 32;  // tiles that are gone through at a time, so that what many rows need stays in a near cache
constexpr int64_t BLOCK_ROWS = 32;  // the arena holds rows up to a multiple of it

struct Weight {
    const void* data;
    int64_t out, in;
    int64_t type;  // 0 float32, 1 bfloat16, 2 float16; 3: bfloat16 in tiles
};

constexpr int64_t TILED = 3;
inline int64_t depth_of(int64_t in) { return (in + DEPTH - 1) / DEPTH; }

// ---- tiled -------------------------------------------------------------------------------------------------------

#if defined(__AMX_BF16__)
// Up to 16 rows, 64 columns: every tile of the weight is read once.
inline void few_rows(const uint16_t* x, const uint16_t* w, int64_t depth, float* y, int64_t y_row) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < depth; d++, x += TILE, w += 4 * TILE) {
        for (int64_t line = 0; line < 8 * TILE; line += 64) __builtin_prefetch((const char*)w + AHEAD + line, 0, 2);
        _tile_loadd(4, x, 64);
        _tile_loadd(5, w, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, w + TILE, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, w + 2 * TILE, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, w + 3 * TILE, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, y, y_row * 4);
    _tile_stored(1, y + 16, y_row * 4);
    _tile_stored(2, y + 32, y_row * 4);
    _tile_stored(3, y + 48, y_row * 4);
}

// 32 rows, 32 columns, `steps` tiles deep; `below` is how far the next 16 rows of x are.
inline void block(const uint16_t* x, int64_t below, const uint16_t* w, int64_t steps, bool first, float* y, int64_t y_row) {
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, y, y_row * 4);
        _tile_loadd(1, y + 16, y_row * 4);
        _tile_loadd(2, y + 16 * y_row, y_row * 4);
        _tile_loadd(3, y + 16 * y_row + 16, y_row * 4);
    }
    for (int64_t d = 0; d < steps; d++, x += TILE, w += 4 * TILE) {
        _tile_loadd(4, x, 64);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + below, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, y, y_row * 4);
    _tile_stored(1, y + 16, y_row * 4);
    _tile_stored(2, y + 16 * y_row, y_row * 4);
    _tile_stored(3, y + 16 * y_row + 16, y_row * 4);
}

// Columns of the groups first .. last. Rows of y are there up to a multiple of 16 (of BLOCK_ROWS where there are more
// than 16), columns up to a multiple of GROUP.
inline void multiply_tiled(const Weight& weight, const uint16_t* x, int64_t rows, float* y, int64_t y_row, int64_t first,
                           int64_t last) {
    int64_t depth = depth_of(weight.in);
    const uint16_t* w = (const uint16_t*)weight.data;
    Tiles tiles;
    tiles.shape(0b11111, rows < 16 ? rows : 16);
    if (rows <= 16) {
        for (int64_t g = first; g < last; g++) few_rows(x, w + g * depth * 4 * TILE, depth, y + g * GROUP, y_row);
        return;
    }
    for (int64_t d = 0; d < depth; d += PANEL) {
        int64_t steps = depth - d < PANEL ? depth - d : PANEL;
        for (int64_t half = 2 * first; half < 2 * last; half++) {
            const uint16_t* panel = w + ((half / 2 * depth + d) * 4 + half % 2 * 2) * TILE;
            for (int64_t row = 0; row < rows; row += BLOCK_ROWS)
                block(x + (row / 16 * depth + d) * TILE, depth * TILE, panel, steps, d == 0, y + row * y_row + half * 32,
                      y_row);
        }
    }
}
#else
inline void multiply_tiled(const Weight&, const uint16_t*, int64_t, float*, int64_t, int64_t, int64_t) {}
#endif

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

// One row of float32 as a weight of this type wants its input: `to` is where all rows begin.
inline void prepare(int64_t type, const float* from, int64_t in, int64_t row, void* to) {
    if (type == TILED) {  // [rows / 16][in / 32][16][32]
        bf16* out = (bf16*)to + (row / 16 * depth_of(in) * 16 + row % 16) * DEPTH;
        int64_t i = 0;
        for (; i + DEPTH <= in; i += DEPTH, out += TILE)
            for (int64_t j = 0; j < DEPTH; j++) put(out + j, from[i + j]);
        if (i < in)
            for (int64_t j = 0; j < DEPTH; j++) put(out + j, i + j < in ? from[i + j] : 0.0f);
        return;
    }
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
    if (weight.type == TILED) {
        multiply_tiled(weight, (const uint16_t*)x, rows, y, y_row, first, last);
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
