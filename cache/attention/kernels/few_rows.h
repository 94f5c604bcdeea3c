// Attention of so few queries that reading keys and values is what takes the time: each is read once, in the order in
// which they lie, and those that are next are asked for meanwhile.

#pragma once

#include "layout.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int TOGETHER = LANES == 8 ? 2 : 4;   // rows that are multiplied with a step's keys in registers
constexpr int SUMMED = 4;                      // and with values
constexpr int64_t AHEAD = 8;                   // steps between what is read and what is asked for, or
constexpr int64_t AHEAD_BYTES = 1 << 17;       // fewer where they are more than this

// What is read next, of all heads, chunk by chunk in the order of addresses. It comes into the second cache: there are
// few places where lines wait for the nearest one.
struct Stream {
    const char* at;
    int64_t step;  // bytes of a part; 0: nothing more, the same line is asked for again
    template <class T>
    static constexpr int64_t part = CHUNK * sizeof(T) < 64 ? CHUNK * sizeof(T) : 64;  // of a chunk, in one line
    template <class T>
    void ask() {
        for (unsigned i = 0; i < CHUNK * sizeof(T); i += part<T>, at += step) __builtin_prefetch(at, 0, 2);
    }
};

// A query's chunk and a key's, multiplied lane by lane. Queries are kept in the order in which keys are loaded.
template <class T>
struct Chunk {
    vf a, b;
    explicit Chunk(const T* key) { load(key, a, b); }
    static Chunk query(const float* from) {
        Chunk chunk;
        chunk.a = load(from), chunk.b = load(from + LANES);
        return chunk;
    }
    static void arrange(const T* from, float* chunk) {  // CHUNK elements
        Chunk key(from);
        store(chunk, key.a), store(chunk + LANES, key.b);
    }
    void add_to(vf& sums, const Chunk& key) const { sums += a * key.a, sums += b * key.b; }

private:
    Chunk() {}
};

#if defined(__AVX512BF16__)
template <>
struct Chunk<bf16> {
    __m512bh words;
    explicit Chunk(const bf16* key) : words((__m512bh)_mm512_loadu_si512(key)) {}
    static Chunk query(const float* from) { return Chunk((const bf16*)from); }
    static void arrange(const bf16* from, float* chunk) { std::memcpy((void*)chunk, (const void*)from, 2 * CHUNK); }
    void add_to(vf& sums, const Chunk& key) const { sums = (vf)_mm512_dpbf16_ps((__m512)sums, words, key.words); }
};
#endif

// Lane i % 4: a part of the sum of lanes of the i-th of four.
inline vf fold_four(const vf* v) {
#if defined(__AVX512F__)
    vf ab = low_words(v[0], v[1]) + high_words(v[0], v[1]), cd = low_words(v[2], v[3]) + high_words(v[2], v[3]);
    return low_pairs(ab, cd) + high_pairs(ab, cd);
#else
    auto lanes = std::make_index_sequence<LANES>();
    vf ac = zip<false>(v[0], v[2], lanes) + zip<true>(v[0], v[2], lanes);
    vf bd = zip<false>(v[1], v[3], lanes) + zip<true>(v[1], v[3], lanes);
    return zip<false>(ac, bd, lanes) + zip<true>(ac, bd, lanes);
#endif
}

// Lane i: the sum of lanes i % 4, 4 + i % 4, ... of the (i / 4)-th.
inline vf fold_all(const vf* v) {
#if defined(__AVX512F__)
    vf low = even_quarters(v[0], v[1]) + odd_quarters(v[0], v[1]);
    vf high = even_quarters(v[2], v[3]) + odd_quarters(v[2], v[3]);
    return even_quarters(low, high) + odd_quarters(low, high);
#elif defined(__AVX__)
    return __builtin_shufflevector(v[0], v[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(v[0], v[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
    return v[0];
#endif
}

// Parts of query r * key i of a step, for ROWS queries, in lanes i, STEP + i, ... of folded[r * LANES / STEP]. Keys begin
// `offset` elements behind where `keys` points. Not inlined: there GCC keeps sums in memory.
template <int ROWS, class T>
__attribute__((noinline)) void score_step(const float* queries, const T* const* keys, int64_t offset, const Row& row,
                                          Stream& stream, vf* folded) {
    Stream next = stream;  // in registers
    const int64_t padded = row.padded;
    vf sums[ROWS][STEP];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < STEP; i++) sums[r][i] = vf{};
    int64_t c = 0;
    do {
        const int64_t at = offset + row.at(c);
        for (int i = 0; i < STEP; i++) {
            Chunk<T> key(keys[i] + at);
            next.ask<T>();
            for (int r = 0; r < ROWS; r++)
                Chunk<T>::query(queries + r * padded + c * CHUNK).add_to(sums[r][i], key);
        }
    } while (++c < row.chunks);
    stream = next;
    for (int r = 0; r < ROWS; r++) folded[r * (LANES / STEP)] = fold_four(sums[r]);
}

template <class T>
struct FewRows : Layout<T> {
    typedef Layout<T> Base;
    using Base::Base;
    using Base::call;
    using Base::conceal;
    using Base::group;
    using Base::key_row;
    using Base::locate;
    using Base::point;
    using Base::seen;
    using Base::value_row;

    struct Scratch {
        float *queries, *scores;  // [heads * size][key padded], [heads * size][BLOCK]
        vf* folded;               // [heads * size][LANES / STEP]
        T* rows;                  // [VALUES<T>][key or value padded]: of one head, widened or filled up
    };
    Scratch divide(int64_t rows, float* scratch) const {
        float* scores = scratch + rows * key_row.padded;
        vf* folded = (vf*)(scores + rows * BLOCK);
        return {scratch, scores, folded, (T*)(folded + rows * (LANES / STEP))};
    }

    // One range of one session. Behind its last block that of the next range is read next, up to `further`.
    void run(const Span& s, int64_t from, int64_t end, int64_t further, Partial part, float* scratch) const {
        Scratch mine = divide(call.heads * s.size, scratch);
        arrange_queries(s, mine.queries);
        Block<T> blocks[2];
        if (from < end) locate(s, from, end, blocks[0]);
        for (int now = 0; from < end; from += BLOCK, now ^= 1) {
            const Block<T>& block = blocks[now];
            Block<T>* next = from + BLOCK < further ? &blocks[now ^ 1] : nullptr;
            if (next) locate(s, from + BLOCK, from + BLOCK < end ? end : further, *next);
            for (int j = 0; j < block.count; j += STEP)
                score_heads(s, block, j, stream(block, next, j, false), mine);
            for (int64_t head = 0; head < call.key_heads; head++) weigh_head(s, block, head, mine.scores, part);
            for (int j = 0; j < block.count; j += VALUES<T>)
                add_heads(s, block, j, stream(block, next, j, true), mine, part);
        }
    }

    // What is read AHEAD steps after the keys or values from `j` on. A block's keys are read, then its values, then those
    // of the next one.
    Stream stream(const Block<T>& block, const Block<T>* next, int j, bool values) const {
        int64_t element = call.codec ? 1 : sizeof(T), width = values ? call.value_dim : call.key_dim;
        int64_t bytes = STEP * call.key_heads * width * element;
        int64_t at = j + STEP * (bytes * AHEAD > AHEAD_BYTES ? AHEAD_BYTES / bytes + 1 : AHEAD);
        const Block<T>* in = &block;
        while (in && at >= in->count) {
            at -= in->count;
            if (values) in = next;
            values = !values;
        }
        if (!in) return {(const char*)block.keys[0], 0};
        const T* row = values ? in->values[at] : in->keys[at];
        return {(const char*)row, Stream::part<T> * element / int64_t(sizeof(T))};
    }

    // Rows of a key head lie together, query by query its group of heads. Where chunks overlap, the last has zeros.
    void arrange_queries(const Span& s, float* to) const {
        const int64_t whole = key_row.dim / CHUNK * CHUNK;
        for (int64_t head = 0; head < call.heads; head++)
            for (int64_t i = 0; i < s.size; i++) {
                const T* from = (const T*)call.query + (s.row + i) * call.query_row + head * call.query_head;
                float* row = to + (head / group * s.size * group + i * group + head % group) * key_row.padded;
                for (int64_t d = 0; d < whole; d += CHUNK) Chunk<T>::arrange(from + d, row + d);
                if (whole == key_row.dim) continue;
                T last[CHUNK] = {};
                T* rest = last + whole - key_row.at(whole / CHUNK);
                std::memcpy((void*)rest, (const void*)(from + whole), (key_row.dim - whole) * sizeof(T));
                Chunk<T>::arrange(last, row + whole);
            }
    }

    // One head of `count` rows: where rows lie, and how many elements behind that the head begins. Those of records, and
    // those shorter than a chunk, lie in `spare`.
    struct Head {
        const T* const* rows;
        int64_t offset;
    };
    Head head_of(const T* const* from, int count, int64_t head, int64_t apart, const Row& row, T* spare, const T** to) const {
        if (call.codec) widen_rows(Codec(call.codec), from, count, head, row, spare, to);
        else if (row.dim < CHUNK) point(from, count, head * apart, row, spare, to);
        else return {from, head * apart};
        return {to, 0};
    }

    void score_heads(const Span& s, const Block<T>& block, int j, Stream ahead, const Scratch& mine) const {
        constexpr int STEPS = LANES / STEP;
        const T* made[STEP];
        int64_t rows = s.size * group;
        bool last = j % LANES == LANES - STEP || j + STEP >= block.count;
        for (int64_t head = 0; head < call.key_heads; head++) {
            auto [keys, offset] = head_of(block.keys + j, STEP, head, call.key_head, key_row, mine.rows, made);
            for (int64_t row = head * rows; row < (head + 1) * rows; row += TOGETHER) {
                const float* queries = mine.queries + row * key_row.padded;
                Stream none = {ahead.at, 0}, &asked = row == head * rows ? ahead : none;  // once for a head
                vf* to = mine.folded + row * STEPS + j % LANES / STEP;
                switch ((head + 1) * rows - row) {
                    case 1: score_step<1>(queries, keys, offset, key_row, asked, to); break;
                    case 2: score_step<2>(queries, keys, offset, key_row, asked, to); break;
                    case 3: score_step<TOGETHER == 2 ? 2 : 3>(queries, keys, offset, key_row, asked, to); break;
                    default: score_step<TOGETHER>(queries, keys, offset, key_row, asked, to);
                }
            }
            for (int64_t row = head * rows; row < (head + 1) * rows && last; row++)
                store(mine.scores + row * BLOCK + j / LANES * LANES, fold_all(mine.folded + row * STEPS));
        }
    }

    // The weights of a head's rows, and what was summed so far to their scale.
    void weigh_head(const Span& s, const Block<T>& block, int64_t head, float* scores, Partial part) const {
        Scales scales;
        if (call.codec) {
            read_scales(block.keys, block.count, call.key_begin, head, scales.keys);
            read_scales(block.values, block.count, call.value_begin, head, scales.values);
        }
        int64_t rows = s.size * group;
        float most[FEW<T>];
        for (int64_t row = head * rows; row < (head + 1) * rows; row++) {
            float* mine = scores + row * BLOCK;
            for (int j = 0; j < BLOCK; j += LANES) store(mine + j, load(mine + j) * call.scale);
            if (call.codec) multiply(mine, scales.keys);
            conceal(s, block, row % rows / group, mine);
            most[row - head * rows] = largest(mine);
        }
        for (int64_t row = head * rows; row < (head + 1) * rows; row++) {
            float* mine = scores + row * BLOCK;
            float factor = soften(mine, most[row - head * rows], part.most[row], part.total[row]);
            if (call.codec) multiply(mine, scales.values);
            rescale(part.sums + row * value_row.padded, value_row, factor);
        }
    }

    void add_heads(const Span& s, const Block<T>& block, int j, Stream ahead, const Scratch& mine, Partial part) const {
        const T* made[VALUES<T>];
        int64_t rows = s.size * group;
        int64_t count = block.count - j < VALUES<T> ? block.count - j : VALUES<T>;
        for (int64_t head = 0; head < call.key_heads; head++) {
            auto [values, offset] = head_of(block.values + j, count, head, call.value_head, value_row, mine.rows, made);
            for (int64_t row = 0; row < rows; row += SUMMED) {
                int64_t last = row + SUMMED < rows ? row + SUMMED - 1 : rows - 1;
                int64_t low = seen(s, block, row / group).low - j, high = seen(s, block, last / group).high - j;
                int from = low < 0 ? 0 : low < count ? low : count, to = high < from ? from : high < count ? high : count;
                const float* weights = mine.scores + (head * rows + row) * BLOCK + j;
                float* sums = part.sums + (head * rows + row) * value_row.padded;
                Stream none = {ahead.at, 0}, &asked = row ? none : ahead;  // once for a head
                switch (last - row) {
                    case 0: add_rows<1>(weights, values, offset, from, to, value_row, sums, asked); break;
                    case 1: add_rows<2>(weights, values, offset, from, to, value_row, sums, asked); break;
                    case 2: add_rows<3>(weights, values, offset, from, to, value_row, sums, asked); break;
                    default: add_rows<SUMMED>(weights, values, offset, from, to, value_row, sums, asked);
                }
            }
        }
    }
};

}  // namespace
