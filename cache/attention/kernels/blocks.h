// What is done with a block of keys of one session: keys as columns, scores of a few queries, weights, and sums of values.

#pragma once

#include "vectors.h"

namespace {

constexpr int BLOCK = 64;  // keys that are worked on at a time, a multiple of every LANES
constexpr float NEVER = -INFINITY;

// Rows of `dim` elements as chunks. The last chunk overlaps the one before where dim is no multiple.
struct Row {
    int64_t dim, chunks, padded;
    explicit Row(int64_t d) : dim(d), chunks((d + CHUNK - 1) / CHUNK), padded(chunks * CHUNK) {}
    int64_t at(int64_t chunk) const { return dim < CHUNK ? 0 : chunk + 1 < chunks ? chunk * CHUNK : dim - CHUNK; }
};

template <class T>
void write_out(const float* from, const Row& row, float factor, T* to) {
    for (int64_t c = 0; c < row.chunks; c++) {
        for (int i = 0; i < CHUNK && row.at(c) + i < row.dim; i++) {
            int lane = sizeof(T) == 4 ? i : i / 2 + i % 2 * LANES;
            put(to + row.at(c) + i, from[c * CHUNK + lane] * factor);
        }
    }
}

// One register of words, of the same place in LANES keys, as a column per element of the word.
inline void spread(float, vf word, float* columns, int i) { store(columns + i * BLOCK, word); }
inline void spread(bf16, vf word, float* columns, int i) {
    store(columns + 2 * i * BLOCK, (vf)((vu)word << 16));
    store(columns + (2 * i + 1) * BLOCK, (vf)((vu)word & 0xffff0000u));
}
inline void spread(f16, vf word, float* columns, int i) {
    store(columns + 2 * i * BLOCK, halves((vu)word & 0xffffu));
    store(columns + (2 * i + 1) * BLOCK, halves((vu)word >> 16));
}

template <class T>
struct Block {  // up to BLOCK keys of one session; pointers behind the last are like it
    const T *keys[BLOCK], *values[BLOCK];
    int64_t first;
    int count;
};

template <class T>
struct Ahead {  // a head's rows of the block that is read next, or of none
    const Block<T>* block;
    int64_t key, value;  // elements before the head's
};

// Keys as columns, in float32: columns[d * BLOCK + j] = element d of key j, for a count rounded up to LANES. The next
// block is asked for meanwhile, a line of each of some rows at a time: more at once would stall on the few that can be
// under way. It comes into the second cache, as the nearest one has no room. (GCC drops functions that only ask.)
template <class T>
void turn(const T* const* keys, int count, const Row& row, const Ahead<T>& ahead, float* columns) {
    for (int j = 0; j < count; j += LANES) {
        for (int64_t c = 0; c < row.chunks; c++) {
            for (unsigned half = 0; half < sizeof(T) / 2; half++) {  // a chunk is one register of words, or two
                int64_t at = row.at(c) + half * LANES;
                vf words[LANES];
                for (int i = 0; ahead.block && i < LANES; i++) {
                    __builtin_prefetch(ahead.block->keys[j + i] + ahead.key + at, 0, 2);
                    __builtin_prefetch(ahead.block->values[j + i] + ahead.value + at, 0, 2);
                }
                for (int i = 0; i < LANES; i++) words[i] = load((const float*)(keys[j + i] + at));
                transpose(words);
                for (int i = 0; i < LANES; i++) spread(T(), words[i], columns + at * BLOCK + j, i);
            }
        }
    }
}

// scores[r * BLOCK + j] = query r * key j, for ROWS queries and all keys of a block.
template <int ROWS>
void score(const float* queries, const float* columns, int count, int64_t dim, float* scores) {
    constexpr int VECTORS = 2 * WIDE;
    for (int j = 0; j < count; j += VECTORS * LANES) {
        vf s[ROWS][VECTORS] = {};
        for (int64_t d = 0; d < dim; d++) {
            vf k[VECTORS];
            for (int i = 0; i < VECTORS; i++) k[i] = load(columns + d * BLOCK + j + i * LANES);
            for (int r = 0; r < ROWS; r++) {
                vf q = splat(queries[r * dim + d]);
                for (int i = 0; i < VECTORS; i++) s[r][i] += q * k[i];
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < VECTORS; i++) store(scores + r * BLOCK + j + i * LANES, s[r][i]);
    }
}

struct NothingAsked {  // in place of a Stream
    template <class T>
    void ask() {}
};

// sums[r] += weights[r * BLOCK + j] * value j, over the keys from..to, CHUNKS chunks from `c` on; values begin `offset`
// elements behind where `values` points. `stream` asks for something with each chunk that is read. Not inlined: there GCC
// keeps sums in memory.
template <class T, int ROWS, int CHUNKS, class Asks>
__attribute__((noinline)) void add_values(const float* weights, const T* const* values, int64_t offset, int from, int to,
                                          const Row& row, int64_t c, float* sums, Asks& stream) {
    Asks next = stream;  // in registers
    const int64_t padded = row.padded;
    int64_t at[CHUNKS];
    vf s[ROWS][2 * CHUNKS];
    for (int i = 0; i < CHUNKS; i++) at[i] = offset + row.at(c + i);
    sums += c * CHUNK;
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 2 * CHUNKS; i++) s[r][i] = load(sums + r * padded + i * LANES);
    do {
        vf v[2 * CHUNKS];
        for (int i = 0; i < CHUNKS; i++) load(values[from] + at[i], v[2 * i], v[2 * i + 1]), next.template ask<T>();
        for (int r = 0; r < ROWS; r++) {
            vf weight = splat(weights[r * BLOCK + from]);
            for (int i = 0; i < 2 * CHUNKS; i++) s[r][i] += weight * v[i];
        }
    } while (++from < to);
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 2 * CHUNKS; i++) store(sums + r * padded + i * LANES, s[r][i]);
    stream = next;
}

// `add_values` over all chunks.
template <int ROWS, class T, class Asks>
void add_rows(const float* weights, const T* const* values, int64_t offset, int from, int to, const Row& row, float* sums,
              Asks& stream) {
    if (from >= to) return;
    int64_t c = 0;
    for (; c + WIDE <= row.chunks; c += WIDE)
        add_values<T, ROWS, WIDE>(weights, values, offset, from, to, row, c, sums, stream);
    if (c < row.chunks) add_values<T, ROWS, 1>(weights, values, offset, from, to, row, c, sums, stream);
}

// Sums so far, to the scale of new weights.
inline void rescale(float* sums, const Row& row, float factor) {
    for (int64_t i = 0; i < row.padded && factor != 1.0f; i += LANES) store(sums + i, load(sums + i) * factor);
}

inline float largest(const float* scores) {
    vf top = load(scores);
    for (int j = LANES; j < BLOCK; j += LANES) top = larger(load(scores + j), top);
    return fold(top, larger);
}

// Scores, of which `here` is the largest, to weights, in place, up to a common factor: `most` is the largest score so far
// and `total` the sum of weights relative to it. Returns by what earlier sums are to be multiplied.
inline float soften(float* scores, float here, float& most, float& total) {
    float now = here > most ? here : most;
    vf added = {}, base = splat(now == NEVER ? 0.0f : now);
    for (int j = 0; j < BLOCK; j += LANES) {
        vf weight = exponential(load(scores + j) - base);
        store(scores + j, weight);
        added += weight;
    }
    float factor = most == now ? 1.0f : std::exp(most - now);
    total = total * factor + fold(added, [](vf a, vf b) { return a + b; });
    most = now;
    return factor;
}

}  // namespace
