// Records: keys or values of a token at a byte a number, before them a scale for each head (cache/memory/token_record.py). They
// are widened, without scales, to the type that is computed with, which has all of these numbers; scores and weights are
// multiplied by the scales.

#pragma once

#include "blocks.h"

namespace {

enum Codec : int64_t { EXACT, INT8, FP8 };

inline float wide_int8(uint8_t number) { return int8_t(number); }

inline float wide_fp8(uint8_t number) {  // four bits of exponent, three of mantissa; right for subnormals too
    uint32_t bits = (number & 0x7fu) << 20;
    float value;
    std::memcpy(&value, &bits, 4);
    value *= 0x1p120f;
    std::memcpy(&bits, &value, 4);
    bits |= (number & 0x80u) << 24;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void keep(float* to, float number) { *to = number; }
inline void keep(f16* to, float number) { put(to, number); }
inline void keep(bf16* to, float number) {  // all of these numbers end in zeros
    uint32_t bits;
    std::memcpy(&bits, &number, 4);
    to->bits = bits >> 16;
}

// `dim` numbers, and zeros up to a chunk. Plain loops: compilers know how to widen bytes in them.
template <Codec CODEC, class T>
void widen(const uint8_t* __restrict from, int64_t dim, T* __restrict to) {
    for (int64_t i = 0; i < dim; i++) keep(to + i, CODEC == INT8 ? wide_int8(from[i]) : wide_fp8(from[i]));
    if (dim < CHUNK) std::memset((void*)(to + dim), 0, (CHUNK - dim) * sizeof(T));
}

struct Scales {  // of the keys and values of a block, for one head; 1 for those that are not there
    alignas(64) float keys[BLOCK], values[BLOCK];
};

// One head of `count` records as rows of a Row's width.
template <class T>
void widen_rows(Codec codec, const T* const* records, int count, int64_t head, const Row& row, T* to, const T** rows) {
    for (int j = 0; j < count; j++, to += row.padded) {
        const uint8_t* numbers = (const uint8_t*)records[j] + head * row.dim;
        if (codec == INT8) widen<INT8>(numbers, row.dim, to);
        else widen<FP8>(numbers, row.dim, to);
        rows[j] = to;
    }
}

// The scales of one head of `count` records, which lie `begin` bytes before the numbers.
template <class T>
void read_scales(const T* const* records, int count, int64_t begin, int64_t head, float* scales) {
    for (int j = 0; j < BLOCK; j++) scales[j] = 1.0f;
    for (int j = 0; j < count; j++)
        std::memcpy(scales + j, (const uint8_t*)records[j] - begin + head * sizeof(float), sizeof(float));
}

inline void multiply(float* block, const float* scales) {
    for (int j = 0; j < BLOCK; j += LANES) store(block + j, load(block + j) * load(scales + j));
}

// Rounding to records: what quantise of cache/memory/codec.py computes, bit for bit.

inline uint8_t rounded_number(float x, Codec codec) {
    if (codec == INT8) return uint8_t(int8_t(std::nearbyint(x)));
    uint32_t bits, sign;
    std::memcpy(&bits, &x, 4);
    sign = bits >> 24 & 0x80u;
    bits &= 0x7fffffffu;
    if (bits < 0x3c800000u) {  // subnormal: an addition aligns and rounds
        float aligned = std::fabs(x) + 0x1p14f;
        std::memcpy(&bits, &aligned, 4);
        return uint8_t(sign | (bits - 0x46800000u));
    }
    return uint8_t(sign | (bits - 0x3c000000u + 0x7ffffu + (bits >> 20 & 1)) >> 20);
}

template <class T>
void pack_record(const T* tokens, int64_t heads, int64_t dim, int64_t begin, Codec codec, uint8_t* record) {
    const float top = codec == INT8 ? 127.0f : 448.0f;
    for (int64_t head = 0; head < heads; head++) {
        const T* from = tokens + head * dim;
        float most = 0.0f;
        bool numbers = true;
        for (int64_t d = 0; d < dim; d++) {
            float size = std::fabs(get(from[d]));
            most = size > most ? size : most;
            numbers = numbers && size == size;
        }
        float scale = (numbers ? most : NAN) / top, by = scale > 0.0f ? scale : 1.0f;
        std::memcpy(record + head * sizeof(float), &scale, sizeof(float));
        for (int64_t d = 0; d < dim; d++) {
            float x = get(from[d]) / by;
            record[begin + head * dim + d] = rounded_number(x < -top ? -top : x > top ? top : x, codec);
        }
    }
}

}  // namespace
