// Putting codes of a packed weight, as their checkpoint stores them, in the order in which packed.h and real.h read them:
// the reverse of what scheduler/accel/cpu/packed_form.py reads back as `values`.

#pragma once

#include <cstdint>
#include <cstring>

#include "quantised.h"

namespace {

// Some bits of the codes of a block, see `Field` in scheduler/weights/code_layout.py.
struct Field {
    int64_t at, nbytes, width, times, up, across;
};

// Codes of some columns, and where they go: 64 columns after the others, and of these block after block of BLOCK elements
// of each.
struct Codes {
    const uint8_t* from;  // [columns, row_bytes]
    int64_t columns, row_bytes, inside;
    const Field* fields;
    int64_t field_count, elements, block_bytes;  // elements that are stored together, 32 to 256, in so many bytes
    int64_t bits;      // that are written of each: 4, 5, 6 or 8; of 5 and 6 the low 4 come first, then the others
    int64_t together;  // elements of a column that lie together: 1, 2 or 4
    int64_t flipped;   // bits that are written the other way round, where 8 are
    uint8_t* to;
    int64_t step, head;     // bytes from one block to the next, and from its beginning to its values
    int64_t coarse, every;  // bytes before each `every` blocks
    int64_t group;          // bytes from 64 columns to the next
};

// What is left of some columns behind the first 64.
template <class Columns>
Columns behind(Columns of) {
    of.from += COLUMNS_TOGETHER * of.row_bytes, of.columns -= COLUMNS_TOGETHER, of.to += of.group;
    return of;
}

constexpr int64_t MOST_ELEMENTS = 256;  // of a column that are read before the next column is
constexpr uint64_t EACH_BYTE = 0x0101010101010101;  // the lowest bit of eight bytes

inline uint64_t eight_bytes(const uint8_t* from) {
    uint64_t found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

inline void add_bits(uint8_t* to, uint64_t bits) {
    bits |= eight_bytes(to);
    std::memcpy(to, &bits, sizeof bits);
}

// Add the bits of one field, of eight bytes at a time, to the codes of a block, one to a byte.
inline void unpack(const Field field, const uint8_t* __restrict from, uint8_t* __restrict to) {
    if (field.across) {  // of one bit: eight elements of a byte
        for (int64_t i = 0; i < field.nbytes; i++) {
            uint64_t apart = from[i] * EACH_BYTE & 0x8040201008040201;
            add_bits(to + 8 * i, ((apart + 0x7f7f7f7f7f7f7f7f) >> 7 & EACH_BYTE) << field.up);
        }
        return;
    }
    const uint64_t mask = EACH_BYTE * ((1 << field.width) - 1);
    for (int64_t part = 0; part < field.times; part++, from += field.nbytes)
        for (int64_t shift = 0; shift < 8; shift += field.width, to += field.nbytes)
            for (int64_t i = 0; i < field.nbytes; i += 8)
                add_bits(to + i, (eight_bytes(from + i) >> shift & mask) << field.up);
}

// `Word`: the elements of a column that lie together.
template <typename Word>
struct Words {
    static constexpr int64_t OF_BLOCK = BLOCK / sizeof(Word), MOST = MOST_ELEMENTS / sizeof(Word);
    static constexpr Word ONES = Word(~Word(0)) / 255, LOW = ONES * 15;
    typedef Word in_memory __attribute__((aligned(1), may_alias));

    alignas(64) uint8_t values[MOST_ELEMENTS];
    Word words[MOST], low[MOST], high[MOST];

    // The words of one column's codes as they are written.
    void join(int64_t bits, Word flipped) {
        std::memcpy(words, values, sizeof values);
        if (bits == 8)
            for (int64_t i = 0; i < MOST; i++) low[i] = words[i] ^ flipped;
        else
            for (int64_t i = 0; i < MOST / 2; i++) low[i] = (words[2 * i] & LOW) | (words[2 * i + 1] & LOW) << 4;
        if (bits == 5) join_high<1>();
        if (bits == 6) join_high<2>();
    }

    // The bits above the low 4, WIDTH of each code.
    template <int WIDTH>
    void join_high() {
        constexpr int64_t COUNT = 8 / WIDTH;
        for (int64_t i = 0; i < MOST / COUNT; i++) {
            Word all = 0;
            for (int64_t j = 0; j < COUNT; j++) all |= (words[COUNT * i + j] >> 4 & LOW) << j * WIDTH;
            high[i] = all;
        }
    }

    // Put them into their column of some blocks from the `first`th on.
    void write(const Codes& codes, int64_t first, int64_t blocks, int64_t column) const {
        const int64_t lows = codes.bits == 8 ? OF_BLOCK : OF_BLOCK / 2, highs = codes.bits == 8 ? 0 : OF_BLOCK * (codes.bits - 4) / 8;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t number = first + b;
            uint8_t* place = codes.to + (number / codes.every + 1) * codes.coarse + number * codes.step + codes.head;
            in_memory* to = (in_memory*)place + column;
            for (int64_t i = 0; i < lows; i++, to += COLUMNS_TOGETHER) *to = low[b * lows + i];
            for (int64_t i = 0; i < highs; i++, to += COLUMNS_TOGETHER) *to = high[b * highs + i];
        }
    }
};

template <typename Word>
void order(const Codes& codes) {
    Words<Word> words;
    uint8_t rest[MOST_ELEMENTS];
    const int64_t together = MOST_ELEMENTS / codes.elements, bytes = together * codes.block_bytes;
    for (int64_t first = 0; first < codes.inside; first += MOST_ELEMENTS) {
        const int64_t at = first / codes.elements * codes.block_bytes, left = (codes.inside - first + BLOCK - 1) / BLOCK;
        for (int64_t column = 0; column < COLUMNS_TOGETHER; column++) {
            std::memset(words.values, 0, sizeof words.values);
            const uint8_t* block = codes.from + column * codes.row_bytes + at;
            for (int64_t ahead = 0; ahead < bytes; ahead += 64) __builtin_prefetch(block + bytes + ahead);
            for (int64_t number = 0, to_come = column < codes.columns ? codes.row_bytes - at : 0; number < together && to_come > 0;
                 number++, block += codes.block_bytes, to_come -= codes.block_bytes) {
                const uint8_t* whole = block;
                if (to_come < codes.block_bytes) {
                    std::memset(rest, 0, sizeof rest);
                    whole = (const uint8_t*)std::memcpy(rest, block, to_come);
                }
                for (const Field* field = codes.fields; field < codes.fields + codes.field_count; field++)
                    unpack(*field, whole + field->at, words.values + number * codes.elements);
            }
            words.join(codes.bits, Word(Words<Word>::ONES * codes.flipped));
            words.write(codes, first / BLOCK, left < MOST_ELEMENTS / BLOCK ? left : MOST_ELEMENTS / BLOCK, column);
        }
    }
}

inline void order(Codes codes) {
    for (; codes.columns > 0; codes = behind(codes))
        if (codes.together == 4) order<uint32_t>(codes);
        else if (codes.together == 2) order<uint16_t>(codes);
        else order<uint8_t>(codes);
}

}  // namespace
