// Attention of few new tokens over long histories, read where they lie: pages [slots, page, heads, dim].
//
// Per session and key head: scores in float32, softmax with a running maximum, times the values. A history is cut into
// ranges that any thread may take; where they are cut follows from the session's own positions alone, and partial
// results are put together in order, so that neither company nor the number of threads changes a bit of the result.
// cache/native.py calls it and knows its structs.

#include <atomic>
#include <cstdlib>
#include <new>

#include "vectors.h"

namespace {

constexpr int BLOCK = 64;       // keys that are worked on at a time, a multiple of every LANES
constexpr int TILE = 4;         // queries that are worked on at a time, each with 2 * WIDE registers
constexpr int64_t RANGE = 256;  // fewest keys that are worth a task
constexpr int64_t RANGES = 32;  // most ranges of one session
constexpr float NEVER = -INFINITY;

struct Segment {  // one session's new tokens
    const int64_t* table;
    const uint8_t* flags;  // of the first `flagged` tokens: 0 for a hidden one
    int64_t flagged, row, size, start;
};

struct Call {
    const void *query, *key, *value;  // strides of all three in elements
    int64_t query_row, query_head, key_slot, key_token, key_head, value_slot, value_token, value_head;
    void* out;             // [tokens, heads, value_dim]
    const float* sinks;    // [heads] or null
    const int64_t* first;  // [tokens]: the first position that each may look at; never falls within a segment
    const Segment* segments;
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // as GOMP_parallel; null: one thread
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

    int64_t ranges(const Segment& s) const {
        int64_t span = s.start + s.size - call.first[s.row];
        return (span + range(span) - 1) / range(span);
    }
    int64_t range(int64_t span) const {
        int64_t wanted = (span + RANGES - 1) / RANGES;
        return wanted <= RANGE ? RANGE : (wanted + BLOCK - 1) / BLOCK * BLOCK;
    }
    int64_t partial_floats(const Segment& s) const { return aligned(call.heads * s.size * (value_row.padded + 2)); }
    int64_t query_floats(const Segment& s) const { return aligned(call.heads * s.size * key_width); }
    int64_t scratch_floats(const Segment& s) const {  // of a thread: queries, columns, values, rows filled up
        return query_floats(s) + BLOCK * (aligned(key_width) + value_row.padded + 2 * CHUNK);
    }
    Partial partial(const Segment& s, float* at) const {
        int64_t rows = call.heads * s.size;
        return {at, at + rows * value_row.padded, at + rows * (value_row.padded + 1)};
    }

    // One range of one session, all heads: pages are read in the order in which they lie.
    void run(const Segment& s, int64_t number, float* result, float* scratch) const {
        int64_t begin = call.first[s.row], stop = s.start + s.size, size = range(stop - begin);
        Partial part = partial(s, result);
        std::memset(part.sums, 0, sizeof(float) * call.heads * s.size * value_row.padded);
        for (int64_t i = 0; i < call.heads * s.size; i++) part.most[i] = NEVER, part.total[i] = 0;
        read_queries(s, scratch);
        int64_t from = begin + number * size, end = from + size < stop ? from + size : stop;
        for (Block<T> block; from < end; from += BLOCK) {
            locate(s, from, end, block);
            for (int64_t head = 0; head < call.key_heads; head++)
                one_head(s, block, head, scratch, part, scratch + query_floats(s));
        }
    }

    // Queries, scaled: the rows of one key head lie together, query by query its group of heads.
    void read_queries(const Segment& s, float* to) const {
        std::memset(to, 0, sizeof(float) * query_floats(s));
        for (int64_t head = 0; head < call.heads; head++)
            for (int64_t i = 0; i < s.size; i++) {
                const T* from = (const T*)call.query + (s.row + i) * call.query_row + head * call.query_head;
                int64_t row = head / group * s.size * group + i * group + head % group;
                for (int64_t d = 0; d < call.key_dim; d++) to[row * key_width + d] = get(from[d]) * call.scale;
            }
    }

    void locate(const Segment& s, int64_t from, int64_t end, Block<T>& block) const {
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

    void one_head(const Segment& s, const Block<T>& block, int64_t head, const float* queries, Partial part,
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
    void all_rows(const Segment& s, const Block<T>& block, const float* queries, const float* columns,
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
    void some_rows(const Segment& s, const Block<T>& block, int64_t row, const float* query, const float* columns,
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
    void conceal(const Segment& s, const Block<T>& block, int64_t i, float* scores) const {
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
    void merge(const Segment& s, float* results) const {
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
        int64_t segment, number;
    }* list;
    float **results, *scratch;  // results: per segment, where its ranges' results lie
    int64_t scratch_each;
    std::atomic<int64_t>* left;  // per segment: ranges that are not done
    std::atomic<int64_t> next{0}, members{0};

    static void member(void* team) { ((Team*)team)->take(); }
    void take() {
        float* mine = scratch + members.fetch_add(1) * scratch_each;
        for (int64_t i; (i = next.fetch_add(1)) < tasks;) {
            const Segment& s = work.call.segments[list[i].segment];
            float* result = results[list[i].segment];
            work.run(s, list[i].number, result + list[i].number * work.partial_floats(s), mine);
            if (left[list[i].segment].fetch_sub(1, std::memory_order_acq_rel) == 1) work.merge(s, result);
        }
    }
};

template <class T>
int attend(const Call& call) {
    Work<T> work(call);
    int64_t tasks = 0, floats = 0, each = 0;
    for (int64_t n = 0; n < call.count; n++) {
        const Segment& s = call.segments[n];
        tasks += work.ranges(s);
        floats += work.ranges(s) * work.partial_floats(s);
        if (work.scratch_floats(s) > each) each = work.scratch_floats(s);
    }
    bool together = call.parallel && call.threads > 1 && tasks > 1;  // a team of another size would be made anew
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
        int64_t ranges = work.ranges(call.segments[n]);
        new (left + n) Counter(ranges);
        results[n] = at;
        at += ranges * work.partial_floats(call.segments[n]);
        for (int64_t i = 0; i < ranges; i++) list[task++] = {n, i};
    }
    if (together) call.parallel(Team<T>::member, &team, unsigned(threads), 0);
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
