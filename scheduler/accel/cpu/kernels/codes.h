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
    int64_t bits;      // that are written of each: 4, 5, 6 or 8; of 5 and 6 as kernels/packed.h has them
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

template <int64_t BYTES>
struct ChunkOf {  // clang drops what an alias template says of alignment
    typedef uint64_t type __attribute__((vector_size(BYTES), aligned(1), may_alias));
};
template <int64_t BYTES>
using Chunk = typename ChunkOf<BYTES>::type;
static_assert(alignof(Chunk<32>) == 1, "read from any address");

// The bits of one field of WIDTH bits, of some bytes at a time, in the codes of a block, one to a byte: those that are
// there stay where others were read before (`AFTER`).
template <int WIDTH, bool AFTER, int64_t BYTES>
inline void spread(const Field& field, const uint8_t* from, uint8_t* to) {
    constexpr uint64_t MASK = EACH_BYTE * ((1 << WIDTH) - 1);
    const Chunk<BYTES>* in = (const Chunk<BYTES>*)from;
    Chunk<BYTES>* out = (Chunk<BYTES>*)to;
    const int64_t count = field.nbytes / BYTES;
    for (int64_t part = 0; part < field.times; part++, in += count)
#pragma GCC unroll 8
        for (int shift = 0; shift < 8; shift += WIDTH, out += count)
            for (int64_t i = 0; i < count; i++) {
                Chunk<BYTES> bits = (in[i] >> shift & MASK) << field.up;
                out[i] = AFTER ? out[i] | bits : bits;
            }
}

// The same of one bit, where a byte has those of eight elements that follow each other.
template <bool AFTER>
inline void spread_across(const Field& field, const uint8_t* from, uint8_t* to) {
    Chunk<8>* out = (Chunk<8>*)to;
    for (int64_t i = 0; i < field.nbytes; i++) {
        uint64_t apart = from[i] * EACH_BYTE & 0x8040201008040201;
        Chunk<8> bits = {((apart + 0x7f7f7f7f7f7f7f7f) >> 7 & EACH_BYTE) << field.up};
        out[i] = AFTER ? out[i] | bits : bits;
    }
}

template <int WIDTH, bool AFTER>
inline void unpack(const Field& field, const uint8_t* from, uint8_t* to) {
    if (field.nbytes % 32 == 0) return spread<WIDTH, AFTER, 32>(field, from, to);
    if (field.nbytes % 16 == 0) return spread<WIDTH, AFTER, 16>(field, from, to);
    spread<WIDTH, AFTER, 8>(field, from, to);
}

template <bool AFTER>
inline void unpack(const Field& field, const uint8_t* from, uint8_t* to) {
    if (field.across) return spread_across<AFTER>(field, from, to);
    if (field.width == 1) return unpack<1, AFTER>(field, from, to);
    if (field.width == 2) return unpack<2, AFTER>(field, from, to);
    if (field.width == 4) return unpack<4, AFTER>(field, from, to);
    unpack<8, AFTER>(field, from, to);
}

// `Word`: the elements of a column that lie together.
template <typename Word, int BITS>
struct Words {
    static constexpr int64_t OF_BLOCK = BLOCK / sizeof(Word), MOST = MOST_ELEMENTS / sizeof(Word);
    static constexpr int64_t LOWS = BITS == 8 ? OF_BLOCK : OF_BLOCK / 2, HIGHS = BITS == 8 ? 0 : OF_BLOCK * (BITS - 4) / 8;
    static constexpr int64_t GROUPS = HIGHS ? HIGHS : 1, LOWS_OF_GROUP = LOWS / GROUPS;
    static constexpr Word ONES = Word(~Word(0)) / 255, LOW = ONES * 15;
    typedef Word in_memory __attribute__((aligned(1), may_alias));

    alignas(64) uint8_t values[MOST_ELEMENTS];
    alignas(64) Word words[MOST], low[MOST], high[MOST];

    // The words of one column's codes as they are written.
    void join(Word flipped) {
        std::memcpy(words, values, sizeof values);
        if (BITS == 8)
            for (int64_t i = 0; i < MOST; i++) low[i] = words[i] ^ flipped;
        else
            for (int64_t i = 0; i < MOST / 2; i++) low[i] = (words[2 * i] & LOW) | (words[2 * i + 1] & LOW) << 4;
        if (BITS == 5) join_high<1>();
        if (BITS == 6) join_high<2>();
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

    // Put them into their column of some blocks, whose codes begin at `places`.
    void write(uint8_t* const* places, int64_t blocks, int64_t column) const {
        for (int64_t b = 0; b < blocks; b++) {
            in_memory* to = (in_memory*)places[b] + column;
#pragma GCC unroll 16
            for (int64_t group = 0; group < GROUPS; group++) {
                if (HIGHS) *to = high[b * HIGHS + group], to += COLUMNS_TOGETHER;
#pragma GCC unroll 32
                for (int64_t i = 0; i < LOWS_OF_GROUP; i++, to += COLUMNS_TOGETHER)
                    *to = low[b * LOWS + group * LOWS_OF_GROUP + i];
            }
        }
    }
};

// One to a byte, the codes of MOST_ELEMENTS of a column, or of those that are left in `bytes` of its row.
inline void read_codes(const Codes& codes, const uint8_t* block, int64_t bytes, uint8_t* to) {
    const int64_t together = MOST_ELEMENTS / codes.elements;
    uint8_t rest[MOST_ELEMENTS];
    if (bytes < together * codes.block_bytes) std::memset(to, 0, MOST_ELEMENTS);
    for (int64_t number = 0; number < together && bytes > 0; number++, block += codes.block_bytes, bytes -= codes.block_bytes) {
        const uint8_t* whole = block;
        if (bytes < codes.block_bytes) {
            std::memset(rest, 0, sizeof rest);
            whole = (const uint8_t*)std::memcpy(rest, block, bytes);
        }
        uint8_t* values = to + number * codes.elements;
        unpack<false>(codes.fields[0], whole + codes.fields[0].at, values);
        for (const Field* field = codes.fields + 1; field < codes.fields + codes.field_count; field++)
            unpack<true>(*field, whole + field->at, values);
    }
}

template <typename Word, int BITS>
void order(const Codes& codes) {
    Words<Word, BITS> words;
    const int64_t bytes = MOST_ELEMENTS / codes.elements * codes.block_bytes;
    for (int64_t first = 0; first < codes.inside; first += MOST_ELEMENTS) {
        const int64_t at = first / codes.elements * codes.block_bytes, left = (codes.inside - first + BLOCK - 1) / BLOCK;
        const int64_t blocks = left < MOST_ELEMENTS / BLOCK ? left : MOST_ELEMENTS / BLOCK;
        uint8_t* places[MOST_ELEMENTS / BLOCK];
        for (int64_t b = 0, number = first / BLOCK; b < blocks; b++, number++)
            places[b] = codes.to + (number / codes.every + 1) * codes.coarse + number * codes.step + codes.head;
        for (int64_t column = 0; column < COLUMNS_TOGETHER; column++) {
            const uint8_t* block = codes.from + column * codes.row_bytes + at;
            for (int64_t ahead = 0; ahead < bytes; ahead += 64) __builtin_prefetch(block + bytes + ahead);
            read_codes(codes, block, column < codes.columns ? codes.row_bytes - at : 0, words.values);
            words.join(Word(Words<Word, BITS>::ONES * codes.flipped));
            words.write(places, blocks, column);
        }
    }
}

template <typename Word>
void order(const Codes& codes) {
    if (codes.bits == 4) return order<Word, 4>(codes);
    if (codes.bits == 5) return order<Word, 5>(codes);
    if (codes.bits == 6) return order<Word, 6>(codes);
    order<Word, 8>(codes);
}

inline void order(Codes codes) {
    for (; codes.columns > 0; codes = behind(codes))
        if (codes.together == 4) order<uint32_t>(codes);
        else if (codes.together == 2) order<uint16_t>(codes);
        else order<uint8_t>(codes);
}

}  // namespace
