// Activations rounded to 16-bit integers with a scale for each 32 of them, and their products with stored values. Where
// processors multiply bytes (VNNI, ARM's dot products), an activation is 256 * high + low of two bytes with a sign, which
// are multiplied with the stored bytes one after the other, or, of four rows or more and with VNNI, stays whole and is
// multiplied as paired.h says. Elsewhere stored bytes are widened to 16 bits first. With --activations int8 processors that
// multiply bytes have one byte (PLANES) for an activation, and half the work.

#pragma once

#include <algorithm>

#include "packed_type.h"
#include "vectors.h"
#include "ways.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr int64_t COLUMNS_TOGETHER = 64, BLOCK = 32;
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD) || defined(WARMTURN_BYTES)
#define WARMTURN_BYTES
constexpr int64_t TOGETHER = 4;  // stored bytes have no sign: values of 8 bits and of tables have 128 added
#else
constexpr int64_t TOGETHER = 2;
#endif
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool SIGNED_BYTES = true;  // are what is multiplied with activations
#else
constexpr bool SIGNED_BYTES = false;
#endif
constexpr bool MULTIPLIES_PAIRS = TOGETHER == 4 && !SIGNED_BYTES;  // of 16 bits, as fast as four bytes
constexpr int32_t ADDED = TOGETHER == 4 && !SIGNED_BYTES ? 128 : 0;  // is still there when values are multiplied
constexpr int64_t TUPLES = BLOCK / TOGETHER, ROW = TOGETHER * COLUMNS_TOGETHER;  // of a block; bytes of a tuple of all
constexpr int32_t MOST_OF_BYTE = 127, MOST_ACTIVATION = 127 * 256 + 127;  // with a stored value added it fits 16 bits
// Where values or products are multiplied with whole scales: an activation plus a scaled value fits 16 bits, and what 32
// of them are without their signs, summed, keeps the sum of a block's products in 32 bits.
constexpr int32_t MOST_SCALED = MOST_VALUE * MOST_SCALE;
constexpr int32_t MOST_WITH_SCALES = MULTIPLIES_PAIRS ? INT16_MAX - MOST_SCALED : MOST_ACTIVATION;
constexpr int32_t MOST_OF_BLOCK = INT32_MAX / MOST_SCALED - BLOCK;  // each may be rounded up, by a half
static_assert(MOST_ACTIVATION + 128 <= INT16_MAX && -MOST_ACTIVATION - 128 >= INT16_MIN);
constexpr int64_t OCTET = 8, QUARTET = 4;  // rows that go through a block together in paired.h, where there are so many
constexpr bool is_paired(int64_t tuple, bool whole_scales) { return tuple % (whole_scales ? 4 : 2); }  // the fastest ones
constexpr bool FEW_REGISTERS = LANES < 16 && TOGETHER == 4 && !SIGNED_BYTES;  // twice as many sums; ARM has 32

typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint16_t vshorts __attribute__((vector_size(LANES * 4)));
typedef int8_t vfine_in_memory __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t vshort_in_memory __attribute__((vector_size(LANES * 2), aligned(1), may_alias));

}  // namespace

extern "C" {
int64_t warmturn_activation_bytes = 2;  // or 1, only where TOGETHER is 4
}

namespace {

inline vi larger_bits(vi a, vi b) { return a > b ? a : b; }

enum class Order { PLANES, BYTES, PAIRS };

struct Quantised {  // 32 activations, x[i] * scale each
#if defined(WARMTURN_BYTES)
    union {
        struct { int8_t high[BLOCK], low[BLOCK]; };           // of one byte: `high` alone
        struct { int16_t even[BLOCK / 2], odd[BLOCK / 2]; };  // in PAIRS
    };
    void set(int64_t i, vi values, Order order) {  // LANES of them
        add_sum(i, values);
        if (order == Order::PAIRS) return set_pairs(i, values);
        vi lows = order == Order::BYTES ? vi{} : values << 24 >> 24;
        vi highs = order == Order::BYTES ? values : (values - lows) >> 8;
        *(vfine_in_memory*)(low + i) = __builtin_convertvector(lows, vfine_in_memory);
        *(vfine_in_memory*)(high + i) = __builtin_convertvector(highs, vfine_in_memory);
    }
    void set_pairs(int64_t i, vi values) {
        typedef int64_t pairs __attribute__((vector_size(LANES * 4)));
        typedef int16_t narrow __attribute__((vector_size(LANES), aligned(2), may_alias));
        *(narrow*)(even + i / 2) = __builtin_convertvector((pairs)values, narrow);
        *(narrow*)(odd + i / 2) = __builtin_convertvector((pairs)values >> 32, narrow);
    }
    void finish(Order order, int64_t type) {
        if (order != Order::PAIRS) return;
        const bool whole = has_whole_scales(type);
        for (int half = 0; half < 2; half++) {
            uint32_t less = whole ? 0 : uint32_t(zero_of(type)) * uint32_t(sums[half]);
#pragma GCC unroll 8
            for (int i = 8 * half; i < 8 * half + 8; i++)
                less += is_paired(i / 2, whole) ? uint32_t(even[i] * odd[i]) : 0;
            begin[half] = 0 - less;
        }
        if (whole || !(type & SHORT)) begin[0] += begin[1];
    }
#else
    int16_t x[BLOCK];
    void set(int64_t i, vi values, Order) {  // LANES of them
        add_sum(i, values);
        *(vshort_in_memory*)(x + i) = __builtin_convertvector(values, vshort_in_memory);
    }
    void finish(Order, int64_t) {}
#endif
    float scale;
    int32_t sums[2];  // of the first and of the last 16
    float least;      // minus the sum of all 32, as they are
    uint32_t begin[2];  // in PAIRS: what is added to a block's products, or to those of its first and of its last 16
    void add_sum(int64_t i, vi values) {
        int32_t& sum = sums[i / (BLOCK / 2)];
        sum = (i % (BLOCK / 2) ? sum : 0) + fold(values, [](vi p, vi q) { return p + q; });
    }
    // Of one of so many parts: the sum of whole numbers, and minus that of activations.
    template <int PARTS> int32_t sum(int64_t part) const { return PARTS == 1 ? sums[0] + sums[1] : sums[part]; }
    template <int PARTS> float less(int64_t part) const { return PARTS == 1 ? least : -scale * float(sums[part]); }
};
static_assert(sizeof(Quantised) <= BLOCK * sizeof(float), "rows that are prepared have the room of floats");

inline vi broadcast(const void* from) {  // 4 bytes to each lane
    int32_t value;
    std::memcpy(&value, from, 4);
    return vi{} + value;
}

// Sums of products of LANES columns: `add` takes a tuple of each column, and of the activations the same tuple for all.
#if defined(WARMTURN_BYTES)
template <int PLANES>
struct Tuple {
    vi high, low;
    void load(const Quantised& of, int64_t tuple) {
        high = broadcast(of.high + tuple * TOGETHER);
        if (PLANES == 2) low = broadcast(of.low + tuple * TOGETHER);
    }
};

inline vi add_products(vi sum, vi w, vi x) {  // of four bytes without a sign (SIGNED_BYTES: with one) and four with one
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
#else
    for (int byte = 0; byte < 4; byte++) sum += ((w >> 8 * byte) & 255) * (x << 24 - 8 * byte >> 24);
    return sum;
#endif
}

template <int PLANES>
struct Dots {
    vi high{}, low{};
    void begin(int32_t with) { (PLANES == 2 ? low : high) = vi{} + with; }
    void add(vshorts w, const Tuple<PLANES>& x) {
        high = add_products(high, (vi)w, x.high);
        if (PLANES == 2) low = add_products(low, (vi)w, x.low);
    }
    vi total() const { return PLANES == 2 ? (high << 8) + low : high; }
};
#else
template <int>
struct Tuple {
    vi both;
    void load(const Quantised& of, int64_t tuple) { both = broadcast(of.x + tuple * TOGETHER); }
};

template <int PLANES>
struct Dots {
    vi sum{};
    void begin(int32_t with) { sum = vi{} + with; }
    void add(vshorts w, const Tuple<PLANES>& x) {
#if defined(__AVX512BW__)
        sum += (vi)_mm512_madd_epi16((__m512i)w, (__m512i)x.both);
#elif defined(__AVX2__)
        sum += (vi)_mm256_madd_epi16((__m256i)w, (__m256i)x.both);
#elif defined(__SSE2__) && !defined(__AVX__)
        sum += (vi)_mm_madd_epi16((__m128i)w, (__m128i)x.both);
#elif defined(__aarch64__)
        int16x8_t a = (int16x8_t)w, b = (int16x8_t)x.both;
        sum += (vi)vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
#else
        vi a = (vi)w, b = x.both;
        sum += ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
    }
    vi total() const { return sum; }
};
#endif

inline int64_t blocks_of(int64_t in) { return (in + BLOCK - 1) / BLOCK; }

inline bool can_pair(int64_t rows) { return MULTIPLIES_PAIRS && warmturn_activation_bytes == 2 && rows >= QUARTET; }

// How many of these rows, the first ones, are multiplied in pairs: octets, behind them a quartet, and with whole scales,
// where all have a prepared block in common, those that are left. Between `prepare_packed` and their products neither ways
// nor warmturn_activation_bytes may change.
inline int64_t rows_in_pairs(int64_t rows, int64_t type) {
    if (!can_pair(rows) || !(way_of(rows) & PAIRED)) return 0;
    return has_whole_scales(type) ? rows : rows / QUARTET * QUARTET;
}

struct RowsTogether {  // the first of them, and how many
    int64_t first, count;
};
// Those that go through a block together with one of `in_pairs`.
inline RowsTogether rows_beside(int64_t row, int64_t in_pairs) {
    const int64_t octets = in_pairs / OCTET * OCTET, quartets = in_pairs / QUARTET * QUARTET;
    if (row < octets) return {row / OCTET * OCTET, OCTET};
    if (row < quartets) return {octets, QUARTET};
    return {quartets, in_pairs - quartets};
}

// The sum of 32 numbers without their signs, times `factor`.
inline float sum_of_sizes(const float* values, float factor) {
    vf sum{};
    for (int64_t i = 0; i < BLOCK; i += LANES) sum += (vf)((vi)load(values + i) & 0x7fffffff) * factor;
    return fold(sum, [](vf p, vf q) { return p + q; });
}

// One of some rows of float32 as products with a packed weight of this type want it: a row of [rows][blocks], or of
// [blocks][count] for those that go together in pairs.
inline void prepare_packed(const float* from, int64_t in, int64_t row, int64_t rows, int64_t type, Quantised* to) {
    const int64_t in_pairs = rows_in_pairs(rows, type);
    const bool paired = row < in_pairs;
    const Order order = paired ? Order::PAIRS : TOGETHER == 4 && warmturn_activation_bytes == 1 ? Order::BYTES : Order::PLANES;
    const auto [first, step] = paired ? rows_beside(row, in_pairs) : RowsTogether{row, 1};
    Quantised* out = to + first * blocks_of(in) + row - first;
    const bool bytes = order == Order::BYTES, whole = has_whole_scales(type) && !bytes;
    const int32_t most_of = bytes ? MOST_OF_BYTE : whole ? MOST_WITH_SCALES : MOST_ACTIVATION;
    float rest[BLOCK] = {};
    for (int64_t at = 0; at < in; at += BLOCK, out += step) {
        const float* values = from + at;
        if (in - at < BLOCK) values = (const float*)std::memcpy(rest, values, (in - at) * sizeof(float));
        vi bits{};
        for (int64_t i = 0; i < BLOCK; i += LANES) bits = larger_bits(bits, (vi)load(values + i) & 0x7fffffff);
        int32_t largest = fold(bits, larger_bits);
        float size;  // no number where one is not
        std::memcpy(&size, &largest, sizeof size);
        if (whole) size = std::max(size, sum_of_sizes(values, float(MOST_WITH_SCALES) / MOST_OF_BLOCK));
        bool finite = size <= 3.0e38f;
        out->scale = finite ? size / most_of : NAN;
        float up = finite && size > 1e-30f ? most_of / size : 0;
        if (up == 0 && finite) out->scale = 0;
        for (int64_t i = 0; i < BLOCK; i += LANES) {
            vf shifted = (finite ? load(values + i) : vf{}) * up + 12582912.0f;  // the nearest integer in the low bits
            out->set(i, (vi)shifted - 0x4b400000, order);
        }
        out->finish(order, type);
        out->least = -out->scale * float(out->sums[0] + out->sums[1]);
    }
}

}  // namespace
