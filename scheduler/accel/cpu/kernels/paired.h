// Products of eight or four rows of activations in fewer multiplications. For two neighbours of each,
//     x0 * w0 + x1 * w1 = (x1 + w0) * (x0 + w1) - x0 * x1 - w0 * w1
// (S. Winograd, A New Algorithm for Inner Product, IEEE Transactions on Computers, 1968); what is subtracted is computed
// once for a row and once for a column. Additions take the place of half the multiplications. Processors do more of
// them, but not three times as many, so every second tuple is multiplied as it is. All numbers are whole, modulo 2^32
// where they are large, and results have the same bits as those of packed.h.

#pragma once

#include "stored.h"

#if defined(WARMTURN_BYTES)

namespace {

// To each lane the products of two numbers of 16 bits with a sign.
inline vi add_pairs(vi sum, vshorts a, vshorts b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#else
    vu first = (vu)(((vi)a << 16 >> 16) * ((vi)b << 16 >> 16)), second = (vu)(((vi)a >> 16) * ((vi)b >> 16));
    return (vi)((vu)sum + first + second);
#endif
}

// f(0), .. f(N - 1), where the numbers are constants at once: arrays stay in memory if GCC sees only later that their
// indices are constant.
#define INLINE __attribute__((always_inline))
#if defined(__x86_64__)
#define HERE(value) asm volatile("" : "+v"(value))  // is computed before what follows is
#else
#define HERE(value)
#endif
template <class F, int... I>
INLINE inline void each(F f, std::integer_sequence<int, I...>) { (f(std::integral_constant<int, I>()), ...); }
template <int N, class F>
INLINE inline void each(F f) { each(f, std::make_integer_sequence<int, N>()); }

// ROWS rows times 64 columns of one block. `x`: this block of each row; `to`: what becomes of them. As a function of its
// own it would be 5 % slower.
template <class Values, int PARTS_OF_BLOCK, int ROWS, class Codes>
INLINE inline void paired_block(const Quantised* x, const uint8_t* w, const Codes& codes, const Scales& of, int64_t type,
                                int32_t zero, bool first, float (*to)[COLUMNS_TOGETHER]) {
    constexpr int PART = TUPLES / PARTS_OF_BLOCK, NEXT = Values::NEXT, AT_ONCE = Values::AT_ONCE;
    int32_t begin[PARTS_OF_BLOCK][ROWS], less_here = zero - Values::SHIFT;
    for (int part = 0; part < PARTS_OF_BLOCK; part++)
        for (int r = 0; r < ROWS; r++) {
            uint32_t less = uint32_t(less_here * x[r].template sum<PARTS_OF_BLOCK>(part));
            begin[part][r] = int32_t(0 - less - x[r].template product<PARTS_OF_BLOCK>(part));
        }
    for (int64_t column = 0; column < COLUMNS_TOGETHER; column += NEXT * LANES)
        each<PARTS_OF_BLOCK>([&](auto part) INLINE {
            vi sums[ROWS][NEXT], products[NEXT] = {};  // of neighbours
            each<ROWS>([&](auto r) INLINE {
                each<NEXT>([&](auto n) INLINE { sums[r][n] = broadcast(begin[part] + r); });
            });
            each<PART / AT_ONCE>([&](auto some) INLINE {
                constexpr int tuple = part * PART + some * AT_ONCE;
                Values values(w, tuple, column, codes);
                each<AT_ONCE>([&](auto k) INLINE {
                    constexpr bool paired = is_paired(tuple + k);
                    asm volatile("" ::: "memory");  // GCC would read many tuples first, more than registers hold
                    vshorts even[NEXT], odd[NEXT];
                    each<NEXT>([&](auto n) INLINE {
                        values.split(k, n, even[n], odd[n]);
                        if constexpr (paired) products[n] = add_pairs(products[n], even[n], odd[n]);
                    });
                    each<ROWS>([&](auto r) INLINE {
                        vshorts evens = (vshorts)broadcast(x[r].even + 2 * (tuple + k));
                        vshorts odds = (vshorts)broadcast(x[r].odd + 2 * (tuple + k));
                        each<NEXT>([&](auto n) INLINE {
                            vi& sum = sums[r][n];
                            if constexpr (paired) sum = add_pairs(sum, odds + even[n], evens + odd[n]);
                            else sum = add_pairs(add_pairs(sum, evens, even[n]), odds, odd[n]);
                            HERE(sum);  // Clang would add up row after row behind the last tuple
                        });
                    });
                });
            });
            each<ROWS>([&](auto r) INLINE {
                each<NEXT>([&](auto n) INLINE {
                    int64_t c = column + n * LANES;
                    vi sum = (vi)((vu)sums[r][n] - (vu)products[n]);
                    add_scaled<PARTS_OF_BLOCK>(sum, x[r], part, of, c, type, first, to[r] + c);
                });
            });
        });
}

#undef INLINE
#undef HERE

}  // namespace

#endif
