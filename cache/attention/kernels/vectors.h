// Vectors of the widest registers that the compiler may use, and the element types of pages as vectors of float32.
// Plain C++17 with the vector extension of GCC and Clang: no instruction is named.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, WIDE = 2;
#elif defined(__AVX__)
constexpr int LANES = 8, WIDE = 1;  // half as many registers
#else
constexpr int LANES = 4, WIDE = 2;
#endif
constexpr int CHUNK = 2 * LANES;  // elements of a row that are taken at a time

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef float vf_in_memory __attribute__((vector_size(LANES * 4), aligned(1), may_alias));
typedef uint32_t vu_in_memory __attribute__((vector_size(LANES * 4), aligned(1), may_alias));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

inline vf load(const float* p) { return *(const vf_in_memory*)p; }
inline void store(float* p, vf v) { *(vf_in_memory*)p = v; }
inline vf splat(float x) { return x - vf{}; }  // + would change the sign of a zero, and so cost an addition
inline vf larger(vf a, vf b) { return a > b ? a : b; }
template <int BY, class V, std::size_t... I>
inline V rotate(V v, std::index_sequence<I...>) { return __builtin_shufflevector(v, v, int((I + BY) % LANES)...); }
template <int BY = LANES / 2, class V, class F>
inline auto fold(V v, F two) {  // all lanes into one
    v = two(v, rotate<BY>(v, std::make_index_sequence<LANES>()));
    if constexpr (BY > 1) return fold<BY / 2>(v, two);
    else return v[0];
}

// CHUNK elements as two vectors. 16-bit types give the even elements and the odd ones: what lies in one 32-bit word
// needs no shuffle. Values and their sums are kept in this order, and only the output undoes it.
inline void load(const float* p, vf& a, vf& b) {
    a = load(p);
    b = load(p + LANES);
}
inline void load(const bf16* p, vf& a, vf& b) {
    vu words = *(const vu_in_memory*)p;
    a = (vf)(words << 16);
    b = (vf)(words & 0xffff0000u);
}
inline vf halves(vu bits) {  // of float16, in the low 16 bits
    vf value = (vf)((bits & 0x7fffu) << 13) * 0x1p112f;  // rebias the exponent; right for subnormals too
    vu special = (vu)((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return (vf)((vu)value | special | (bits & 0x8000u) << 16);
}
inline void load(const f16* p, vf& a, vf& b) {
    vu words = *(const vu_in_memory*)p;
    a = halves(words & 0xffffu);
    b = halves(words >> 16);
}

inline float get(float x) { return x; }
inline float get(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float get(f16 x) { return halves(vu{} + x.bits)[0]; }

inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    p->bits = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;  // the low half of a NaN made of bfloat16 is empty
}
inline vu rounded(vf x) {  // to bfloat16, in the high halves; the low ones are anything
    vu bits = (vu)x;
    return bits + 0x7fffu + (bits >> 16 & 1u);
}
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef uint16_t vh_in_memory __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
inline void put(bf16* p, vf x) {
    *(vh_in_memory*)p = __builtin_convertvector(rounded(x) >> 16, vh);
}
inline void put(f16* p, float x) {
    uint32_t bits, sign;
    std::memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) {
        p->bits = 0x7e00;
    } else if (bits >= 0x477ff000u) {  // rounds to more than there is
        p->bits = sign | 0x7c00;
    } else if (bits < 0x38800000u) {  // subnormal: an addition aligns and rounds
        float aligned = std::fabs(x) + 0.5f;
        std::memcpy(&bits, &aligned, 4);
        p->bits = sign | (bits - 0x3f000000u);
    } else {
        p->bits = sign | (bits - 0x38000000u + 0xfffu + (bits >> 13 & 1)) >> 13;
    }
}

inline vf exponential(vf x) {  // of x <= 0, to 2 ulp; NaN stays NaN
    vf y = x < splat(-87.0f) ? splat(-87.0f) : x;
    vf shifted = y * 1.44269504f + 12582912.0f;  // the integer nearest to y / ln 2, in the low bits
    vf n = shifted - 12582912.0f;
    vf r = y - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vf result = (vf)((vu)p + ((vu)shifted << 23));
    return x < splat(-87.0f) ? splat(0.0f) : result;
}

inline vf tangent(vf x) {  // tanh, to 1e-7; NaN stays NaN
    vf e = exponential((vf)((vu)x & 0x7fffffffu) * -2.0f);
    vf size = (1.0f - e) / (1.0f + e);
    return (vf)((vu)size | ((vu)x & 0x80000000u));
}

template <bool HIGH, std::size_t... I>
inline vf zip(vf a, vf b, std::index_sequence<I...>) {  // a0 b0 a1 b1 ..., the low or the high half
    return __builtin_shufflevector(a, b, int(I / 2 + (HIGH ? LANES / 2 : 0) + I % 2 * LANES)...);
}

#if defined(__AVX512F__)
template <int... I>
inline vf pick(vf a, vf b) { return __builtin_shufflevector(a, b, I...); }
// Words, pairs of words, or quarters of registers of two rows, in instructions that cost less than `zip` does.
inline vf low_words(vf a, vf b) { return pick<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(a, b); }
inline vf high_words(vf a, vf b) { return pick<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(a, b); }
inline vf low_pairs(vf a, vf b) { return pick<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a, b); }
inline vf high_pairs(vf a, vf b) { return pick<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(a, b); }
inline vf even_quarters(vf a, vf b) { return pick<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(a, b); }
inline vf odd_quarters(vf a, vf b) { return pick<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(a, b); }

inline void transpose(vf* rows) {  // 16 * 16 words in place
    vf fours[16];  // of each four rows, four words of a column in each quarter
    for (int i = 0; i < 16; i += 4) {
        vf low = low_words(rows[i], rows[i + 1]), high = high_words(rows[i], rows[i + 1]);
        vf other_low = low_words(rows[i + 2], rows[i + 3]), other_high = high_words(rows[i + 2], rows[i + 3]);
        fours[i] = low_pairs(low, other_low), fours[i + 1] = high_pairs(low, other_low);
        fours[i + 2] = low_pairs(high, other_high), fours[i + 3] = high_pairs(high, other_high);
    }
    for (int k = 0; k < 4; k++) {
        vf even = even_quarters(fours[k], fours[4 + k]), odd = odd_quarters(fours[k], fours[4 + k]);
        vf even_below = even_quarters(fours[8 + k], fours[12 + k]), odd_below = odd_quarters(fours[8 + k], fours[12 + k]);
        rows[k] = even_quarters(even, even_below), rows[8 + k] = odd_quarters(even, even_below);
        rows[4 + k] = even_quarters(odd, odd_below), rows[12 + k] = odd_quarters(odd, odd_below);
    }
}
#else
inline void transpose(vf* rows) {  // LANES * LANES words in place: each turn moves one bit of a word's place
    auto lanes = std::make_index_sequence<LANES>();
    for (int turn = 1; turn < LANES; turn *= 2) {
        vf before[LANES];
        for (int i = 0; i < LANES; i++) before[i] = rows[i];
        for (int i = 0; i < LANES / 2; i++) {
            rows[2 * i] = zip<false>(before[i], before[i + LANES / 2], lanes);
            rows[2 * i + 1] = zip<true>(before[i], before[i + LANES / 2], lanes);
        }
    }
}
#endif

}  // namespace
