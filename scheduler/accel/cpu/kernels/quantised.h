// Activations rounded to 16-bit integers with a scale for each 32 of them, and their products with stored values. Where
// processors multiply bytes (VNNI, ARM's dot products), an activation is 256 * high + low of two bytes with a sign, which
// are multiplied with the stored bytes one after the other, or, of four rows or more and with VNNI, stays whole and is
// multiplied as paired.h says. Elsewhere stored bytes are widened to 16 bits first. With --activations int8 processors that multiply
// bytes have one byte (PLANES) for an activation, and half the work.

#pragma once

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
static_assert(MOST_ACTIVATION + 128 <= INT16_MAX && -MOST_ACTIVATION - 128 >= INT16_MIN);
constexpr int64_t OCTET = 8, QUARTET = 4;  // rows that go through a block together in paired.h
constexpr bool is_paired(int64_t tuple) { return tuple % 2; }
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
    void finish(Order order) {
        if (order != Order::PAIRS) return;
        for (int half = 0; half < 2; half++) {
            uint32_t sum = 0;
#pragma GCC unroll 8
            for (int i = 8 * half; i < 8 * half + 8; i++) sum += is_paired(i / 2) ? uint32_t(even[i] * odd[i]) : 0;
            products[half] = sum;
        }
    }
#else
    int16_t x[BLOCK];
    void set(int64_t i, vi values, Order) {  // LANES of them
        add_sum(i, values);
        *(vshort_in_memory*)(x + i) = __builtin_convertvector(values, vshort_in_memory);
    }
    void finish(Order) {}
#endif
    float scale;
    int32_t sums[2];  // of the first and of the last 16
    float least;      // minus the sum of all 32, as they are
    uint32_t products[2];  // of neighbours of tuples that are paired, summed: of the first and of the last 16
    void add_sum(int64_t i, vi values) {
        int32_t& sum = sums[i / (BLOCK / 2)];
        sum = (i % (BLOCK / 2) ? sum : 0) + fold(values, [](vi p, vi q) { return p + q; });
    }
    // Of one of so many parts: the sum of whole numbers, and minus that of activations.
    template <int PARTS> int32_t sum(int64_t part) const { return PARTS == 1 ? sums[0] + sums[1] : sums[part]; }
    template <int PARTS> float less(int64_t part) const { return PARTS == 1 ? least : -scale * float(sums[part]); }
    template <int PARTS> uint32_t product(int64_t part) const {
        return PARTS == 1 ? products[0] + products[1] : products[part];
    }
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

// How many of these rows, the first ones, are multiplied in pairs: octets, and behind them a quartet. Between
// `prepare_packed` and their products neither ways nor warmturn_activation_bytes may change.
inline int64_t rows_in_pairs(int64_t rows) { return can_pair(rows) && way_of(rows) & PAIRED ? rows / QUARTET * QUARTET : 0; }

// Of how many rows one of `in_pairs` is that are multiplied in pairs.
inline int64_t rows_beside(int64_t row, int64_t in_pairs) { return row < in_pairs / OCTET * OCTET ? OCTET : QUARTET; }

// One of some rows of float32 as products with packed weights want it: a row of [rows][blocks], or, of those that are
// multiplied in pairs, of [blocks][OCTET] for each octet and [blocks][QUARTET] for a quartet.
inline void prepare_packed(const float* from, int64_t in, int64_t row, int64_t rows, Quantised* to) {
    const int64_t in_pairs = rows_in_pairs(rows);
    const bool paired = row < in_pairs;
    const Order order = paired ? Order::PAIRS : TOGETHER == 4 && warmturn_activation_bytes == 1 ? Order::BYTES : Order::PLANES;
    const int64_t blocks = blocks_of(in), step = paired ? rows_beside(row, in_pairs) : 1;
    Quantised* out = to + row / step * step * blocks + row % step;
    const int32_t most_of = order == Order::BYTES ? MOST_OF_BYTE : MOST_ACTIVATION;
    float rest[BLOCK] = {};
    for (int64_t at = 0; at < in; at += BLOCK, out += step) {
        const float* values = from + at;
        if (in - at < BLOCK) values = (const float*)std::memcpy(rest, values, (in - at) * sizeof(float));
        vi bits{};
        for (int64_t i = 0; i < BLOCK; i += LANES) bits = larger_bits(bits, (vi)load(values + i) & 0x7fffffff);
        int32_t most = fold(bits, larger_bits);
        float size;  // no number where one is not
        std::memcpy(&size, &most, sizeof size);
        bool finite = size <= 3.0e38f;
        out->scale = finite ? size / most_of : NAN;
        float up = finite && size > 1e-30f ? most_of / size : 0;
        if (up == 0 && finite) out->scale = 0;
        for (int64_t i = 0; i < BLOCK; i += LANES) {
            vf shifted = (finite ? load(values + i) : vf{}) * up + 12582912.0f;  // the nearest integer in the low bits
            out->set(i, (vi)shifted - 0x4b400000, order);
        }
        out->finish(order);
        out->least = -out->scale * float(out->sums[0] + out->sums[1]);
    }
}

}  // namespace
