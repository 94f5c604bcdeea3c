// Products of four rows of activations or more in fewer multiplications. For two neighbours of each,
//     x0 * w0 + x1 * w1 = (x1 + w0) * (x0 + w1) - x0 * x1 - w0 * w1
// (S. Winograd, A New Algorithm for Inner Product, IEEE Transactions on Computers, 1968); what is subtracted is computed
// once for a row and once for a column. Additions take the place of half the multiplications. Processors do more of
// them, but not three times as many, so some tuples are multiplied as they are (`is_paired`). All numbers are whole,
// modulo 2^32 where they are large, and results have the same bits as those of packed.h.

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

// Two bytes without a sign times two with one, added, in 16 bits.
inline vshorts add_byte_pairs(vshorts a, vshorts b) {
#if defined(__AVX512BW__)
    return (vshorts)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vshorts)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#else
    typedef int16_t with_sign __attribute__((vector_size(sizeof(vshorts))));
    with_sign low = (with_sign)(b << 8) >> 8, high = (with_sign)b >> 8;
    return (a & 0x00ff) * (vshorts)low + (a >> 8) * (vshorts)high;
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

// The values of a block times their WHOLE scales, as `paired_block` wants them: made once for all rows.
struct ScaledBlock {
    alignas(64) uint16_t even[TUPLES][2 * COLUMNS_TOGETHER], odd[TUPLES][2 * COLUMNS_TOGETHER];
    alignas(64) int32_t products[COLUMNS_TOGETHER];  // of neighbours of tuples that are paired, summed

    template <class Values, class Scaling, class Codes>
    void make(const uint8_t* w, const Codes& codes, const Scales& of, int64_t type) {
        constexpr int PART = TUPLES / Scaling::PARTS, AT_ONCE = Values::AT_ONCE;
        for (int64_t column = 0; column < COLUMNS_TOGETHER; column += LANES) {
            vi sum = {};
            each<Scaling::PARTS>([&](auto part) INLINE {
                const vshorts scale = of.fine_in_pairs(part, column), less = scale * uint16_t(zero_of(type));
                each<PART / AT_ONCE>([&](auto some) INLINE {
                    constexpr int tuple = part * PART + some * AT_ONCE;
                    Values values(w, tuple, column, codes);
                    each<AT_ONCE>([&](auto k) INLINE {
                        vshorts value = values.get(k, 0), evens = add_byte_pairs(value, scale & 0x00ff) - less;
                        vshorts odds = add_byte_pairs(value, scale << 8) - less;
                        if constexpr (is_paired(tuple + k, true)) sum = add_pairs(sum, evens, odds);
                        std::memcpy(even[tuple + k] + 2 * column, &evens, sizeof evens);
                        std::memcpy(odd[tuple + k] + 2 * column, &odds, sizeof odds);
                    });
                });
            });
            std::memcpy(products + column, &sum, sizeof sum);
        }
    }
};

// `Stored` of such a block.
template <int COUNT>
struct ScaledBefore {
    static constexpr int NEXT = COUNT, AT_ONCE = 2, MIXED = MIXED_OF<COUNT>;
    const ScaledBlock* block;
    int64_t tuple, column;

    template <class Codes>
    ScaledBefore(const uint8_t* w, int64_t tuple, int64_t column, const Codes&)
        : block((const ScaledBlock*)w), tuple(tuple), column(column) {}

    void split(int k, int n, vshorts& even, vshorts& odd) const {
        std::memcpy(&even, block->even[tuple + k] + 2 * (column + n * LANES), sizeof even);
        std::memcpy(&odd, block->odd[tuple + k] + 2 * (column + n * LANES), sizeof odd);
    }
};

// ROWS rows times 64 columns of one block, which is a `ScaledBlock` where scales are WHOLE. `x`: this block of each row;
// `to`: what becomes of them. As a function of its own it would be 5 % slower.
template <class Values, class Scaling, int ROWS, class Codes>
INLINE inline void paired_block(const Quantised* x, const uint8_t* w, const Codes& codes, const Scales& of, int64_t type,
                                bool first, float (*to)[COLUMNS_TOGETHER]) {
    constexpr int SUMS = Scaling::SUMS, PART = TUPLES / SUMS, NEXT = Values::NEXT, AT_ONCE = Values::AT_ONCE;
    for (int64_t column = 0; column < COLUMNS_TOGETHER; column += NEXT * LANES)
        each<SUMS>([&](auto part) INLINE {
            vi sums[ROWS][NEXT], products[NEXT] = {};  // of neighbours
            each<ROWS>([&](auto r) INLINE {
                each<NEXT>([&](auto n) INLINE { sums[r][n] = broadcast(x[r].begin + part); });
            });
            if constexpr (Scaling::WHOLE)
                std::memcpy(products, ((const ScaledBlock*)w)->products + column, sizeof products);
            each<PART / AT_ONCE>([&](auto some) INLINE {
                constexpr int tuple = part * PART + some * AT_ONCE;
                Values values(w, tuple, column, codes);
                constexpr int MIXED = Values::MIXED;
                each<AT_ONCE / MIXED>([&](auto few) INLINE {
                    asm volatile("" ::: "memory");  // GCC would read many tuples first, more than registers hold
                    vshorts even[MIXED][NEXT], odd[MIXED][NEXT];
                    each<MIXED>([&](auto k) INLINE {
                        each<NEXT>([&](auto n) INLINE {
                            values.split(few * MIXED + k, n, even[k][n], odd[k][n]);
                            if constexpr (is_paired(tuple + few * MIXED + k, false) && !Scaling::WHOLE)
                                products[n] = add_pairs(products[n], even[k][n], odd[k][n]);
                        });
                    });
                    each<ROWS>([&](auto r) INLINE {
                        each<MIXED>([&](auto back) INLINE {
                            constexpr int k = Scaling::WHOLE ? MIXED - 1 - back : back;  // as was faster
                            constexpr int number = tuple + few * MIXED + k;
                            vshorts evens = (vshorts)broadcast(x[r].even + 2 * number);
                            vshorts odds = (vshorts)broadcast(x[r].odd + 2 * number);
                            each<NEXT>([&](auto n) INLINE {
                                vi& sum = sums[r][n];
                                if constexpr (is_paired(number, Scaling::WHOLE))
                                    sum = add_pairs(sum, odds + even[k][n], evens + odd[k][n]);
                                else sum = add_pairs(add_pairs(sum, evens, even[k][n]), odds, odd[k][n]);
                                HERE(sum);  // Clang would add up row after row behind the last tuple
                            });
                        });
                    });
                });
            });
            each<ROWS>([&](auto r) INLINE {
                each<NEXT>([&](auto n) INLINE {
                    int64_t c = column + n * LANES;
                    vi sum = (vi)((vu)sums[r][n] - (vu)products[n]);
                    add_scaled<Scaling>(sum, x[r], part, of, c, type, first, to[r] + c);
                });
            });
        });
}

#undef INLINE
#undef HERE

}  // namespace

#endif
