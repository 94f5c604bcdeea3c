// Rows of activations times a weight of few bits: w = scale * (value - zero) - minimum, with a scale for each 32 or 16
// elements of `in`. A minimum may be kept as a whole number of scales (ZEROS). scheduler/accel/cpu/packed_matrix.py lays
// weights out as they are read here.
//
// Of each column some elements lie TOGETHER, as many as one instruction multiplies: a tuple. For 64 columns the blocks of
// 32 elements of `in` follow each other: scales, minima, then values as [tuples][64][TOGETHER] bytes; or, of 4 bits,
// half as many, whose low halves are of one tuple and whose high halves are of the next. Values of 5 and 6 bits have their
// low 4 so, and before those of each 8 or 4 tuples the others of these, so that memory is read in the order of addresses.
// With scales of two levels (FINE) eight blocks have coarse ones in common, which come first. Fine ones of 16 elements
// (has_whole_scales) are multiplied as whole numbers, so that a block becomes floats once and not twice. Where values
// are those of a table (LOOKUP), the 64 columns begin with it.
//
// Activations are whole numbers too (quantised.h), so that products are exact; what is added to a result, and in which
// order, does not depend on other rows. Values that are no whole numbers (REAL): see real.h.

#pragma once

#include "paired.h"
#include "stored.h"

namespace {

inline int64_t ways_of_packed(int64_t rows) { return PREFETCHING | (can_pair(rows) ? PAIRED : 0); }

struct Rows {  // of activations, `each` blocks apart, and what becomes of them: [rows][64]
    const Quantised* x;
    int64_t each;
    float (*sums)[COLUMNS_TOGETHER];
};

// ROWS rows from `row` on times 64 columns of one block.
template <class Values, class Scaling, int PLANES, int ROWS, class Codes>
inline void packed_block(const Rows& rows, int64_t row, const uint8_t* w, const Codes& codes, const Scales& of,
                         int64_t type, int32_t zero, bool first) {
    constexpr int PARTS = Scaling::PARTS;
    constexpr int64_t PART = TUPLES / PARTS, NEXT = Values::NEXT;
    const Quantised* x[ROWS];
    for (int r = 0; r < ROWS; r++) x[r] = rows.x + (row + r) * rows.each;
    for (int64_t column = 0; column < COLUMNS_TOGETHER; column += NEXT * LANES) {
        vi of_parts[Scaling::WHOLE ? ROWS : 1][NEXT] = {};  // with their scales
        for (int64_t part = 0; part < PARTS; part++) {
            Dots<PLANES> sums[ROWS][NEXT];
            for (int r = 0; r < ROWS && !Values::CENTRED; r++)
                for (int n = 0; n < NEXT; n++) sums[r][n].begin(-zero * x[r]->template sum<PARTS>(part));
            for (int64_t tuple = part * PART; tuple < (part + 1) * PART; tuple += Values::AT_ONCE) {
                Values values(w, tuple, column, codes);
#pragma GCC unroll 8
                for (int k = 0; k < Values::AT_ONCE; k++) {
                    // Otherwise compilers read many tuples first, more than registers hold. Two have their low bits in one.
                    if (k % 2 == 0) asm volatile("" ::: "memory");
                    Tuple<PLANES> of_row[ROWS];
                    for (int r = 0; r < ROWS; r++) of_row[r].load(*x[r], tuple + k);
                    for (int n = 0; n < NEXT; n++) {
                        vshorts value = values.get(k, n);
                        for (int r = 0; r < ROWS; r++) sums[r][n].add(value, of_row[r]);
                    }
                }
            }
            for (int r = 0; r < ROWS; r++)
                for (int n = 0; n < NEXT; n++) {
                    int64_t c = column + n * LANES;
                    vi total = sums[r][n].total();
                    if constexpr (Scaling::WHOLE) of_parts[r][n] += total * of.fine_of(part, c);
                    else add_scaled<Scaling>(total, *x[r], part, of, c, type, first, rows.sums[row + r] + c);
                }
        }
        for (int r = 0; r < ROWS && Scaling::WHOLE; r++)
            for (int n = 0; n < NEXT; n++) {
                int64_t c = column + n * LANES;
                add_scaled<Scaling>(of_parts[r][n], *x[r], 0, of, c, type, first, rows.sums[row + r] + c);
            }
    }
}

// The rows from `row` on, ROWS at a time: the first that is left.
template <class Values, class Scaling, int PLANES, int ROWS, class Codes>
inline int64_t packed_rows(const Rows& rows, int64_t row, int64_t count, const uint8_t* w, const Codes& codes,
                           const Scales& of, int64_t type, int32_t zero, bool first) {
    for (; row + ROWS <= count; row += ROWS)
        packed_block<Values, Scaling, PLANES, ROWS>(rows, row, w, codes, of, type, zero, first);
    return row;
}

// Up to MOST_ROWS rows times 64 columns.
template <int BITS, class Scaling, int PLANES, class Codes>
inline void packed_columns(const uint8_t* w, const Codes& codes, int64_t type, int64_t blocks, const Quantised* x,
                           int64_t rows, int64_t in_pairs, float* y, int64_t y_row) {
    constexpr bool SIMPLE = BITS % 4 == 0, ITSELF = SIMPLE && BYTES_OF_16 && !Codes::LOOKED_UP;
    constexpr int WIDTH = SIMPLE || LANES == 16 ? 4 : 2;  // others take more registers
    constexpr bool SPLITS = BITS == 4 && TOGETHER == 2 && LANES == 8;  // bytes into 16 bits again for each two rows
    // From so many rows on, preparing the values of a block once is faster.
    constexpr int64_t MANY = ITSELF ? MOST_ROWS + 1 : SPLITS ? 4 : SIMPLE || BYTES_OF_16 ? 8 : LANES == 16 ? 4 : 2;
    constexpr int64_t BYTES = Stored<BITS, 1, Codes>::BYTES;
    float sums[MOST_ROWS][COLUMNS_TOGETHER];
    Scales of;
    PreparedBlock prepared;
#if defined(WARMTURN_BYTES)
    ScaledBlock scaled;
#endif
    int32_t zero = zero_of(type) + Stored<BITS, 1, Codes>::SHIFT;
    const uint8_t* ahead = way_of(rows) & PREFETCHING ? w + DISTANCE : nullptr;
    for (int64_t b = 0; b < blocks; b++, w += BYTES) {
        of.template next<Scaling>(w, type, b);
        for (; ahead && ahead < w + BYTES + DISTANCE; ahead += LINE) __builtin_prefetch(ahead, 0, 2);
        Rows all{x + b, blocks, sums};
        int64_t done = 0;
#if defined(WARMTURN_BYTES)
        if constexpr (PLANES == 2 && MULTIPLIES_PAIRS) {
            constexpr int OF_EIGHT = FEW_REGISTERS ? 1 : 2, OF_FOUR = 2 * OF_EIGHT;  // registers of columns
            using Octets = std::conditional_t<Scaling::WHOLE, ScaledBefore<OF_EIGHT>, Stored<BITS, OF_EIGHT, Codes>>;
            using Quartets = std::conditional_t<Scaling::WHOLE, ScaledBefore<OF_FOUR>, Stored<BITS, OF_FOUR, Codes>>;
            const uint8_t* from = w;
            if constexpr (Scaling::WHOLE)
                if (in_pairs) {
                    scaled.template make<Stored<BITS, 1, Codes>, Scaling>(w, codes, of, type);
                    from = (const uint8_t*)&scaled;
                }
            for (; done + OCTET <= in_pairs; done += OCTET)
                paired_block<Octets, Scaling, OCTET>(x + done * blocks + b * OCTET, from, codes, of, type, b == 0, sums + done);
            for (; done + QUARTET <= in_pairs; done += QUARTET)
                paired_block<Quartets, Scaling, QUARTET>(x + done * blocks + b * QUARTET, from, codes, of, type, b == 0,
                                                         sums + done);
            if constexpr (Scaling::WHOLE) {
                const Quantised* rest = x + done * blocks + b * (in_pairs - done);
                switch (in_pairs - done) {
                    case 1: paired_block<Quartets, Scaling, 1>(rest, from, codes, of, type, b == 0, sums + done); break;
                    case 2: paired_block<Quartets, Scaling, 2>(rest, from, codes, of, type, b == 0, sums + done); break;
                    case 3: paired_block<Quartets, Scaling, 3>(rest, from, codes, of, type, b == 0, sums + done); break;
                }
                done = in_pairs;
            }
        }
#endif
        if (rows - done < MANY) {
            using Two = Stored<BITS, FEW_REGISTERS ? 2 : WIDTH, Codes>;
            using One = Stored<BITS, WIDTH, Codes>;
            done = packed_rows<Two, Scaling, PLANES, 2>(all, done, rows, w, codes, of, type, zero, b == 0);
            packed_rows<One, Scaling, PLANES, 1>(all, done, rows, w, codes, of, type, zero, b == 0);
        } else {
            const uint8_t* ready = prepared.template prepare<BITS>(w, codes, zero);
            using Two = Prepared<FEW_REGISTERS ? 2 : 4>;
            if (TOGETHER == 2)
                done = packed_rows<Prepared<2>, Scaling, PLANES, 4>(all, done, rows, ready, codes, of, type, zero, b == 0);
            done = packed_rows<Two, Scaling, PLANES, 2>(all, done, rows, ready, codes, of, type, zero, b == 0);
            packed_rows<Prepared<4>, Scaling, PLANES, 1>(all, done, rows, ready, codes, of, type, zero, b == 0);
        }
    }
    for (int64_t row = 0; row < rows; row++) std::memcpy(y + row * y_row, sums[row], sizeof sums[row]);
}

// With activations of one byte or of two.
template <int BITS, class Scaling, class Codes>
inline void packed_planes(const uint8_t* w, const Codes& codes, int64_t type, int64_t blocks, const Quantised* x,
                          int64_t rows, int64_t in_pairs, float* y, int64_t y_row) {
    if constexpr (TOGETHER == 4)
        if (warmturn_activation_bytes == 1)
            return packed_columns<BITS, Scaling, 1>(w, codes, type, blocks, x, rows, 0, y, y_row);
    packed_columns<BITS, Scaling, 2>(w, codes, type, blocks, x, rows, in_pairs, y, y_row);
}

template <int BITS, class Codes = Themselves>
inline void packed_some(const uint8_t* w, int64_t type, int64_t blocks, const Quantised* x, int64_t rows, int64_t in_pairs,
                        float* y, int64_t y_row, const Codes& codes = Codes()) {
    constexpr int MOST_PARTS = BITS == 5 ? 1 : 2;  // of 5 bits and two parts packed_form.py makes 6 bits
    constexpr bool MAY_BE_WHOLE = MOST_PARTS == 2 && BITS < 8 && !Codes::LOOKED_UP;
    typedef BlockScaling<1, false> Alike;
    typedef BlockScaling<MOST_PARTS, false> Parts;
    typedef BlockScaling<MOST_PARTS, MAY_BE_WHOLE> Whole;
    if (MAY_BE_WHOLE && has_whole_scales(type))
        packed_planes<BITS, Whole>(w, codes, type, blocks, x, rows, in_pairs, y, y_row);
    else if (type & SHORT)
        packed_planes<BITS, Parts>(w, codes, type, blocks, x, rows, in_pairs, y, y_row);
    else
        packed_planes<BITS, Alike>(w, codes, type, blocks, x, rows, in_pairs, y, y_row);
}

// Bytes of 64 columns.
inline int64_t packed_bytes(int64_t type, int64_t blocks) {
    int64_t kinds = type & MINIMA ? 2 : 1, each = type & FINE ? 1 : type & FLOATS ? 4 : 2;
    int64_t numbers = (type & SHORT ? 2 : 1) * (each + (kinds - 1) * (type & ZEROS ? 1 : each));
    int64_t coarse = type & FINE ? blocks / BLOCKS_OF_COARSE * COLUMNS_TOGETHER * 2 * kinds : 0;
    return (type & LOOKUP ? TABLE_BYTES : 0) + coarse + blocks * COLUMNS_TOGETHER * (numbers + BLOCK * bits_of(type) / 8);
}

// Columns of the groups first .. last; columns of y are there up to a multiple of 64.
inline void multiply_packed(const void* weight, int64_t type, int64_t in, const Quantised* x, int64_t rows, float* y,
                            int64_t y_row, int64_t first, int64_t last) {
    int64_t blocks = blocks_of(in), bytes = packed_bytes(type, blocks), all_in_pairs = rows_in_pairs(rows, type);
    for (int64_t g = first, done; g < last; g++)
        for (int64_t row = 0; row < rows; row += done) {
            done = rows - row < MOST_ROWS ? rows - row : MOST_ROWS;
            const int64_t left = all_in_pairs > row ? all_in_pairs - row : 0, in_pairs = left < done ? left : done;
            const uint8_t* w = (const uint8_t*)weight + g * bytes;
            const Quantised* from = x + row * blocks;
            float* to = y + row * y_row + g * COLUMNS_TOGETHER;
            if (type & LOOKUP) {
                packed_some<4>(w + TABLE_BYTES, type, blocks, from, done, in_pairs, to, y_row, LookedUp(w));
                continue;
            }
            switch (bits_of(type)) {
                case 4: packed_some<4>(w, type, blocks, from, done, in_pairs, to, y_row); break;
                case 5: packed_some<5>(w, type, blocks, from, done, in_pairs, to, y_row); break;
                case 6: packed_some<6>(w, type, blocks, from, done, in_pairs, to, y_row); break;
                default: packed_some<8>(w, type, blocks, from, done, in_pairs, to, y_row);
            }
        }
}

}  // namespace
