// Putting scales and minima of a packed weight, as their checkpoint stores them, where packed.h reads them: the reverse of
// what scheduler/accel/cpu/packed_form.py reads back as `values`.

#pragma once

#include "codes.h"

namespace {

// Bits of small numbers of a block, see `Bits` in scheduler/weights/scale_layout.py.
struct Bits {
    int64_t at, count, shift, width, up, first, step;
};

// Scales and minima of some columns, `kinds` of them. Of two levels: a float16 number of each block of 256 elements
// at `halves`, and whole numbers, 8 or 16, made of the `bits` of their kind; else the former alone, of blocks of 32.
struct Numbers {
    const uint8_t* from;  // [columns, row_bytes]
    int64_t columns, row_bytes, inside, elements, block_bytes, kinds;
    int64_t halves[2];
    const Bits* bits;  // those of the first kind, then those of the second
    int64_t bit_counts[2];
    int64_t less, negated;  // what small numbers of the first kind are less; the sign bits of minima
    int64_t parts;          // of 32 elements that have a number of their own: 1 or 2
    uint8_t* to;
    int64_t step, coarse;  // bytes from one block to the next, and before every eight
    int64_t group;         // bytes from 64 columns to the next
};

constexpr int64_t MOST_NUMBERS = 16;

inline void put_half(uint8_t* to, int64_t column, uint16_t half) { std::memcpy(to + 2 * column, &half, 2); }

inline uint16_t half_of(const Numbers& of, const uint8_t* block, int64_t kind) {
    uint16_t half;
    std::memcpy(&half, block + of.halves[kind], 2);
    return half ^ uint16_t(kind ? of.negated : 0);
}

// Some numbers of a field, one to a byte of `Whole`.
template <typename Whole>
inline void add_bits(const Bits& one, const uint8_t* from, uint8_t* to) {
    Whole bits, found;
    std::memcpy(&bits, from, sizeof bits);
    std::memcpy(&found, to, sizeof found);
    found |= (bits >> one.shift & Whole(EACH_BYTE) * ((1 << one.width) - 1)) << one.up;
    std::memcpy(to, &found, sizeof found);
}

// The small numbers of one kind of a block, one to a byte.
inline void small_numbers(const Numbers& of, const uint8_t* block, int64_t kind, uint8_t* to) {
    const Bits* bits = of.bits + (kind ? of.bit_counts[0] : 0);
    std::memset(to, 0, MOST_NUMBERS);
    for (const Bits* one = bits; one < bits + of.bit_counts[kind]; one++) {
        const uint8_t* from = block + one->at;
        int64_t i = 0;
        if (one->step == 1) {
            for (; i + 8 <= one->count; i += 8) add_bits<uint64_t>(*one, from + i, to + one->first + i);
            for (; i + 4 <= one->count; i += 4) add_bits<uint32_t>(*one, from + i, to + one->first + i);
        }
        for (; i < one->count; i++) to[one->first + one->step * i] |= (from[i] >> one->shift & ((1 << one->width) - 1)) << one->up;
    }
    if (!kind)
        for (int64_t i = 0; i < MOST_NUMBERS; i++) to[i] -= of.less;
}

// Those of the first 64 columns. `KINDS`, `PARTS`: as in `Numbers`.
template <int64_t KINDS, int64_t PARTS>
inline void place_first(const Numbers& of) {
    const int64_t together = of.elements / BLOCK;
    for (int64_t number = 0; number * of.elements < of.inside; number++) {
        uint8_t* group = of.to + number * (of.coarse + together * of.step);
        for (int64_t column = 0; column < COLUMNS_TOGETHER; column++) {
            const bool padding = column >= of.columns;  // zeros
            const uint8_t* block = of.from + column * of.row_bytes + number * of.block_bytes;
            for (int64_t kind = 0; kind < KINDS; kind++) {
                put_half(group + kind * COLUMNS_TOGETHER * 2, column, padding ? 0 : half_of(of, block, kind));
                if (together == 1) continue;
                uint8_t small[MOST_NUMBERS] = {}, *to = group + of.coarse + kind * PARTS * COLUMNS_TOGETHER + column;
                if (!padding) small_numbers(of, block, kind, small);
#pragma GCC unroll 8
                for (int64_t b = 0; b < MOST_NUMBERS / 2; b++, to += of.step)
                    for (int64_t part = 0; part < PARTS; part++) to[part * COLUMNS_TOGETHER] = small[b * PARTS + part];
            }
        }
    }
}

inline void place_first(const Numbers& of) {
    if (of.kinds == 1) return of.parts == 1 ? place_first<1, 1>(of) : place_first<1, 2>(of);
    of.parts == 1 ? place_first<2, 1>(of) : place_first<2, 2>(of);
}

inline void place_numbers(Numbers of) {
    for (; of.columns > 0; of = behind(of)) place_first(of);
}

}  // namespace
