// A call's arguments, and how its work is cut: ranges of keys, and where their queries and results lie.

#pragma once

#include <type_traits>

#include "records.h"
#include "tiles.h"

namespace {

constexpr int TILE = LANES == 16 ? 6 : 4;  // queries that are worked on at a time, each with 2 * WIDE registers
constexpr int STEP = 4;  // keys that few rows read at a time
template <class T>  // and values: more of 16-bit ones, as reading them takes less of the time
constexpr int VALUES = sizeof(T) < 4 ? 4 * STEP : LANES == 16 ? STEP : 2 * STEP;
template <class T>  // most rows of a key head that are few: float16 takes longer to widen, which is done every four rows
constexpr int64_t FEW = (LANES == 16 ? 16 : 8) / (std::is_same<T, f16>::value ? 2 : 1);

constexpr int64_t RANGE = 256;  // fewest keys that are worth a task, for few queries
constexpr int64_t RANGES = 32;  // most ranges of one session

struct Span {  // one session's new tokens
    const int64_t* table;
    const uint8_t* flags;  // of the first `flagged` tokens: 0 for a hidden one
    int64_t flagged, row, size, start;
};

struct Call {
    const void *query, *key, *value;  // strides of all three in elements; in pages of records, of bytes
    int64_t query_row, query_head, key_slot, key_token, key_head, value_slot, value_token, value_head;
    void* out;             // [tokens, heads, value_dim]
    const float* sinks;    // [heads] or null
    const int64_t* first;  // [tokens]: the first position that each may look at; never falls within a span
    const Span* spans;
    void (*together)(void (*)(void*), void*, unsigned, const int64_t*);  // team.cpp; null: one thread
    int64_t count, page, heads, key_heads, key_dim, value_dim, threads, type;
    int64_t codec, key_begin, value_begin;  // of records: where their numbers begin, at which key and value point
    float scale, softcap;  // softcap 0: none
};

struct Partial {  // what a range of keys gives: per row sums [value_dim padded], the largest score, the sum of weights
    float *sums, *most, *total;
};

inline int64_t aligned(int64_t floats) { return (floats + 15) / 16 * 16; }  // to cache lines

template <class T>
struct Layout {
    const Call& call;
    const Row key_row, value_row;
    int64_t group, key_width;  // key_width: elements of a key, filled up with zeros to a chunk

    explicit Layout(const Call& c) : call(c), key_row(c.key_dim), value_row(c.value_dim), group(c.heads / c.key_heads) {
        key_width = c.key_dim < CHUNK ? CHUNK : c.key_dim;
    }

    int64_t ranges(const Span& s) const {
        int64_t length = s.start + s.size - call.first[s.row], size = range(s, length);
        return (length + size - 1) / size;
    }
    int64_t range(const Span& s, int64_t length) const {
        bool many = s.size > 8;  // queries: fewer ranges, as each holds results of all of them
        int64_t least = many ? RANGE * (s.size / 8) : RANGE, most = many ? RANGES / 4 : RANGES, wanted = (length + most - 1) / most;
        return wanted <= least ? least : (wanted + BLOCK - 1) / BLOCK * BLOCK;
    }
    int64_t partial_floats(const Span& s) const { return aligned(call.heads * s.size * (value_row.padded + 2)); }
    int64_t query_floats(const Span& s) const {
        int64_t plain = aligned(call.heads * s.size * key_width);
        int64_t tiled = aligned(call.key_heads * row_tiles(s) * tiled_floats());
        return plain > tiled ? plain : tiled;
    }
    int64_t row_tiles(const Span& s) const { return (s.size * group + 15) / 16; }
    int64_t tiled_floats() const { return call.key_dim * 8; }  // 16 queries, two elements to a float
    int64_t work_floats(const Span& s) const {  // of a thread: queries, columns, values, rows filled up
        return query_floats(s) + aligned(BLOCK * (aligned(key_width) + value_row.padded + 2 * CHUNK) + 16 * key_width);
    }
    bool by_tiles(const Span& s) const {  // tiled_attention.h: for fewer rows it does not pay
#if defined(WITH_TILES)
        bool fits = std::is_same<T, bf16>::value && call.key_dim % 32 == 0 && call.value_dim % 32 == 0;
        return fits && s.size * group > 8;
#else
        return false;
#endif
    }
    bool few(const Span& s) const { return s.size * group <= FEW<T> && !by_tiles(s); }  // few_rows.h
    int64_t few_floats(const Span& s) const {  // queries, scores, their parts, and rows of one head
        int64_t widest = key_row.padded > value_row.padded ? key_row.padded : value_row.padded;
        return aligned(call.heads * s.size * (key_row.padded + BLOCK + LANES * LANES / STEP) + VALUES<T> * widest);
    }
    int64_t scratch_floats(const Span& s) const {  // and what is widened of records
        if (few(s)) return few_floats(s);
        return work_floats(s) + (call.codec ? BLOCK * (key_row.padded + value_row.padded) : 0);
    }
    void widen_head(const Block<T>& block, int64_t head, float* scratch, const T** keys, const T** values, Scales& scales) const {
        T *wide_keys = (T*)scratch, *wide_values = wide_keys + BLOCK * key_row.padded;
        widen_rows(Codec(call.codec), block.keys, block.count, head, key_row, wide_keys, keys);
        widen_rows(Codec(call.codec), block.values, block.count, head, value_row, wide_values, values);
        read_scales(block.keys, block.count, call.key_begin, head, scales.keys);
        read_scales(block.values, block.count, call.value_begin, head, scales.values);
    }

    // The rows of one head. Those shorter than a chunk are copied and filled up with zeros.
    static void point(const T* const* from, int count, int64_t offset, const Row& row, T* spare, const T** to) {
        for (int j = 0; j < count; j++) to[j] = from[j] + offset;
        if (row.dim >= CHUNK) return;
        std::memset((void*)spare, 0, count * CHUNK * sizeof(T));
        for (int j = 0; j < count; j++)
            to[j] = (const T*)std::memcpy((void*)(spare + j * CHUNK), (const void*)to[j], row.dim * sizeof(T));
    }

    // What query `i` sees of a block: the keys from `low` on and before `high`, which may lie outside it.
    struct Seen {
        int64_t low, high;
    };
    Seen seen(const Span& s, const Block<T>& block, int64_t i) const {
        return {call.first[s.row + i] - block.first, s.start + i + 1 - block.first};
    }

    // The soft cap, and minus infinity for what query `i` does not see.
    void conceal(const Span& s, const Block<T>& block, int64_t i, float* scores) const {
        if (call.softcap != 0.0f)
            for (int j = 0; j < BLOCK; j += LANES)
                store(scores + j, call.softcap * tangent(load(scores + j) / call.softcap));
        auto [low, high] = seen(s, block, i);
        for (int64_t j = 0; j < low && j < BLOCK; j++) scores[j] = NEVER;
        if (high > block.count) high = block.count;
        for (int64_t j = high < 0 ? 0 : high; j < BLOCK; j++) scores[j] = NEVER;
        for (int64_t j = 0; j < block.count && block.first + j < s.flagged; j++)
            if (!s.flags[block.first + j]) scores[j] = NEVER;
    }

    Partial partial(const Span& s, float* at) const {
        int64_t rows = call.heads * s.size;
        return {at, at + rows * value_row.padded, at + rows * (value_row.padded + 1)};
    }

    void locate(const Span& s, int64_t from, int64_t end, Block<T>& block) const {
        block.first = from;
        block.count = end - from < BLOCK ? end - from : BLOCK;
        int64_t page = from / call.page, offset = from % call.page;
        int64_t size = call.codec ? 1 : sizeof(T);
        for (int j = 0; j < block.count; page++, offset = 0) {
            const char* key = (const char*)call.key + s.table[page] * call.key_slot * size;
            const char* value = (const char*)call.value + s.table[page] * call.value_slot * size;
            for (; offset < call.page && j < block.count; offset++, j++) {
                block.keys[j] = (const T*)(key + offset * call.key_token * size);
                block.values[j] = (const T*)(value + offset * call.value_token * size);
            }
        }
        for (int j = block.count; j < BLOCK; j++) block.keys[j] = block.keys[j - 1], block.values[j] = block.values[j - 1];
    }
};

}  // namespace
