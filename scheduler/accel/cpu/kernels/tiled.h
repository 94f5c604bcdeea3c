// Rows of bfloat16 times a weight in tiles: [out / 64][in / 32][4][16 pairs of in][16 of out][2], padded with zeros, so that
// one stream of memory feeds four tiles. A row of a tile is what a register of 16 sums takes at a time.
//
// Where the processor has matrix units (AMX) they take whole tiles; else products of pairs (AVX-512 BF16) or plain ones.

#pragma once

#include "tiles.h"
#include "vectors.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t GROUP = 64;  // columns of a tiled weight that lie together
constexpr int64_t DEPTH = 32;  // elements of a row that one tile takes
constexpr int64_t TILE = 16 * DEPTH;
constexpr int64_t BLOCK_ROWS = 32;  // the arena holds rows up to a multiple of it

inline int64_t depth_of(int64_t in) { return (in + DEPTH - 1) / DEPTH; }

#if defined(__AMX_BF16__)
constexpr int64_t AHEAD = 8 * TILE;  // bytes: what the next step reads is asked for now, worth a tenth
constexpr int64_t PANEL = 32;  // tiles that are gone through at a time, so that what many rows need stays in a near cache

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
inline void multiply_tiled(const uint16_t* w, int64_t depth, const uint16_t* x, int64_t rows, float* y, int64_t y_row,
                           int64_t first, int64_t last) {
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
// A register of 16 columns takes a pair of elements of the weight per column, and of x the same pair for all of them.
#if defined(__AVX512BF16__)
struct Sum {
    __m512 of;
    void start(const float* y) { of = _mm512_loadu_ps(y); }
    void add(const uint16_t* w, uint32_t pair) {
        of = _mm512_dpbf16_ps(of, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(int(pair)));
    }
    void end(float* y) const { _mm512_storeu_ps(y, of); }
};
#else
struct Sum {
    vf of[16 / LANES];
    void start(const float* y) {
        for (int i = 0; i < 16 / LANES; i++) of[i] = load(y + i * LANES);
    }
    void add(const uint16_t* w, uint32_t pair) {
        vf even = splat(get(bf16{uint16_t(pair)})), odd = splat(get(bf16{uint16_t(pair >> 16)}));
        for (int i = 0; i < 16 / LANES; i++) {
            vf a, b;
            load((const bf16*)w + 2 * LANES * i, a, b);
            of[i] += a * even;
            of[i] += b * odd;
        }
    }
    void end(float* y) const {
        for (int i = 0; i < 16 / LANES; i++) store(y + i * LANES, of[i]);
    }
};
#endif

constexpr int BESIDE = LANES == 16 ? 4 : 2, BELOW = BESIDE;  // tiles and rows at a time: there are registers for them
constexpr int64_t SHALLOW = 4;  // tiles deep: two times 64 columns of them fit the nearest cache

// ROWS rows of the same 16, BESIDE tiles, `steps` deep. Meanwhile `lines` times 16 lines of memory a step are asked for,
// but where one row leaves the processor the time to see by itself what comes.
template <int ROWS>
inline void block(const uint16_t* x, const uint16_t* w, int64_t steps, bool first, float* y, int64_t y_row,
                  const char* next, int64_t lines) {
    Sum sums[ROWS][BESIDE] = {};
    if (!first)
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < BESIDE; c++) sums[r][c].start(y + r * y_row + 16 * c);
    for (int64_t d = 0; d < steps; d++, x += TILE, w += 4 * TILE)
        for (int64_t pair = 0; pair < DEPTH / 2; pair++) {
            for (int64_t i = 0; ROWS > 1 && i < lines; i++, next += 64) __builtin_prefetch(next);
            for (int r = 0; r < ROWS; r++) {
                uint32_t both;
                std::memcpy(&both, x + r * DEPTH + 2 * pair, 4);
                for (int c = 0; c < BESIDE; c++) sums[r][c].add(w + c * TILE + pair * 32, both);
            }
        }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < BESIDE; c++) sums[r][c].end(y + r * y_row + 16 * c);
}

// Columns of the groups first .. last; columns of y are there up to a multiple of GROUP. What lies behind the tiles that
// are gone through is asked for in the meantime, a part of it at each turn.
inline void multiply_tiled(const uint16_t* w, int64_t depth, const uint16_t* x, int64_t rows, float* y, int64_t y_row,
                           int64_t first, int64_t last) {
    int64_t turns = (rows + BELOW - 1) / BELOW * (4 / BESIDE), lines = (3 + turns) / turns;
    for (int64_t g = first; g < last; g++)
        for (int64_t d = 0, steps; d < depth; d += steps) {
            steps = depth - d < SHALLOW ? depth - d : SHALLOW;
            const uint16_t* tiles = w + (g * depth + d) * 4 * TILE;
            const char *next = (const char*)(tiles + steps * 4 * TILE), *end = next + steps * 8 * TILE;
            for (int64_t row = 0, many; row < rows; row += many)
                for (int64_t c = 0; c < 4; c += BESIDE, next += steps * lines * 16 * 64) {
                    const uint16_t* from = x + (row / 16 * depth + d) * TILE + row % 16 * DEPTH;
                    float* to = y + row * y_row + g * GROUP + 16 * c;
                    int64_t more = next < end ? lines : 0, left = rows - row;
                    many = left >= BELOW ? BELOW : left >= 2 ? 2 : 1;
                    if (many == BELOW) block<BELOW>(from, tiles + c * TILE, steps, d == 0, to, y_row, next, more);
                    else if (many == 2) block<2>(from, tiles + c * TILE, steps, d == 0, to, y_row, next, more);
                    else block<1>(from, tiles + c * TILE, steps, d == 0, to, y_row, next, more);
                }
        }
}
#endif

}  // namespace
