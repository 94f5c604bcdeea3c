// Activations rounded to 16-bit integers with a scale for each 32 of them, and their products with stored values. Where
// processors multiply bytes (VNNI), an activation is 256 * high + low of two bytes with a sign, which are multiplied with
// the stored bytes one after the other; elsewhere bytes are widened to 16 bits first. With --activations int8 the first
// have one byte (PLANES), and half the work.

#pragma once

#include "vectors.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr int64_t COLUMNS_TOGETHER = 64, BLOCK = 32;
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(WARMTURN_BYTES)
#define WARMTURN_BYTES
constexpr int64_t TOGETHER = 4;  // stored bytes have no sign
#else
constexpr int64_t TOGETHER = 2;
#endif
constexpr int64_t TUPLES = BLOCK / TOGETHER, ROW = TOGETHER * COLUMNS_TOGETHER;  // of a block; bytes of a tuple of all
constexpr int32_t MOST_OF_BYTE = 127, MOST_ACTIVATION = 127 * 256 + 127;
constexpr bool FEW_REGISTERS = LANES < 16 && TOGETHER == 4;  // twice as many sums

typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint16_t vshorts __attribute__((vector_size(LANES * 4)));
typedef int8_t vfine_in_memory __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t vshort_in_memory __attribute__((vector_size(LANES * 2), aligned(1), may_alias));

}  // namespace

extern "C" {
int64_t warmturn_activation_bytes = 2;  // or 1, only where TOGETHER is 4
}

namespace {

struct Quantised {  // 32 activations, x[i] * scale each
#if defined(WARMTURN_BYTES)
    int8_t high[BLOCK], low[BLOCK];  // of one byte: `high` alone
    void set(int64_t i, vi values, bool byte) {  // LANES of them
        vi lows = byte ? vi{} : values << 24 >> 24, highs = byte ? values : (values - lows) >> 8;
        *(vfine_in_memory*)(low + i) = __builtin_convertvector(lows, vfine_in_memory);
        *(vfine_in_memory*)(high + i) = __builtin_convertvector(highs, vfine_in_memory);
    }
#else
    int16_t x[BLOCK];
    void set(int64_t i, vi values, bool) {  // LANES of them
        *(vshort_in_memory*)(x + i) = __builtin_convertvector(values, vshort_in_memory);
    }
#endif
    float scale;
    int32_t sums[2];  // of the first and of the last 16
    float least;      // minus the sum of all 32, as they are
    // Of one of so many parts: the sum of whole numbers, and minus that of activations.
    template <int PARTS> int32_t sum(int64_t part) const { return PARTS == 1 ? sums[0] + sums[1] : sums[part]; }
    template <int PARTS> float less(int64_t part) const { return PARTS == 1 ? least : -scale * float(sums[part]); }
};

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

inline vi add_products(vi sum, vi w, vi x) {  // of four bytes without a sign and four with one
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
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

// One row of float32 as products with packed weights want it: a row of [rows][blocks].
inline void prepare_packed(const float* from, int64_t in, int64_t row, Quantised* to) {
    Quantised* out = to + row * blocks_of(in);
    const bool byte = TOGETHER == 4 && warmturn_activation_bytes == 1;
    const int32_t most_of = byte ? MOST_OF_BYTE : MOST_ACTIVATION;
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
        out->scale = finite ? size / most_of : NAN;
        float up = finite && size > 1e-30f ? most_of / size : 0;
        if (up == 0 && finite) out->scale = 0;
        vf sums[2] = {};  // whole numbers below 2^24
        for (int64_t i = 0; i < BLOCK; i += LANES) {
            vf shifted = (finite ? load(values + i) : vf{}) * up + 12582912.0f;  // the nearest integer in the low bits
            vi whole = (vi)shifted - 0x4b400000;
            out->set(i, whole, byte);
            sums[i / (BLOCK / 2)] += __builtin_convertvector(whole, vf);
        }
        for (int half = 0; half < 2; half++)
            out->sums[half] = int32_t(fold(sums[half], [](vf p, vf q) { return p + q; }));
        out->least = -out->scale * float(out->sums[0] + out->sums[1]);
    }
}

}  // namespace
