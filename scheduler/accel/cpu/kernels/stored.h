// What packed weights store, as products want it: scales and minima of a block as floats, values of so many bits as
// bytes. packed.h says in which order they lie.

#pragma once

#include "quantised.h"

namespace {

constexpr int64_t MOST_ROWS = 48;  // at a time: their results of 64 columns fit the nearest cache
static_assert(MOST_ROWS % OCTET == 0, "octets are not cut");
constexpr int64_t LINE = 64, DISTANCE = 4096;  // bytes: with PREFETCHING, what is so far ahead is asked for
constexpr bool BYTES_OF_16 = TOGETHER == 4 && LANES == 16;  // values are used as they are read, 64 at a time

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
inline vi whole_numbers(const uint8_t* from) {  // LANES bytes with a sign
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    return __builtin_convertvector(*(const vfine_in_memory*)from, vi);
#endif
}
inline vf as_floats(const uint8_t* from) { return __builtin_convertvector(whole_numbers(from), vf); }

// TOGETHER * LANES bytes as they are multiplied: whole registers, or one 16-bit integer each, with a sign or without.
#if defined(WARMTURN_BYTES)
inline vshorts values_of(const uint8_t* from, bool has_sign) {
    vshorts bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return has_sign && SIGNED_BYTES ? bytes ^ 0x8080 : bytes;  // less 128
}
constexpr uint16_t ONES = 0x0101;  // the lowest bit of every value
#else
inline vshorts values_of(const uint8_t* from, bool has_sign) {
#if defined(__AVX512BW__)
    __m256i bytes = _mm256_loadu_si256((const __m256i*)from);
    return (vshorts)(has_sign ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes));
#elif defined(__AVX2__)
    __m128i bytes = _mm_loadu_si128((const __m128i*)from);
    return (vshorts)(has_sign ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes));
#else
    typedef uint8_t narrow __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
    typedef int8_t narrow_with_sign __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
    if (!has_sign) return __builtin_convertvector(*(const narrow*)from, vshorts);
    return __builtin_convertvector(*(const narrow_with_sign*)from, vshorts);
#endif
}
constexpr uint16_t ONES = 0x0001;
#endif

// What stored values of 4 bits stand for.
struct Themselves {
    static constexpr bool LOOKED_UP = false;
    vshorts of(vshorts values) const { return values; }
};

struct LookedUp {  // in a table of 16 bytes, which are stored with a sign where TOGETHER is 2
    static constexpr bool LOOKED_UP = true;
    alignas(64) uint8_t table[sizeof(vshorts)];

    explicit LookedUp(const uint8_t* from) {
        for (size_t i = 0; i < sizeof table; i++) table[i] = from[i % 16] ^ (SIGNED_BYTES ? 128 : 0);
    }
    vshorts of(vshorts values) const {
        vshorts found;
#if defined(__AVX512BW__)
        found = (vshorts)_mm512_shuffle_epi8(_mm512_load_si512(table), (__m512i)values);
#elif defined(__AVX2__)
        found = (vshorts)_mm256_shuffle_epi8(_mm256_load_si256((const __m256i*)table), (__m256i)values);
#elif defined(__aarch64__)
        found = (vshorts)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)values);
#else
        uint8_t bytes[sizeof values];
        std::memcpy(bytes, &values, sizeof values);
        for (uint8_t& byte : bytes) byte = table[byte];
        std::memcpy(&found, bytes, sizeof found);
#endif
        if (TOGETHER == 4) return found;
        typedef int16_t with_sign __attribute__((vector_size(LANES * 4)));
        return (vshorts)((with_sign)(found << 8) >> 8);  // the high byte of each was looked up for nothing
    }
};

// Scales and minima of one block of 64 columns: [parts of the block][64]. As floats, but for whole scales.
struct Scales {
    float scales[2][COLUMNS_TOGETHER], minima[2][COLUMNS_TOGETHER], coarse[2][COLUMNS_TOGETHER];
    int32_t fine[2][COLUMNS_TOGETHER];  // if WHOLE: the scales without the coarse ones

    // The next block of 64 columns, the `number`th of its row: `from` is behind them afterwards.
    template <class Scaling>
    void next(const uint8_t*& from, int64_t type, int64_t number) {
        constexpr int parts = Scaling::PARTS;
        bool least = type & MINIMA, floats = type & FLOATS;
        if (type & FINE) {
            if (number % BLOCKS_OF_COARSE == 0)
                for (int kind = 0; kind < (least ? 2 : 1); kind++) read(from, false, coarse[kind]);
            for (int part = 0; part < parts; part++)
                if constexpr (Scaling::WHOLE) read_whole(from, fine[part]);
                else read_fine(from, coarse[0], scales[part]);
            for (int part = 0; least && part < parts; part++) read_fine(from, coarse[1], minima[part]);
        } else {
            for (int part = 0; part < parts; part++) read(from, floats, scales[part]);
            for (int part = 0; least && part < parts; part++)
                if (type & ZEROS) read_fine(from, scales[part], minima[part]);
                else read(from, floats, minima[part]);
        }
    }

    vi fine_of(int64_t part, int64_t column) const {
        vi numbers;
        std::memcpy(&numbers, fine[part] + column, sizeof numbers);
        return numbers;
    }
    vshorts fine_in_pairs(int64_t part, int64_t column) const {  // each of them twice
        vi numbers = fine_of(part, column);
        return (vshorts)(numbers << 16 | (numbers & 0xffff));
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
    static void read_whole(const uint8_t*& from, int32_t* to) {
        for (int64_t c = 0; c < COLUMNS_TOGETHER; c += LANES) {
            vi wide = whole_numbers(from + c);
            std::memcpy(to + c, &wide, sizeof wide);
        }
        from += COLUMNS_TOGETHER;
    }
};

// So many tuples go through a row together in paired.h, so that multiplications and additions alternate: with COUNT
// registers of columns of each, more have no place in registers.
template <int COUNT>
constexpr int MIXED_OF = LANES == 16 && COUNT == 2 ? 2 : 1;

// Values of BITS each as they are multiplied, from what is stored: some tuples of COUNT registers of columns.
template <int BITS, int COUNT, class Codes>
struct Stored {
    static constexpr int NEXT = COUNT, HIGH = BITS == 8 ? 0 : BITS - 4;
    static constexpr bool CENTRED = false;
    static constexpr int AT_ONCE = BITS == 8 ? 1 : HIGH ? 8 / HIGH : 2;  // tuples
    static constexpr int MIXED = BITS == 8 ? 1 : MIXED_OF<COUNT>;
    static constexpr int64_t HIGHS = HIGH ? ROW : 0, LOWS = BITS == 8 ? ROW : AT_ONCE / 2 * ROW;  // bytes of these tuples
    static constexpr int64_t BYTES = BLOCK * COLUMNS_TOGETHER * BITS / 8;
    const uint8_t *high, *low;
    const Codes& codes;

    Stored(const uint8_t* w, int64_t tuple, int64_t column, const Codes& codes)
        : high(w + tuple / AT_ONCE * (HIGHS + LOWS) + TOGETHER * column), low(high + HIGHS), codes(codes) {}

    vshorts get(int k, int n) const {
        int64_t at = n * TOGETHER * LANES;
        if constexpr (BITS == 8) return values_of(low + at, true);
        vshorts both = values_of(low + k / 2 * ROW + at, false), value = (k % 2 ? both >> 4 : both) & uint16_t(ONES * 15);
        if constexpr (HIGH > 0) {
            constexpr uint16_t mask = uint16_t(ONES * (((1 << HIGH) - 1) << 4));
            vshorts bits = values_of(high + at, false);
            int up = 4 - k * HIGH;
            value |= (up >= 0 ? bits << up : bits >> -up) & mask;
        }
        return codes.of(value);
    }
    static constexpr int32_t SHIFT = BITS == 8 || Codes::LOOKED_UP ? ADDED : 0;  // of bytes; `split` takes it away
    // Of each column's tuple the first and third value, and the second and fourth, in 16 bits each.
    void split(int k, int n, vshorts& even, vshorts& odd) const {
        if constexpr (BITS == 4 && !Codes::LOOKED_UP) {
            vshorts two = values_of(low + n * TOGETHER * LANES, false);
            even = (k ? two >> 4 : two) & 0x000f;
            odd = k ? two >> 12 : two >> 8 & 0x000f;
        } else {
            vshorts value = get(k, n);
            even = (value & 0x00ff) - uint16_t(SHIFT), odd = (value >> 8) - uint16_t(SHIFT);
        }
    }
};

// The same from a block that was prepared before, in whole registers; CENTRED: the zero is subtracted already.
template <int COUNT>
struct Prepared {
    static constexpr int NEXT = COUNT, AT_ONCE = 1;
    static constexpr bool CENTRED = TOGETHER == 2;
    const uint8_t* from;

    template <class Codes>
    Prepared(const uint8_t* w, int64_t tuple, int64_t column, const Codes&) : from(w + (tuple * COLUMNS_TOGETHER + column) * 4) {}

    vshorts get(int, int n) const {
        vshorts value;
        std::memcpy(&value, from + n * sizeof value, sizeof value);
        return value;
    }
};

struct PreparedBlock {
    alignas(64) uint8_t bytes[TUPLES * COLUMNS_TOGETHER * 4];

    template <int BITS, class Codes>
    const uint8_t* prepare(const uint8_t* w, const Codes& codes, int32_t zero) {
        using Values = Stored<BITS, 1, Codes>;
        if (BITS == 8 && TOGETHER == 4 && !SIGNED_BYTES) return w;
        for (int64_t tuple = 0; tuple < TUPLES; tuple += Values::AT_ONCE)
            for (int64_t column = 0; column < COLUMNS_TOGETHER; column += LANES)
                for (int k = 0; k < Values::AT_ONCE; k++) {
                    vshorts value = Values(w, tuple, column, codes).get(k, 0);
                    if (TOGETHER == 2) value -= uint16_t(zero);
                    std::memcpy(bytes + ((tuple + k) * COLUMNS_TOGETHER + column) * 4, &value, sizeof value);
                }
        return bytes;
    }
};

// How sums of a block become floats. PARTS: of its elements that have a scale of their own. WHOLE: products are multiplied
// with these, whole numbers, before they become floats, once for the block.
template <int PARTS_OF_BLOCK, bool IS_WHOLE>
struct BlockScaling {
    static constexpr int PARTS = PARTS_OF_BLOCK, SUMS = IS_WHOLE ? 1 : PARTS;
    static constexpr bool WHOLE = IS_WHOLE;
};

// The products of one row with LANES columns of a block, or of one of its SUMS, added to what became of the blocks before.
template <class Scaling>
inline void add_scaled(vi products, const Quantised& x, int64_t part, const Scales& of, int64_t column, int64_t type,
                       bool first, float* to) {
    const float* scales = Scaling::WHOLE ? of.coarse[0] : of.scales[part];
    vf before = first && part == 0 ? vf{} : load(to);
    vf value = fused(__builtin_convertvector(products, vf), load(scales + column) * x.scale, before);
    if (type & MINIMA)
        value = fused(load(of.minima[part] + column), splat(x.template less<Scaling::PARTS>(part)), value);
    if (Scaling::WHOLE && type & MINIMA)
        value = fused(load(of.minima[1] + column), splat(x.template less<Scaling::PARTS>(1)), value);
    store(to, value);
}

}  // namespace
