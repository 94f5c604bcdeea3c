// Attention of few new tokens over long histories, read where they lie: pages [slots, page, heads, dim].
//
// Per session and key head: scores in float32, softmax with a running maximum, times the values. A history is cut into
// ranges that any thread may take; where they are cut follows from the session's own positions alone, and partial
// results are put together in order, so that neither company nor the number of threads changes a bit of the result.
// cache/attention/cpu.py calls it and knows its structs.

#include <atomic>
#include <cstdlib>
#include <new>
#include <type_traits>

#include "tiles.h"
#include "vectors.h"

namespace {

constexpr int BLOCK = 64;       // keys that are worked on at a time, a multiple of every LANES
constexpr int TILE = 4;         // queries that are worked on at a time, each with 2 * WIDE registers
constexpr int64_t RANGE = 256;  // fewest keys that are worth a task, for few queries
constexpr int64_t RANGES = 32;  // most ranges of one session
constexpr float NEVER = -INFINITY;
constexpr float LOG2_E = 1.44269504f;
constexpr float SLACK = 6.0f;  // by which scores may pass the largest one before them, until sums are brought to its scale

struct Span {  // one session's new tokens
    const int64_t* table;
    const uint8_t* flags;  // of the first `flagged` tokens: 0 for a hidden one
    int64_t flagged, row, size, start;
};

struct Call {
    const void *query, *key, *value;  // strides of all three in elements
    int64_t query_row, query_head, key_slot, key_token, key_head, value_slot, value_token, value_head;
    void* out;             // [tokens, heads, value_dim]
    const float* sinks;    // [heads] or null
    const int64_t* first;  // [tokens]: the first position that each may look at; never falls within a span
    const Span* spans;
    void (*together)(void (*)(void*), void*, unsigned, const int64_t*);  // team.cpp; null: one thread
    int64_t count, page, heads, key_heads, key_dim, value_dim, threads, type;
    float scale, softcap;  // softcap 0: none
};

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

// Keys as columns, in float32: columns[d * BLOCK + j] = element d of key j, for a count rounded up to LANES. The values
// beside them are fetched meanwhile; asking for more lines at once, or sooner, stalls on the few that can be under way.
template <class T>
void turn(const T* const* keys, const T* const* values, int count, const Row& row, float* columns) {
    for (int j = 0; j < count; j += LANES) {
        for (int64_t c = 0; c < row.chunks; c++) {
            for (unsigned half = 0; half < sizeof(T) / 2; half++) {  // a chunk is one register of words, or two
                int64_t at = row.at(c) + half * LANES;
                vf words[LANES];
                for (int i = 0; i < LANES; i++) __builtin_prefetch(values[j + i] + at);
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

// sums[r] += weights[r * BLOCK + j] * value j, over the keys from..to, CHUNKS chunks from `c` on.
template <class T, int ROWS, int CHUNKS>
void add_values(const float* weights, const T* const* values, int from, int to, const Row& row, int64_t c, float* sums) {
    vf s[ROWS][2 * CHUNKS];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 2 * CHUNKS; i++) s[r][i] = load(sums + r * row.padded + c * CHUNK + i * LANES);
    for (int j = from; j < to; j++) {
        vf v[2 * CHUNKS];
        for (int i = 0; i < CHUNKS; i++) load(values[j] + row.at(c + i), v[2 * i], v[2 * i + 1]);
        for (int r = 0; r < ROWS; r++) {
            vf weight = splat(weights[r * BLOCK + j]);
            for (int i = 0; i < 2 * CHUNKS; i++) s[r][i] += weight * v[i];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 2 * CHUNKS; i++) store(sums + r * row.padded + c * CHUNK + i * LANES, s[r][i]);
}

// Scores to weights, in place, up to a common factor: `most` is the largest score so far and `total` the sum of
// weights relative to it. Returns by what earlier sums are to be multiplied.
float soften(float* scores, float& most, float& total) {
    vf top = load(scores);
    for (int j = LANES; j < BLOCK; j += LANES) top = larger(load(scores + j), top);
    float here = fold(top, larger), now = here > most ? here : most;
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

template <class T>
struct Block {  // up to BLOCK keys of one session
    const T *keys[BLOCK], *values[BLOCK];
    int64_t first;
    int count;
};

struct Partial {  // what a range of keys gives: per row sums [value_dim padded], the largest score, the sum of weights
    float *sums, *most, *total;
};

inline int64_t aligned(int64_t floats) { return (floats + 15) / 16 * 16; }  // to cache lines

template <class T>
struct Work {
    const Call& call;
    const Row key_row, value_row;
    int64_t group, key_width;  // key_width: elements of a key, filled up with zeros to a chunk

    explicit Work(const Call& c) : call(c), key_row(c.key_dim), value_row(c.value_dim), group(c.heads / c.key_heads) {
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
        int64_t plain = aligned(call.heads * s.size * key_width), tiled = call.key_heads * row_tiles(s) * tiled_floats();
        return plain > tiled ? plain : tiled;
    }
    int64_t row_tiles(const Span& s) const { return (s.size * group + 15) / 16; }
    int64_t tiled_floats() const { return call.key_dim * 8; }  // 16 queries, two elements to a float
    int64_t scratch_floats(const Span& s) const {  // of a thread: queries, columns, values, rows filled up
        return query_floats(s) + BLOCK * (aligned(key_width) + value_row.padded + 2 * CHUNK) + 16 * key_width;
    }
    Partial partial(const Span& s, float* at) const {
        int64_t rows = call.heads * s.size;
        return {at, at + rows * value_row.padded, at + rows * (value_row.padded + 1)};
    }

    // One range of one session, all heads: pages are read in the order in which they lie.
    void run(const Span& s, int64_t number, float* result, float* scratch) const {
        int64_t begin = call.first[s.row], stop = s.start + s.size, size = range(s, stop - begin);
        Partial part = partial(s, result);
        std::memset(part.sums, 0, sizeof(float) * call.heads * s.size * value_row.padded);
        for (int64_t i = 0; i < call.heads * s.size; i++) part.most[i] = NEVER, part.total[i] = 0;
        int64_t from = begin + number * size, end = from + size < stop ? from + size : stop;
#if defined(WITH_TILES)
        if constexpr (sizeof(T) == sizeof(bf16) && !std::is_same<T, f16>::value) {
            bool fits = call.key_dim % 32 == 0 && call.value_dim % 32 == 0;
            if (fits && s.size * group > 2 * TILE) return tiled(s, from, end, part, scratch);  // else it does not pay
        }
#endif
        read_queries(s, scratch);
        for (Block<T> block; from < end; from += BLOCK) {
            locate(s, from, end, block);
            for (int64_t head = 0; head < call.key_heads; head++)
                one_head(s, block, head, scratch, part, scratch + query_floats(s));
        }
    }

#if defined(WITH_TILES)
    // The same by tiles: 16 rows at a time, keys as they lie, weights rounded to bfloat16. What was just written
    // cannot be loaded into a tile at once, so sums are one step behind the weights that they are made of.
    void tiled(const Span& s, int64_t from, int64_t end, Partial part, float* scratch) const {
        uint32_t* queries = (uint32_t*)scratch;
        uint32_t* values[2] = {queries + query_floats(s), queries + query_floats(s) + BLOCK / 2 * call.value_dim};
        uint16_t* spare = (uint16_t*)(values[1] + BLOCK / 2 * call.value_dim);
        alignas(64) bf16 weights[2][16 * BLOCK];
        tile_queries(s, queries);
        Tiles tiles;
        Sums behind{};
        int64_t rows = s.size * group, shaped = 0, step = 0, unit = 0;
        Block<T> blocks[2];
        locate(s, from, end, blocks[0]);
        for (int turn = 0; from < end; from += BLOCK, turn ^= 1) {
            const Block<T>& block = blocks[turn];
            if (from + BLOCK < end) locate(s, from + BLOCK, end, blocks[turn ^ 1]);
            for (int64_t head = 0; head < call.key_heads; head++, unit ^= 1) {
                tile_values(block, head, values[unit]);
                bool same = head + 1 < call.key_heads;
                const Block<T>& next = same || from + BLOCK >= end ? block : blocks[turn ^ 1];
                int64_t ahead = (same ? head + 1 : 0) * call.value_head;
                for (int64_t row = 0; row < rows; row += 16) {
                    int64_t count = rows - row < 16 ? rows - row : 16;
                    int64_t low = call.first[s.row + row / group] - block.first;
                    int64_t high = s.start + (row + count - 1) / group + 1 - block.first;
                    if (low >= block.count || high <= 0) continue;
                    if (shaped != count) {
                        add_up(tiles, behind);
                        tiles.shape(0b01110000, shaped = count);
                    }
                    const uint32_t* query = queries + (head * row_tiles(s) + row / 16) * tiled_floats();
                    vf scores[BLOCK];  // of 16 rows each
                    tile_scores(tiles, block, head * call.key_head, query, spare, scores, next, row ? -1 : ahead);
                    int64_t first = head * rows + row;
                    Partial mine = {part.sums + first * value_row.padded, part.most + first, part.total + first};
                    if (behind.to == mine.sums) add_up(tiles, behind);
                    weigh(s, block, row, count, scores, weights[step], mine);
                    add_up(tiles, behind);
                    behind = {mine.sums, weights[step], values[unit], block.count > 32 ? 2 : 1};
                    step ^= 1;
                }
            }
        }
        add_up(tiles, behind);
    }

    struct Sums {  // of 16 rows that wait for the values of a block
        float* to;
        const bf16* weights;  // [2 halves of the block][16 rows][32]
        const uint32_t* values;
        int halves;
    };

    void add_up(Tiles& tiles, Sums& sums) const {
        for (int64_t c = 0; c < value_row.chunks && sums.to; c++) {
            float* to = sums.to + c * CHUNK;
            const uint32_t* tile = sums.values + c * 1024;
            TILE_SUMS(tiles, 4, to, value_row.padded * 4);
            TILE_SUMS(tiles, 5, to + 16, value_row.padded * 4);
            for (int half = 0; half < sums.halves; half++) {
                TILE_READ(tiles, 6, sums.weights + half * 512, 64);
                TILE_READ(tiles, 7, tile + half * 256, 64);
                TILE_MULTIPLY(tiles, 4, 6, 7);
                TILE_READ(tiles, 3, tile + half * 256 + 512, 64);
                TILE_MULTIPLY(tiles, 5, 6, 3);
            }
            TILE_WRITE(tiles, 4, to, value_row.padded * 4);
            TILE_WRITE(tiles, 5, to + 16, value_row.padded * 4);
        }
        sums.to = nullptr;
    }

    static vf power_of_two(vf x) {  // of x <= 0, to 4e-6; NaN stays NaN, and what is too small is 2^-126
        x = _mm512_max_ps(splat(-126.0f), x);
        vf n = _mm512_roundscale_ps(x, 0), r = x - n;
        vf p = splat(9.6181291e-3f);
        p = p * r + 5.5504109e-2f;
        p = p * r + 2.4022651e-1f;
        p = p * r + 6.9314718e-1f;
        return _mm512_scalef_ps(p * r + 1.0f, n);
    }

    // Scores to weights, and what was summed so far to their scale: `soften` for 16 rows at once, each in a lane.
    void weigh(const Span& s, const Block<T>& block, int64_t row, int64_t count, vf* scores, bf16* weights,
               Partial mine) const {
        vf most = splat(NEVER), total = {};
        std::memcpy(&most, mine.most, count * sizeof(float));
        std::memcpy(&total, mine.total, count * sizeof(float));
        float scale = call.scale;
        if (call.softcap != 0.0f) {
            for (int j = 0; j < block.count; j++) scores[j] = call.softcap * tangent(scores[j] * (scale / call.softcap));
            scale = 1.0f;
        }
        conceal_lanes(s, block, row, count, scores);
        for (int j = block.count; j < BLOCK; j++) scores[j] = splat(NEVER);
        vf tops[4] = {splat(NEVER), splat(NEVER), splat(NEVER), splat(NEVER)};
        for (int j = 0; j < BLOCK; j += 4)
            for (int t = 0; t < 4; t++) tops[t] = larger(scores[j + t], tops[t]);
        vf top = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])) * scale;
        top = top > most + SLACK ? top : most;
        vf base = (top == NEVER ? splat(0.0f) : top) * LOG2_E, sums[2] = {};
        alignas(64) vf words[BLOCK / 2];  // of two keys each
        scale *= LOG2_E;
        for (int j = 0; j < BLOCK; j += 2) {
            vf a = power_of_two(scores[j] * scale - base), b = power_of_two(scores[j + 1] * scale - base);
            sums[0] += a;
            sums[1] += b;
            words[j / 2] = (vf)(((vu)a + 0x8000u) >> 16 | (((vu)b + 0x8000u) & 0xffff0000u));
        }
        vf factor = most == top ? splat(1.0f) : exponential(most - top);
        total = total * factor + (sums[0] + sums[1]);
        std::memcpy(mine.most, &top, count * sizeof(float));
        std::memcpy(mine.total, &total, count * sizeof(float));
        for (int half = 0; half < 2; half++) transpose(words + half * 16);
        std::memcpy((void*)weights, words, sizeof(words));
        if (!_mm512_cmpneq_ps_mask(factor, splat(1.0f))) return;
        for (int64_t r = 0; r < count; r++)
            for (int64_t i = 0; i < value_row.padded && factor[r] != 1.0f; i += LANES) {
                float* sums = mine.sums + r * value_row.padded + i;
                store(sums, load(sums) * factor[r]);
            }
    }

    // Minus infinity for what a row's query does not see.
    void conceal_lanes(const Span& s, const Block<T>& block, int64_t row, int64_t count, vf* scores) const {
        int64_t oldest = row / group, newest = (row + count - 1) / group;
        if (call.first[s.row + newest] <= block.first && s.start + oldest + 1 >= block.first + block.count &&
            block.first >= s.flagged)
            return;
        alignas(64) int32_t low[16] = {}, high[16] = {};
        bool all = true;
        for (int64_t r = 0; r < count; r++) {
            int64_t i = (row + r) / group, from = call.first[s.row + i] - block.first, to = s.start + i + 1 - block.first;
            low[r] = int32_t(from < 0 ? 0 : from > BLOCK ? BLOCK : from);
            high[r] = int32_t(to < 0 ? 0 : to > BLOCK ? BLOCK : to);
            all = all && low[r] == 0 && high[r] >= block.count;
        }
        typedef int32_t vi __attribute__((vector_size(64)));
        for (int j = 0; j < block.count && !all; j++)
            scores[j] = *(vi*)low <= j && *(vi*)high > j ? scores[j] : splat(NEVER);
        for (int j = 0; j < block.count && block.first + j < s.flagged; j++)
            if (!s.flags[block.first + j]) scores[j] = splat(NEVER);
    }

    // Per key head and 16 rows: [key_dim / 32][16 pairs of elements][16 rows], zeros where there are fewer rows.
    void tile_queries(const Span& s, uint32_t* to) const {
        std::memset(to, 0, call.key_heads * row_tiles(s) * tiled_floats() * sizeof(uint32_t));
        for (int64_t head = 0; head < call.heads; head++)
            for (int64_t i = 0; i < s.size; i++) {
                const T* from = (const T*)call.query + (s.row + i) * call.query_row + head * call.query_head;
                int64_t row = i * group + head % group;
                uint32_t* tile = to + (head / group * row_tiles(s) + row / 16) * tiled_floats() + row % 16;
                for (int64_t pair = 0; pair < call.key_dim / 2; pair++) std::memcpy(tile + pair * 16, from + 2 * pair, 4);
            }
    }

    // [value_dim / 16][2 halves of the block][16 pairs of keys][16 words]: the even elements of a chunk, then the odd ones.
    // The keys beside them are fetched meanwhile.
    void tile_values(const Block<T>& block, int64_t head, uint32_t* to) const {
        int64_t offset = head * call.value_head;
        for (int pair = 0; pair < BLOCK / 2; pair++) {
            for (int j = 2 * pair; j < 2 * pair + 2 && j < block.count; j++) fetch(block.keys[j] + head * call.key_head, key_row);
            for (int64_t c = 0; c < value_row.chunks; c++) {
                vu a = {}, b = {};
                if (2 * pair < block.count) a = *(const vu_in_memory*)(block.values[2 * pair] + offset + c * CHUNK);
                if (2 * pair + 1 < block.count) b = *(const vu_in_memory*)(block.values[2 * pair + 1] + offset + c * CHUNK);
                uint32_t* tile = to + (c * 4 + pair / 16) * 256 + pair % 16 * 16;
                *(vu_in_memory*)tile = (a & 0xffffu) | b << 16;
                *(vu_in_memory*)(tile + 512) = a >> 16 | (b & 0xffff0000u);
            }
        }
    }

    static void fetch(const T* from, const Row& row) {
        for (int64_t c = 0; c < row.chunks; c++) __builtin_prefetch(from + c * CHUNK);
    }

    // The products of every key with 16 queries. The values that come next are fetched meanwhile.
    void tile_scores(Tiles& tiles, const Block<T>& block, int64_t offset, const uint32_t* query, uint16_t* spare, vf* scores,
                     const Block<T>& next, int64_t ahead) const {
        for (int j = 0; j < block.count; j += 32) {
            int64_t apart[2];
            bool both = block.count - j > 16;
            for (int i = j; i < j + 32 && i < next.count && ahead >= 0; i++) fetch(next.values[i] + ahead, value_row);
            const uint16_t* keys = lines(block, j, offset, spare, apart[0]);
            const uint16_t* more = both ? lines(block, j + 16, offset, spare + 16 * call.key_dim, apart[1]) : nullptr;
            TILE_ZERO(tiles, 0);
            TILE_ZERO(tiles, 1);
            for (int64_t d = 0; d < call.key_dim; d += 32) {
                TILE_READ(tiles, 7, query + d * 8, 64);
                TILE_READ(tiles, 2, keys + d, apart[0] * 2);
                TILE_MULTIPLY(tiles, 0, 2, 7);
                if (!both) continue;
                TILE_READ(tiles, 3, more + d, apart[1] * 2);
                TILE_MULTIPLY(tiles, 1, 3, 7);
            }
            TILE_WRITE(tiles, 0, scores + j, 64);
            if (both) TILE_WRITE(tiles, 1, scores + j + 16, 64);
        }
    }

    // 16 keys from `j` on as rows that are `apart`: where they lie, or brought together where that is not in one page.
    const uint16_t* lines(const Block<T>& block, int j, int64_t offset, uint16_t* spare, int64_t& apart) const {
        apart = j + 16 <= block.count ? block.keys[j + 1] - block.keys[j] : 0;
        for (int i = 2; i < 16 && apart; i++)
            if (block.keys[j + i] - block.keys[j] != i * apart) apart = 0;
        if (apart) return (const uint16_t*)(block.keys[j] + offset);
        for (int i = 0; i < 16; i++)
            std::memcpy(spare + i * call.key_dim, block.keys[j + i < block.count ? j + i : j] + offset,
                        call.key_dim * sizeof(T));
        apart = call.key_dim;
        return spare;
    }
#endif

    // Queries, scaled: the rows of one key head lie together, query by query its group of heads.
    void read_queries(const Span& s, float* to) const {
        std::memset(to, 0, sizeof(float) * query_floats(s));
        for (int64_t head = 0; head < call.heads; head++)
            for (int64_t i = 0; i < s.size; i++) {
                const T* from = (const T*)call.query + (s.row + i) * call.query_row + head * call.query_head;
                int64_t row = head / group * s.size * group + i * group + head % group;
                for (int64_t d = 0; d < call.key_dim; d++) to[row * key_width + d] = get(from[d]) * call.scale;
            }
    }

    void locate(const Span& s, int64_t from, int64_t end, Block<T>& block) const {
        block.first = from;
        block.count = end - from < BLOCK ? end - from : BLOCK;
        int64_t page = from / call.page, offset = from % call.page;
        for (int j = 0; j < block.count; page++, offset = 0) {
            const T* key = (const T*)call.key + s.table[page] * call.key_slot;
            const T* value = (const T*)call.value + s.table[page] * call.value_slot;
            for (; offset < call.page && j < block.count; offset++, j++) {
                block.keys[j] = key + offset * call.key_token;
                block.values[j] = value + offset * call.value_token;
            }
        }
    }

    void one_head(const Span& s, const Block<T>& block, int64_t head, const float* queries, Partial part,
                  float* scratch) const {
        float *columns = scratch, *plain = columns + BLOCK * key_width;
        T* spare = (T*)(plain + BLOCK * value_row.padded);
        const T *keys[BLOCK], *values[BLOCK];
        point(block.keys, block.count, head * call.key_head, key_row, spare, keys);
        point(block.values, block.count, head * call.value_head, value_row, spare + BLOCK * CHUNK, values);
        for (int j = block.count; j % LANES; j++) keys[j] = keys[j - 1], values[j] = values[j - 1];
        turn(keys, values, block.count, key_row, columns);
        int64_t rows = s.size * group, first = head * rows;
        queries += first * key_width;
        Partial mine = {part.sums + first * value_row.padded, part.most + first, part.total + first};
        if (rows <= 2 * TILE) return all_rows(s, block, queries, columns, values, value_row, mine);
        const float* floats[BLOCK];  // many rows: values are made float32 once
        for (int j = 0; j < block.count; j++) {
            floats[j] = plain + j * value_row.padded;
            for (int64_t c = 0; c < value_row.chunks; c++) {
                vf a, b;
                load(values[j] + value_row.at(c), a, b);
                store(plain + j * value_row.padded + c * CHUNK, a);
                store(plain + j * value_row.padded + c * CHUNK + LANES, b);
            }
        }
        all_rows(s, block, queries, columns, floats, Row(value_row.padded), mine);
    }

    template <class V>
    void all_rows(const Span& s, const Block<T>& block, const float* queries, const float* columns,
                  const V* const* values, const Row& width, Partial part) const {
        int64_t rows = s.size * group;
        for (int64_t row = 0; row < rows; row += TILE) {
            Partial tile = {part.sums + row * width.padded, part.most + row, part.total + row};
            const float* query = queries + row * key_width;
            switch (rows - row) {
                case 1: some_rows<1>(s, block, row, query, columns, values, width, tile); break;
                case 2: some_rows<2>(s, block, row, query, columns, values, width, tile); break;
                case 3: some_rows<3>(s, block, row, query, columns, values, width, tile); break;
                default: some_rows<TILE>(s, block, row, query, columns, values, width, tile);
            }
        }
    }

    // The rows of one head. Those shorter than a chunk are copied and filled up with zeros.
    static void point(const T* const* from, int count, int64_t offset, const Row& row, T* spare, const T** to) {
        for (int j = 0; j < count; j++) to[j] = from[j] + offset;
        if (row.dim >= CHUNK) return;
        std::memset((void*)spare, 0, count * CHUNK * sizeof(T));
        for (int j = 0; j < count; j++)
            to[j] = (const T*)std::memcpy((void*)(spare + j * CHUNK), (const void*)to[j], row.dim * sizeof(T));
    }

    template <int ROWS, class V>
    void some_rows(const Span& s, const Block<T>& block, int64_t row, const float* query, const float* columns,
                   const V* const* values, const Row& width, Partial tile) const {
        int64_t low = call.first[s.row + row / group] - block.first;
        int64_t high = s.start + (row + ROWS - 1) / group + 1 - block.first;
        if (low >= block.count || high <= 0) return;
        alignas(64) float weights[ROWS * BLOCK];
        score<ROWS>(query, columns, block.count, key_width, weights);
        for (int r = 0; r < ROWS; r++) {
            conceal(s, block, (row + r) / group, weights + r * BLOCK);
            float factor = soften(weights + r * BLOCK, tile.most[r], tile.total[r]);
            if (factor == 1.0f) continue;
            float* sums = tile.sums + r * width.padded;
            for (int64_t i = 0; i < width.padded; i += LANES) store(sums + i, load(sums + i) * factor);
        }
        int from = low < 0 ? 0 : low, to = high < block.count ? high : block.count;
        int64_t c = 0;
        for (; c + WIDE <= width.chunks; c += WIDE)
            add_values<V, ROWS, WIDE>(weights, values, from, to, width, c, tile.sums);
        if (c < width.chunks) add_values<V, ROWS, 1>(weights, values, from, to, width, c, tile.sums);
    }

    // The soft cap, and minus infinity for what query `i` does not see.
    void conceal(const Span& s, const Block<T>& block, int64_t i, float* scores) const {
        if (call.softcap != 0.0f)
            for (int j = 0; j < BLOCK; j += LANES)
                store(scores + j, call.softcap * tangent(load(scores + j) / call.softcap));
        int64_t low = call.first[s.row + i] - block.first, high = s.start + i + 1 - block.first;
        for (int64_t j = 0; j < low && j < BLOCK; j++) scores[j] = NEVER;
        if (high > block.count) high = block.count;
        for (int64_t j = high < 0 ? 0 : high; j < BLOCK; j++) scores[j] = NEVER;
        for (int64_t j = 0; j < block.count && block.first + j < s.flagged; j++)
            if (!s.flags[block.first + j]) scores[j] = NEVER;
    }

    // The ranges of one session into its rows of the output; `results` lie one after the other.
    void merge(const Span& s, float* results) const {
        int64_t count = ranges(s), stride = partial_floats(s), rows = s.size * group;
        for (int64_t row = 0; row < call.heads * s.size; row++) {
            int64_t head = row / rows * group + row % group, i = row % rows / group;
            float most = call.sinks ? call.sinks[head] : NEVER, total = 0;
            for (int64_t n = 0; n < count; n++) {
                float here = partial(s, results + n * stride).most[row];
                if (here > most) most = here;
            }
            if (call.sinks) total = std::exp(call.sinks[head] - most);
            float* sums = results + row * value_row.padded;
            for (int64_t n = 0; n < count; n++) {
                Partial part = partial(s, results + n * stride);
                float factor = part.most[row] == most ? 1.0f : std::exp(part.most[row] - most);
                total += part.total[row] * factor;
                const float* from = part.sums + row * value_row.padded;
                for (int64_t d = 0; d < value_row.padded; d += LANES) {
                    vf scaled = load(from + d) * factor;
                    store(sums + d, n ? load(sums + d) + scaled : scaled);
                }
            }
            T* out = (T*)call.out + ((s.row + i) * call.heads + head) * call.value_dim;
            write_out(sums, value_row, total == 0.0f ? 0.0f : 1.0f / total, out);
        }
    }
};

template <class T>
struct Team {  // of threads that take tasks until none is left
    Work<T> work;
    int64_t tasks;
    struct Task {
        int64_t span, number;
    }* list;
    float **results, *scratch;  // results: per span, where its ranges' results lie
    int64_t scratch_each;
    std::atomic<int64_t>* left;  // per span: ranges that are not done
    std::atomic<int64_t> next{0}, members{0};

    static void member(void* team) { ((Team*)team)->take(); }
    void take() {
        float* mine = scratch + members.fetch_add(1) * scratch_each;
        for (int64_t i; (i = next.fetch_add(1)) < tasks;) {
            const Span& s = work.call.spans[list[i].span];
            float* result = results[list[i].span];
            work.run(s, list[i].number, result + list[i].number * work.partial_floats(s), mine);
            if (left[list[i].span].fetch_sub(1, std::memory_order_acq_rel) == 1) work.merge(s, result);
        }
    }
};

template <class T>
int attend(const Call& call) {
    Work<T> work(call);
    int64_t tasks = 0, floats = 0, each = 0;
    for (int64_t n = 0; n < call.count; n++) {
        const Span& s = call.spans[n];
        tasks += work.ranges(s);
        floats += work.ranges(s) * work.partial_floats(s);
        if (work.scratch_floats(s) > each) each = work.scratch_floats(s);
    }
    bool together = call.together && call.threads > 1 && tasks > 1;
    int64_t threads = together ? call.threads : 1;
    typedef typename Team<T>::Task Task;
    typedef std::atomic<int64_t> Counter;
    void* memory = std::malloc(64 + (floats + threads * each) * sizeof(float) + tasks * sizeof(Task) +
                               call.count * (sizeof(float*) + sizeof(Counter)));
    if (!memory) return 1;
    float* at = (float*)(((uintptr_t)memory + 63) / 64 * 64);
    Task* list = (Task*)(at + floats + threads * each);
    float** results = (float**)(list + tasks);
    Counter* left = (Counter*)(results + call.count);
    Team<T> team{work, tasks, list, results, at + floats, each, left};
    for (int64_t n = 0, task = 0; n < call.count; n++) {
        int64_t ranges = work.ranges(call.spans[n]);
        new (left + n) Counter(ranges);
        results[n] = at;
        at += ranges * work.partial_floats(call.spans[n]);
        for (int64_t i = 0; i < ranges; i++) list[task++] = {n, i};
    }
    if (together) call.together(Team<T>::member, &team, unsigned(threads), nullptr);
    else team.take();
    std::free(memory);
    return 0;
}

}  // namespace

extern "C" int warmturn_attend(const Call* call) {  // 0, or 1 where there is no memory
    switch (call->type) {
        case 0: return attend<float>(*call);
        case 1: return attend<bf16>(*call);
        default: return attend<f16>(*call);
    }
}
