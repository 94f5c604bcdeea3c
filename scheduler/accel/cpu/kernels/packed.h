// Rows of activations times a weight of few bits: w = scale * (value - zero) - minimum, with a scale for each 32 or 16
// elements of `in`. A minimum may be kept as a whole number of scales (ZEROS). scheduler/accel/cpu/packed_matrix.py lays
// weights out as they are read here.
//
// For 64 columns the blocks of 32 elements of `in` follow each other: scales, minima, then values as [16 pairs][64][2]
// bytes; or, of 4 bits, [8][64][2] bytes whose low halves are of one pair and whose high halves are of the next. Values
// of 5 and 6 bits have their low 4 so, and behind them the others: [2] or [4][64][2] bytes of 8 or 4 pairs. With scales of
// two levels (FINE) eight blocks have coarse ones in common, which come first.
//
// Activations are rounded to 16-bit integers with a scale for each 32 of them, so that products are exact integers; what
// is added to a result, and in which order, does not depend on other rows.

#pragma once

#include "vectors.h"
#include "ways.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// A packed weight's type: these bits, eight above them for the zero, and above those how many bits values have beside
// their low 4, where they have NIBBLES.
constexpr int64_t PACKED = 16, NIBBLES = 1, FLOATS = 2, FINE = 4, MINIMA = 8, SHORT = 32, ZEROS = 64;
constexpr int64_t COLUMNS_TOGETHER = 64, BLOCK = 32, BLOCKS_OF_COARSE = 8;
constexpr int64_t MOST_ROWS = 48;  // at a time: their results of 64 columns fit the nearest cache
constexpr int64_t LINE = 64, DISTANCE = 4096;  // bytes: with PREFETCHING, what is so far ahead is asked for
constexpr int64_t MANY_ROWS = 8;   // from so many on, widening the values of a block once is faster, of 4 and 8 bits

typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef int16_t vpairs __attribute__((vector_size(LANES * 4)));  // of elements, a pair in each lane
typedef uint16_t vnibbles __attribute__((vector_size(LANES * 4)));
typedef int8_t vbytes_in_memory __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
typedef uint8_t vnibbles_in_memory __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
typedef int8_t vfine_in_memory __attribute__((vector_size(LANES), aligned(1), may_alias));

struct Quantised {  // 32 activations, x[i] * scale each
    int16_t x[BLOCK];
    float scale;
    int32_t sums[2];  // of the first and of the last 16
    int32_t unused;
};

inline vi add_products(vi sum, vpairs w, vpairs x) {  // of both elements of each pair
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
    return sum + (vi)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif defined(__AVX2__)
    return sum + (vi)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__SSE2__) && !defined(__AVX__)
    return sum + (vi)_mm_madd_epi16((__m128i)w, (__m128i)x);
#elif defined(__aarch64__)
    int16x8_t a = (int16x8_t)w, b = (int16x8_t)x;
    return sum + (vi)vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
#else
    vi a = (vi)w, b = (vi)x;
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// a * b + c with the same rounding wherever it stands: left to themselves, compilers fuse one place and not the other.
inline vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline vf float16s(const void* from) {  // LANES of them
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__) && defined(__AVX__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    vh_in_memory bits;
    std::memcpy(&bits, from, sizeof bits);
    return halves(__builtin_convertvector(bits, vu));
#endif
}

// Bytes of memory in wider registers. Without instructions for it, compilers do this in several steps, or one by one.
inline vf as_floats(const uint8_t* from) {  // LANES bytes with a sign
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const vfine_in_memory*)from, vi), vf);
#endif
}

inline vpairs as_pairs(const uint8_t* from) {  // 2 * LANES bytes with a sign
#if defined(__AVX512BW__)
    return (vpairs)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return (vpairs)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
#else
    return __builtin_convertvector(*(const vbytes_in_memory*)from, vpairs);
#endif
}

inline vnibbles as_nibbles(const uint8_t* from) {  // 2 * LANES bytes without one
#if defined(__AVX512BW__)
    return (vnibbles)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return (vnibbles)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from));
#else
    return __builtin_convertvector(*(const vnibbles_in_memory*)from, vnibbles);
#endif
}

inline int64_t blocks_of(int64_t in) { return (in + BLOCK - 1) / BLOCK; }

// One row of float32 as products with packed weights want it: a row of [rows][blocks].
inline void prepare_packed(const float* from, int64_t in, int64_t row, Quantised* to) {
    Quantised* out = to + row * blocks_of(in);
    for (int64_t at = 0; at < in; at += BLOCK, out++) {
        float values[BLOCK] = {};
        std::memcpy(values, from + at, (in - at < BLOCK ? in - at : BLOCK) * sizeof(float));
        vf most{}, sum{};
        for (int64_t i = 0; i < BLOCK; i += LANES) {
            vf value = load(values + i);
            most = larger(most, (vf)((vu)value & 0x7fffffffu));
            sum += value;  // NaN where one is, also where `larger` has passed it over
        }
        float size = fold(most, larger), all = fold(sum, [](vf p, vf q) { return p + q; });
        bool finite = size <= 3.0e38f && all == all;
        out->scale = finite ? size / 32767 : NAN;
        float up = finite && size > 1e-30f ? 32767 / size : 0;
        if (up == 0 && finite) out->scale = 0;
        for (int64_t i = 0; i < BLOCK; i++) {
            float shifted = (finite ? values[i] : 0.0f) * up + 12582912.0f;  // the nearest integer in the low bits
            int32_t bits;
            std::memcpy(&bits, &shifted, 4);
            out->x[i] = int16_t(bits - 0x4b400000);
        }
        for (int64_t half = 0; half < 2; half++) {
            out->sums[half] = 0;
            for (int64_t i = 0; i < BLOCK / 2; i++) out->sums[half] += out->x[half * BLOCK / 2 + i];
        }
    }
}

// Scales and minima of one block of 64 columns, as floats: [parts of the block][64].
struct Scales {
    float scales[2][COLUMNS_TOGETHER], minima[2][COLUMNS_TOGETHER], coarse[2][COLUMNS_TOGETHER];

    // The next block of 64 columns, the `number`th of its row: `from` is behind them afterwards.
    void next(const uint8_t*& from, int64_t type, int64_t number, int parts) {
        bool least = type & MINIMA, floats = type & FLOATS;
        if (type & FINE) {
            if (number % BLOCKS_OF_COARSE == 0)
                for (int kind = 0; kind < (least ? 2 : 1); kind++) read(from, false, coarse[kind]);
            for (int part = 0; part < parts; part++) read_fine(from, coarse[0], scales[part]);
            for (int part = 0; least && part < parts; part++) read_fine(from, coarse[1], minima[part]);
        } else {
            for (int part = 0; part < parts; part++) read(from, floats, scales[part]);
            for (int part = 0; least && part < parts; part++)
                if (type & ZEROS) read_fine(from, scales[part], minima[part]);
                else read(from, floats, minima[part]);
        }
    }

    static void read(const uint8_t*& from, bool floats, float* to) {
        for (int64_t c = 0; c < COLUMNS_TOGETHER; c += LANES)
            store(to + c, floats ? load((const float*)from + c) : float16s(from + 2 * c));
        from += COLUMNS_TOGETHER * (floats ? 4 : 2);
    }
    static void read_fine(const uint8_t*& from, const float* coarse, float* to) {
        for (int64_t c = 0; c < COLUMNS_TOGETHER; c += LANES) store(to + c, load(coarse + c) * as_floats(from + c));
        from += COLUMNS_TOGETHER;
    }
};

// Values of BITS each as 16-bit integers, from what is stored: PAIRS pairs of elements of COUNT registers of columns.
template <int BITS, int COUNT>
struct Stored {
    static constexpr int NEXT = COUNT, HIGH = BITS == 8 ? 0 : BITS - 4;
    static constexpr int PAIRS = BITS == 8 ? 1 : HIGH ? 8 / HIGH : 2;
    static constexpr int64_t ROW = 2 * COLUMNS_TOGETHER, LOW = BLOCK / 4 * ROW, BYTES = BLOCK * COLUMNS_TOGETHER * BITS / 8;
    const uint8_t *low, *high;

    Stored(const uint8_t* w, int64_t pair, int64_t column)
        : low(w + (BITS == 8 ? pair : pair / 2) * ROW + 2 * column), high(w + LOW + pair / PAIRS * ROW + 2 * column) {}

    vpairs get(int k, int n) const {
        if constexpr (BITS == 8) return as_pairs(low + n * 2 * LANES);
        vnibbles both = as_nibbles(low + k / 2 * ROW + n * 2 * LANES), value = k % 2 ? both >> 4 : both & 15;
        if constexpr (HIGH > 0) {
            constexpr uint16_t mask = ((1 << HIGH) - 1) << 4;
            vnibbles bits = as_nibbles(high + n * 2 * LANES);
            int up = 4 - k * HIGH;
            value |= (up >= 0 ? bits << up : bits >> -up) & mask;
        }
        return (vpairs)value;
    }
};

// The same from a block that was widened before: [16 pairs][64][2] of int16.
template <int COUNT>
struct Widened {
    static constexpr int NEXT = COUNT, PAIRS = 1;
    const uint8_t* from;

    Widened(const uint8_t* w, int64_t pair, int64_t column) : from(w + (pair * COLUMNS_TOGETHER + column) * 4) {}

    vpairs get(int, int n) const {
        vpairs value;
        std::memcpy(&value, from + n * sizeof value, sizeof value);
        return value;
    }
};

struct WideBlock {
    alignas(64) uint8_t bytes[BLOCK * COLUMNS_TOGETHER * 2];

    template <int BITS>
    void widen(const uint8_t* w) {
        using Values = Stored<BITS, 1>;
        for (int64_t pair = 0; pair < BLOCK / 2; pair += Values::PAIRS)
            for (int64_t column = 0; column < COLUMNS_TOGETHER; column += LANES)
                for (int k = 0; k < Values::PAIRS; k++) {
                    vpairs value = Values(w, pair, column).get(k, 0);
                    std::memcpy(bytes + ((pair + k) * COLUMNS_TOGETHER + column) * 4, &value, sizeof value);
                }
    }
};

struct Rows {  // of activations, `each` blocks apart, and what becomes of them: [rows][64]
    const Quantised* x;
    int64_t each;
    float (*sums)[COLUMNS_TOGETHER];
};

// ROWS rows from `row` on times 64 columns of one block.
template <class Values, int PARTS_OF_BLOCK, int ROWS>
inline void packed_block(const Rows& rows, int64_t row, const uint8_t* w, const Scales& of, int64_t type, bool first) {
    constexpr int64_t PAIRS = BLOCK / 2 / PARTS_OF_BLOCK, NEXT = Values::NEXT;
    int32_t zero = int8_t(type >> 8);
    const Quantised* x[ROWS];
    for (int r = 0; r < ROWS; r++) x[r] = rows.x + (row + r) * rows.each;
    for (int64_t column = 0; column < COLUMNS_TOGETHER; column += NEXT * LANES)
        for (int64_t part = 0; part < PARTS_OF_BLOCK; part++) {
            vi sums[ROWS][NEXT];
            int32_t all[ROWS];
            for (int r = 0; r < ROWS; r++) {
                all[r] = PARTS_OF_BLOCK == 1 ? x[r]->sums[0] + x[r]->sums[1] : x[r]->sums[part];
                for (int n = 0; n < NEXT; n++) sums[r][n] = vi{} - zero * all[r];
            }
            for (int64_t pair = part * PAIRS; pair < (part + 1) * PAIRS; pair += Values::PAIRS) {
                Values values(w, pair, column);
                for (int k = 0; k < Values::PAIRS; k++) {
                    vpairs both[ROWS];
                    for (int r = 0; r < ROWS; r++) {
                        int32_t two;
                        std::memcpy(&two, x[r]->x + 2 * (pair + k), 4);
                        both[r] = (vpairs)(vi{} + two);
                    }
                    for (int n = 0; n < NEXT; n++) {
                        vpairs value = values.get(k, n);
                        for (int r = 0; r < ROWS; r++) sums[r][n] = add_products(sums[r][n], value, both[r]);
                    }
                }
            }
            for (int r = 0; r < ROWS; r++)
                for (int n = 0; n < NEXT; n++) {
                    int64_t c = column + n * LANES;
                    float *to = rows.sums[row + r] + c, scale = x[r]->scale;
                    vf value = first && part == 0 ? vf{} : load(to);
                    value = fused(__builtin_convertvector(sums[r][n], vf), load(of.scales[part] + c) * scale, value);
                    if (type & MINIMA) value = fused(load(of.minima[part] + c), splat(-scale * float(all[r])), value);
                    store(to, value);
                }
        }
}

// The rows from `row` on, ROWS at a time: the first that is left.
template <class Values, int PARTS_OF_BLOCK, int ROWS>
inline int64_t packed_rows(const Rows& rows, int64_t row, int64_t count, const uint8_t* w, const Scales& of, int64_t type,
                           bool first) {
    for (; row + ROWS <= count; row += ROWS) packed_block<Values, PARTS_OF_BLOCK, ROWS>(rows, row, w, of, type, first);
    return row;
}

// Up to MOST_ROWS rows times 64 columns.
template <int BITS, int PARTS_OF_BLOCK>
inline void packed_columns(const uint8_t* w, int64_t type, int64_t blocks, const Quantised* x, int64_t rows, float* y,
                           int64_t y_row) {
    constexpr bool SIMPLE = BITS % 4 == 0;  // others take more registers, and more time to widen
    using Values = Stored<BITS, SIMPLE ? 4 : 2>;
    float sums[MOST_ROWS][COLUMNS_TOGETHER];
    Scales of;
    WideBlock wide;
    const uint8_t* ahead = way_of(rows) & PREFETCHING ? w + DISTANCE : nullptr;
    for (int64_t b = 0; b < blocks; b++, w += Values::BYTES) {
        of.next(w, type, b, PARTS_OF_BLOCK);
        for (; ahead && ahead < w + Values::BYTES + DISTANCE; ahead += LINE) __builtin_prefetch(ahead);
        Rows all{x + b, blocks, sums};
        if (rows < (SIMPLE ? MANY_ROWS : 2)) {
            int64_t done = packed_rows<Values, PARTS_OF_BLOCK, 2>(all, 0, rows, w, of, type, b == 0);
            packed_rows<Values, PARTS_OF_BLOCK, 1>(all, done, rows, w, of, type, b == 0);
        } else {
            wide.widen<BITS>(w);
            int64_t done = packed_rows<Widened<2>, PARTS_OF_BLOCK, 4>(all, 0, rows, wide.bytes, of, type, b == 0);
            done = packed_rows<Widened<4>, PARTS_OF_BLOCK, 2>(all, done, rows, wide.bytes, of, type, b == 0);
            packed_rows<Widened<4>, PARTS_OF_BLOCK, 1>(all, done, rows, wide.bytes, of, type, b == 0);
        }
    }
    for (int64_t row = 0; row < rows; row++) std::memcpy(y + row * y_row, sums[row], sizeof sums[row]);
}

template <int BITS>
inline void packed_some(const uint8_t* w, int64_t type, int64_t blocks, const Quantised* x, int64_t rows, float* y,
                        int64_t y_row) {
    if (type & SHORT) packed_columns<BITS, 2>(w, type, blocks, x, rows, y, y_row);
    else packed_columns<BITS, 1>(w, type, blocks, x, rows, y, y_row);
}

inline int64_t bits_of(int64_t type) { return type & NIBBLES ? 4 + (type >> 16) : 8; }

// Bytes of 64 columns.
inline int64_t packed_bytes(int64_t type, int64_t blocks) {
    int64_t kinds = type & MINIMA ? 2 : 1, each = type & FINE ? 1 : type & FLOATS ? 4 : 2;
    int64_t numbers = (type & SHORT ? 2 : 1) * (each + (kinds - 1) * (type & ZEROS ? 1 : each));
    int64_t coarse = type & FINE ? blocks / BLOCKS_OF_COARSE * COLUMNS_TOGETHER * 2 * kinds : 0;
    return coarse + blocks * COLUMNS_TOGETHER * (numbers + BLOCK * bits_of(type) / 8);
}

// Columns of the groups first .. last; columns of y are there up to a multiple of 64.
inline void multiply_packed(const void* weight, int64_t type, int64_t in, const Quantised* x, int64_t rows, float* y,
                            int64_t y_row, int64_t first, int64_t last) {
    int64_t blocks = blocks_of(in), bytes = packed_bytes(type, blocks);
    for (int64_t g = first, done; g < last; g++)
        for (int64_t row = 0; row < rows; row += done) {
            done = rows - row < MOST_ROWS ? rows - row : MOST_ROWS;
            const uint8_t* w = (const uint8_t*)weight + g * bytes;
            const Quantised* from = x + row * blocks;
            float* to = y + row * y_row + g * COLUMNS_TOGETHER;
            switch (bits_of(type)) {
                case 4: packed_some<4>(w, type, blocks, from, done, to, y_row); break;
                case 5: packed_some<5>(w, type, blocks, from, done, to, y_row); break;
                case 6: packed_some<6>(w, type, blocks, from, done, to, y_row); break;
                default: packed_some<8>(w, type, blocks, from, done, to, y_row);
            }
        }
}

}  // namespace
