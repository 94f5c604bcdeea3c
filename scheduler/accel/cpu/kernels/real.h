// Rows of activations times a packed weight whose values are no whole numbers (REAL): w = scale * value, with the value
// from a table of 16 floats (NIBBLES), or a float of 8 bits (e4m3: sign, 4 bits of exponent, 3 of mantissa).
//
// For 64 columns: the table, where there is one; then the blocks of 32 elements of `in` follow each other. As many
// of them as `blocks_of_scale` says begin together with a float32 scale for each column. Values are [elements][64] bytes; of 4
// bits half as many, whose low halves are of one element and whose high halves are of the next.
//
// Activations stay float32. A row's sums are made element after element, and added up block after block.

#pragma once

#include "packed.h"

namespace {

constexpr int REAL_SCALES = 21;  // the bits of a type from here on are the logarithm of `blocks_of_scale`
constexpr float E4M3_UP = 256.0f;  // what makes a float of 8 bits of one of 16 with the same bits of exponent and mantissa

inline int64_t blocks_of_scale(int64_t type) { return int64_t(1) << (type >> REAL_SCALES & 3); }

inline int64_t real_bytes(int64_t type, int64_t blocks) {
    int64_t every = blocks_of_scale(type), nibbles = type & NIBBLES;
    int64_t scales = blocks / every * COLUMNS_TOGETHER * sizeof(float);
    return (nibbles ? TABLE_BYTES : 0) + scales + blocks * BLOCK * COLUMNS_TOGETHER / (nibbles ? 2 : 1);
}

inline void prepare_real(const float* from, int64_t in, int64_t row, float* to) {
    float* out = to + row * blocks_of(in) * BLOCK;
    std::memcpy(out, from, in * sizeof(float));
    std::memset(out + in, 0, (blocks_of(in) * BLOCK - in) * sizeof(float));
}

inline vu bytes_as_words(const uint8_t* from) {  // LANES of them
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    typedef uint8_t narrow __attribute__((vector_size(LANES), aligned(1), may_alias));
    return __builtin_convertvector(*(const narrow*)from, vu);
#endif
}

// Values of LANES columns of a block, from what is stored.
struct E4M3 {  // without the factor E4M3_UP
    static constexpr int BITS = 8;
    explicit E4M3(const uint8_t*) {}

    vf get(const uint8_t* w, int64_t element, int64_t column) const {
        const uint8_t* from = w + element * COLUMNS_TOGETHER + column;
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
        __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from)), 8);
        return (vf)_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(int16_t(0xbfff))));
#else
        vu bits = bytes_as_words(from);
        return halves((bits & 0x7fu) << 7 | (bits & 0x80u) << 8);
#endif
    }
};

struct Nibbles {
    static constexpr int BITS = 4;
    float table[16];
    explicit Nibbles(const uint8_t* from) { std::memcpy(table, from, sizeof table); }

    vf get(const uint8_t* w, int64_t element, int64_t column) const {
        vu both = bytes_as_words(w + element / 2 * COLUMNS_TOGETHER + column), code = element % 2 ? both >> 4 : both & 15u;
#if defined(__AVX512F__)
        return (vf)_mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
        __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)code);
        __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)code);
        return (vf)_mm256_blendv_ps(low, high, (__m256)(code << 28));
#else
        vf found;
        for (int i = 0; i < LANES; i++) found[i] = table[code[i]];
        return found;
#endif
    }
};

struct Ready {  // a block as floats
    alignas(64) float values[BLOCK][COLUMNS_TOGETHER];

    template <class Values>
    void prepare(const Values& of, const uint8_t* w) {
        for (int64_t element = 0; element < BLOCK; element++)
            for (int64_t column = 0; column < COLUMNS_TOGETHER; column += LANES)
                store(values[element] + column, of.get(w, element, column));
    }
    vf get(const uint8_t*, int64_t element, int64_t column) const { return load(values[element] + column); }
};

// ROWS rows times 64 columns of one block.
template <int ROWS, class Values>
inline void real_block(const Values& of, const uint8_t* w, const float* x, int64_t x_row, const float* scales, bool first,
                       float (*sums)[COLUMNS_TOGETHER]) {
    constexpr int COUNT = 4;
    for (int64_t column = 0; column < COLUMNS_TOGETHER; column += COUNT * LANES) {
        vf found[ROWS][COUNT] = {};
#pragma GCC unroll 2
        for (int64_t element = 0; element < BLOCK; element++)
            for (int n = 0; n < COUNT; n++) {
                vf value = of.get(w, element, column + n * LANES);
                for (int r = 0; r < ROWS; r++) found[r][n] = fused(value, splat(x[r * x_row + element]), found[r][n]);
            }
        for (int r = 0; r < ROWS; r++)
            for (int n = 0; n < COUNT; n++) {
                int64_t at = column + n * LANES;
                store(sums[r] + at, fused(found[r][n], load(scales + at), first ? vf{} : load(sums[r] + at)));
            }
    }
}

template <int ROWS, class Values>
inline int64_t real_rows(const Values& of, const uint8_t* w, const float* x, int64_t x_row, int64_t row, int64_t rows,
                         const float* scales, bool first, float (*sums)[COLUMNS_TOGETHER]) {
    for (; row + ROWS <= rows; row += ROWS)
        real_block<ROWS>(of, w, x + row * x_row, x_row, scales, first, sums + row);
    return row;
}

// Up to MOST_ROWS rows times 64 columns.
template <class Values>
inline void real_columns(const uint8_t* w, int64_t type, int64_t blocks, const float* x, int64_t rows, float* y,
                         int64_t y_row) {
    constexpr int MANY = LANES == 16 ? 4 : 2;
    float sums[MOST_ROWS][COLUMNS_TOGETHER], scales[COLUMNS_TOGETHER];
    int64_t x_row = blocks * BLOCK, every = blocks_of_scale(type), bytes = BLOCK * COLUMNS_TOGETHER * Values::BITS / 8;
    Values of(w);
    Ready ready;
    if (Values::BITS == 4) w += TABLE_BYTES;
    for (int64_t b = 0; b < blocks; b++, w += bytes, x += BLOCK) {
        if (b % every == 0) {
            for (int64_t c = 0; c < COLUMNS_TOGETHER; c += LANES)
                store(scales + c, load((const float*)w + c) * (Values::BITS == 8 ? E4M3_UP : 1.0f));
            w += sizeof scales;
        }
        for (int64_t ahead = 0; way_of(rows) & PREFETCHING && ahead < bytes; ahead += LINE)
            __builtin_prefetch(w + DISTANCE + ahead, 0, 2);
        if (rows < 2) {
            real_rows<1>(of, w, x, x_row, 0, rows, scales, b == 0, sums);
            continue;
        }
        ready.prepare(of, w);
        int64_t done = real_rows<MANY>(ready, w, x, x_row, 0, rows, scales, b == 0, sums);
        real_rows<1>(ready, w, x, x_row, done, rows, scales, b == 0, sums);
    }
    for (int64_t row = 0; row < rows; row++) std::memcpy(y + row * y_row, sums[row], sizeof sums[row]);
}

// Columns of the groups first .. last; columns of y are there up to a multiple of 64.
inline void multiply_real(const void* weight, int64_t type, int64_t in, const float* x, int64_t rows, float* y,
                          int64_t y_row, int64_t first, int64_t last) {
    int64_t blocks = blocks_of(in), bytes = real_bytes(type, blocks);
    for (int64_t g = first, done; g < last; g++)
        for (int64_t row = 0; row < rows; row += done) {
            done = rows - row < MOST_ROWS ? rows - row : MOST_ROWS;
            const uint8_t* w = (const uint8_t*)weight + g * bytes;
            const float* from = x + row * blocks * BLOCK;
            float* to = y + row * y_row + g * COLUMNS_TOGETHER;
            if (type & NIBBLES) real_columns<Nibbles>(w, type, blocks, from, done, to, y_row);
            else real_columns<E4M3>(w, type, blocks, from, done, to, y_row);
        }
}

}  // namespace
