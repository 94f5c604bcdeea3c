// Putting codes of a packed weight, one to a byte, in the order in which packed.h and real.h read them: the reverse of
// what scheduler/accel/cpu/packed_form.py reads back as `values`.

#pragma once

#include <cstdint>
#include <cstring>

#include "quantised.h"

namespace {

// Codes of at most 64 columns, and where they go: block after block of BLOCK elements of each.
struct Codes {
    const uint8_t* from;  // [columns, inside]
    int64_t columns, inside;
    int64_t bits;      // that are stored of each: 4, 5, 6 or 8; of 5 and 6 the low 4 come first, then the others
    int64_t together;  // elements of a column that lie together: 1, 2 or 4
    int64_t flipped;   // bits that are stored the other way round
    uint8_t* to;
};

// `Word`: the elements of a column that lie together.
template <typename Word>
void order(const Codes& codes) {
    constexpr int64_t COUNT = BLOCK / sizeof(Word);  // of a block's words in a column
    constexpr Word ONES = Word(~Word(0)) / 255, LOW = ONES * 15;
    const Word flipped = Word(ONES * codes.flipped);
    const int64_t high = codes.bits - 4;
    uint8_t* to = codes.to;
    auto write = [&to](const Word* row) { std::memcpy(to, row, sizeof(Word) * COLUMNS_TOGETHER), to += sizeof(Word) * COLUMNS_TOGETHER; };
    for (int64_t first = 0; first < codes.inside; first += BLOCK) {
        Word words[COUNT][COLUMNS_TOGETHER] = {}, row[COLUMNS_TOGETHER];
        const int64_t left = codes.inside - first, bytes = left < BLOCK ? left : BLOCK;
        for (int64_t column = 0; column < codes.columns; column++) {
            Word some[COUNT] = {};
            std::memcpy(some, codes.from + column * codes.inside + first, bytes);
            for (int64_t i = 0; i < COUNT; i++) words[i][column] = some[i];
        }
        if (high == 4) {
            for (int64_t i = 0; i < COUNT; i++) {
                for (int64_t c = 0; c < COLUMNS_TOGETHER; c++) row[c] = words[i][c] ^ flipped;
                write(row);
            }
            continue;
        }
        for (int64_t i = 0; i < COUNT; i += 2) {
            for (int64_t c = 0; c < COLUMNS_TOGETHER; c++) row[c] = (words[i][c] & LOW) | (words[i + 1][c] & LOW) << 4;
            write(row);
        }
        for (int64_t i = 0; high && i < COUNT; i += 8 / high) {
            for (int64_t c = 0; c < COLUMNS_TOGETHER; c++) {
                row[c] = 0;
                for (int64_t j = 0; j < 8 / high; j++) row[c] |= (words[i + j][c] >> 4 & LOW) << j * high;
            }
            write(row);
        }
    }
}

inline void order(const Codes& codes) {
    if (codes.together == 4) order<uint32_t>(codes);
    else if (codes.together == 2) order<uint16_t>(codes);
    else order<uint8_t>(codes);
}

}  // namespace
