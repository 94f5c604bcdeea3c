// Rows of bfloat16 times a weight in tiles: [out / 64][in / 2][4][16 of out][2], `in` padded with zeros to a multiple of 32.
// The rows of four tiles [16 pairs of in][16 of out][2] follow each other in turn, so that products with 64 columns read
// one stream of memory in the order of its addresses.
//
// Where the processor has matrix units (AMX) they take whole tiles; else products of pairs (AVX-512 BF16, ARM BF16) or
// plain ones. There are several ways to go through a weight, see ways.h; each gives the same bits.

#pragma once

#include <type_traits>

#include "tiles.h"
#include "vectors.h"
#include "ways.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

namespace {

constexpr int64_t GROUP = 64;  // columns of a tiled weight that lie together
constexpr int64_t DEPTH = 32;  // elements of a row that one tile takes
constexpr int64_t TILE = 16 * DEPTH;
constexpr int64_t BLOCK_ROWS = 32;  // the arena holds rows up to a multiple of it

inline int64_t depth_of(int64_t in) { return (in + DEPTH - 1) / DEPTH; }

#if defined(__AMX_BF16__)
typedef uint16_t Activation;  // bfloat16
constexpr int64_t WAYS_OF_TILES = PREFETCHING;
constexpr int64_t AHEAD = 8 * TILE;  // bytes: with PREFETCHING, what the next step reads is asked for now
constexpr int64_t STEP = 4 * 64;     // bytes from a row of a tile of the weight to the next
constexpr int64_t PANEL = 32;  // tiles that are gone through at a time, so that what many rows need stays in a near cache

// Up to 16 rows, 64 columns: every tile of the weight is read once.
inline void few_rows(const uint16_t* x, const uint16_t* w, int64_t depth, float* y, int64_t y_row,
                     bool ahead) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < depth; d++, x += TILE, w += 4 * TILE) {
        for (int64_t line = 0; ahead && line < 8 * TILE; line += 64)
            __builtin_prefetch((const char*)w + AHEAD + line, 0, 2);
        _tile_loadd(4, x, 64);
        _tile_loadd(5, w, STEP);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, w + 32, STEP);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, w + 2 * 32, STEP);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, w + 3 * 32, STEP);
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
        _tile_loadd(6, w, STEP);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 32, STEP);
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
        for (int64_t g = first; g < last; g++)
            few_rows(x, w + g * depth * 4 * TILE, depth, y + g * GROUP, y_row, way_of(rows) & PREFETCHING);
        return;
    }
    for (int64_t d = 0; d < depth; d += PANEL) {
        int64_t steps = depth - d < PANEL ? depth - d : PANEL;
        for (int64_t half = 2 * first; half < 2 * last; half++) {
            const uint16_t* panel = w + (half / 2 * depth + d) * 4 * TILE + half % 2 * 2 * 32;
            for (int64_t row = 0; row < rows; row += BLOCK_ROWS)
                block(x + (row / 16 * depth + d) * TILE, depth * TILE, panel, steps, d == 0, y + row * y_row + half * 32,
                      y_row);
        }
    }
}
#else
// What a register holds of 16 columns: a pair of elements of the weight per column; and of x the same pair for all.
#if defined(__AVX512BF16__)
typedef uint16_t Activation;  // bfloat16
typedef __m512 Sum;
struct Columns {
    __m512bh of;
    explicit Columns(const uint16_t* w) : of((__m512bh)_mm512_loadu_si512(w)) {}
};
struct Pair {
    __m512bh of;
    explicit Pair(const uint16_t* x) {
        int32_t both;
        std::memcpy(&both, x, 4);
        of = (__m512bh)_mm512_set1_epi32(both);
    }
};
inline void add(Sum& sum, const Columns& w, const Pair& x) { sum = _mm512_dpbf16_ps(sum, w.of, x.of); }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
typedef uint16_t Activation;  // bfloat16
typedef float32x4_t Sum;
struct Columns {
    bfloat16x8_t of;
    explicit Columns(const uint16_t* w) : of(vreinterpretq_bf16_u16(vld1q_u16(w))) {}
};
struct Pair {
    bfloat16x8_t of;
    explicit Pair(const uint16_t* x) {
        uint32_t both;
        std::memcpy(&both, x, 4);
        of = vreinterpretq_bf16_u32(vdupq_n_u32(both));
    }
};
inline void add(Sum& sum, const Columns& w, const Pair& x) { sum = vbfdotq_f32(sum, w.of, x.of); }
#else
typedef float Activation;  // values of bfloat16, widened once instead of at every use
typedef vf Sum;
#endif

constexpr int PARTS = 64 / sizeof(Sum);                    // registers for the sums of 16 columns
constexpr int64_t EACH = 16 / PARTS;                       // columns of one of them
constexpr int64_t WAYS_OF_TILES = PREFETCHING;

struct TilePanel {  // a panel of a weight, a few tiles deep, as it is
    static constexpr int BESIDE = LANES == 16 ? 4 : 2, BELOW = LANES == 16 ? 6 : 2;  // tiles and rows at a time
    static constexpr int64_t DEEP = 4;          // tiles: 64 columns of them fit the nearest cache twice
    static constexpr int64_t PAIR = 2 * GROUP;  // from a pair of elements to the next
    const uint16_t* values;

    void take(const uint16_t* panel, int64_t) { values = panel; }
    const uint16_t* tile(int64_t number) const { return values + 32 * number; }
};

// A pair of elements of ROWS rows times TILES times 16 columns.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <int ROWS, int TILES>
inline void multiply_pair(Sum (&sums)[ROWS][TILES][PARTS], const Activation* x, const uint16_t* w) {
    for (int c = 0; c < TILES; c++)
        for (int i = 0; i < PARTS; i++) {
            Columns columns(w + 32 * c + 2 * EACH * i);
            for (int r = 0; r < ROWS; r++) add(sums[r][c][i], columns, Pair(x + r * DEPTH));
        }
}
typedef TilePanel OfMany;  // what many rows go through
#else
inline vf widened(const uint16_t* w, int element) {
    vu both;
    std::memcpy(&both, w, sizeof both);
    return (vf)(element ? both & 0xffff0000u : both << 16);
}

// One element after the other, so that there are registers for the sums; of one row there are enough for both.
template <int ROWS, int TILES>
inline void multiply_pair(Sum (&sums)[ROWS][TILES][PARTS], const Activation* x, const uint16_t* w) {
    if constexpr (ROWS == 1) {
        for (int c = 0; c < TILES; c++)
            for (int i = 0; i < PARTS; i++)
                for (int element = 0; element < 2; element++)
                    sums[0][c][i] += widened(w + 32 * c + 2 * EACH * i, element) * splat(x[element]);
        return;
    }
    for (int element = 0; element < 2; element++) {
        vf columns[TILES][PARTS];
        for (int c = 0; c < TILES; c++)
            for (int i = 0; i < PARTS; i++) columns[c][i] = widened(w + 32 * c + 2 * EACH * i, element);
        for (int r = 0; r < ROWS; r++) {
            vf value = splat(x[r * DEPTH + element]);
            for (int c = 0; c < TILES; c++)
                for (int i = 0; i < PARTS; i++) sums[r][c][i] += columns[c][i] * value;
        }
    }
}

struct WidePanel {  // a panel as float32: that is done once, and takes the time of a few rows
    static constexpr int BESIDE = 1, BELOW = LANES == 8 ? 6 : 3;
    static constexpr int64_t DEEP = 8, PAIR = 2 * 16;
    alignas(64) float values[4][DEEP * DEPTH * 16];  // [elements][16 columns] of each of four

    void take(const uint16_t* panel, int64_t steps) {
        for (int64_t c = 0; c < 4; c++) {
            float* to = values[c];
            for (int64_t pair = 0; pair < steps * DEPTH / 2; pair++)
                for (int element = 0; element < 2; element++)
                    for (int64_t i = 0; i < PARTS; i++, to += EACH)
                        store(to, widened(panel + TilePanel::PAIR * pair + 32 * c + 2 * EACH * i, element));
        }
    }
    const float* tile(int64_t number) const { return values[number]; }
};

template <int ROWS, int TILES>
inline void multiply_pair(Sum (&sums)[ROWS][TILES][PARTS], const Activation* x, const float* w) {
    static_assert(TILES == 1, "the next element follows the 16 columns");
    for (int element = 0; element < 2; element++)
        for (int r = 0; r < ROWS; r++) {
            vf value = splat(x[r * DEPTH + element]);
            for (int i = 0; i < PARTS; i++) sums[r][0][i] += load(w + 16 * element + EACH * i) * value;
        }
}
typedef std::conditional_t<LANES == 16, TilePanel, WidePanel> OfMany;  // AVX-512 multiplies more with what it has widened
#endif

struct Ahead {  // so many lines of memory from `next` on at every so many pairs of elements
    const char* next;
    int64_t lines, every;  // the second a power of two
};

// ROWS of the same 16 rows, TILES times 16 columns, `steps` tiles deep. Meanwhile memory is prefetched.
template <int ROWS, int TILES, class Panel, class W>
inline void block(const Activation* x, const W* w, int64_t steps, bool first, float* y, int64_t y_row,
                  Ahead ahead) {
    Sum sums[ROWS][TILES][PARTS];  // copied one by one: as arrays GCC keeps them in memory, at half the speed
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < TILES; c++)
            for (int i = 0; i < PARTS; i++) {
                sums[r][c][i] = Sum{};
                if (!first) std::memcpy(&sums[r][c][i], y + r * y_row + 16 * c + EACH * i, sizeof(Sum));
            }
    for (int64_t d = 0; d < steps; d++, x += TILE)
        for (int64_t pair = 0; pair < DEPTH / 2; pair++, w += Panel::PAIR) {
            if (!(pair & (ahead.every - 1)))
                for (int64_t i = 0; i < ahead.lines; i++, ahead.next += 64) __builtin_prefetch(ahead.next, 0, 2);
            multiply_pair<ROWS, TILES>(sums, x + 2 * pair, w);
        }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < TILES; c++)
            for (int i = 0; i < PARTS; i++) std::memcpy(y + r * y_row + 16 * c + EACH * i, &sums[r][c][i], sizeof(Sum));
}

// `count` rows, 1 to MOST.
template <int MOST, int TILES, class Panel, class W>
inline void some_rows(int64_t count, const Activation* x, const W* w, int64_t steps, bool first, float* y,
                      int64_t y_row, const Ahead& ahead) {
    if constexpr (MOST > 1)
        if (count < MOST) return some_rows<MOST - 1, TILES, Panel>(count, x, w, steps, first, y, y_row, ahead);
    block<MOST, TILES, Panel>(x, w, steps, first, y, y_row, ahead);
}

// Of these rows, how many from `row` on go through a panel together: at most MOST, of the same 16, and as evenly divided
// as that allows.
template <int MOST>
inline int64_t rows_at_once(int64_t row, int64_t rows) {
    int32_t end = 16 - row % 16, left = rows - row < end ? int32_t(rows - row) : end, parts = (left + MOST - 1) / MOST;
    return (left + parts - 1) / parts;
}

// What lies behind the panel that the rows go through is prefetched in the meantime, in the order of addresses, a part
// of it at each turn.
template <class Panel, int MOST = Panel::BELOW, int TILES = Panel::BESIDE>
inline void panels(const uint16_t* w, int64_t depth, const Activation* x, int64_t rows, float* y, int64_t y_row,
                   int64_t first, int64_t last) {
    int64_t turns = 0, every = 1;
    for (int64_t row = 0; row < rows; row += rows_at_once<MOST>(row, rows)) turns += 4 / TILES;
    int64_t lines = way_of(rows) & PREFETCHING ? (3 + turns) / turns : 0;
    while (every < DEPTH / 2 && 8 * every <= turns) every *= 2;  // evenly: memory gives no more at a time
    Panel panel;
    for (int64_t g = first; g < last; g++)
        for (int64_t d = 0, steps; d < depth; d += steps) {
            steps = depth - d < Panel::DEEP ? depth - d : Panel::DEEP;
            const uint16_t* from = w + (g * depth + d) * 4 * TILE;
            const char *next = (const char*)(from + steps * 4 * TILE), *end = next + steps * 8 * TILE;
            panel.take(from, steps);
            for (int64_t row = 0, count; row < rows; row += count) {
                count = rows_at_once<MOST>(row, rows);
                for (int64_t c = 0; c < 4; c += TILES, next += steps * lines * (DEPTH / 2 / every) * 64)
                    some_rows<MOST, TILES, Panel>(count, x + (row / 16 * depth + d) * TILE + row % 16 * DEPTH,
                                                  panel.tile(c), steps, d == 0, y + row * y_row + g * GROUP + 16 * c,
                                                  y_row, {next, next < end ? lines : 0, every});
            }
        }
}

// Columns of the groups first .. last; columns of y are there up to a multiple of GROUP.
inline void multiply_tiled(const uint16_t* w, int64_t depth, const Activation* x, int64_t rows, float* y, int64_t y_row,
                           int64_t first, int64_t last) {
    if (rows == 1) panels<TilePanel, 1, 4>(w, depth, x, rows, y, y_row, first, last);
    else if (rows <= 16) panels<TilePanel>(w, depth, x, rows, y, y_row, first, last);
    else panels<OfMany>(w, depth, x, rows, y, y_row, first, last);
}
#endif

// One row of float32 as products with tiles want it: a row of [rows / 16][in / 32][16][32], padded with zeros, with the
// precision of bfloat16.
inline void prepare_tiled(const float* from, int64_t in, int64_t row, Activation* to) {
    Activation* out = to + (row / 16 * depth_of(in) * 16 + row % 16) * DEPTH;
    for (int64_t i = 0; i < in; i += DEPTH, out += TILE)
        for (int64_t j = 0, here = in - i < DEPTH ? in - i : DEPTH; j < DEPTH; j++) {
            bf16 value;
            put(&value, j < here ? from[i + j] : 0.0f);
            if constexpr (sizeof(Activation) == 2) std::memcpy(out + j, &value, 2);
            else out[j] = get(value);
        }
}

}  // namespace
