// Attention of new tokens over long histories, read where they lie: pages [slots, page, heads, dim].
//
// Per session and key head: scores in float32, softmax with a running maximum, times the values. A history is cut into
// ranges that any thread may take; where they are cut follows from the session's own positions alone, and partial
// results are put together in order, so that neither company nor the number of threads changes a bit of the result.
// cache/attention/cpu.py calls it and knows its structs.

#include <atomic>
#include <cstdlib>
#include <new>
#include <type_traits>

#include "few_rows.h"
#include "tiled_attention.h"

namespace {

constexpr int64_t TASKS = 2;  // at least so many for each thread, as they take different times

template <class T>
struct Work : Layout<T> {
    typedef Layout<T> Base;
    using Base::Base;
    using Base::call;
    using Base::conceal;
    using Base::key_row;
    using Base::value_row;
    using Base::group;
    using Base::key_width;
    using Base::ranges;
    using Base::range;
    using Base::partial_floats;
    using Base::query_floats;
    using Base::partial;
    using Base::point;
    using Base::seen;
    using Base::locate;
    using Base::widen_head;
    using Base::work_floats;

    // Into how many parts, of some key heads each, a session's ranges are cut to make `more` times as many tasks. Heads
    // do not change each other's results. Few rows read all heads of a token at once, and tiles pass from head to head.
    int64_t head_parts(const Span& s, int64_t more) const {
        return Base::few(s) || Base::by_tiles(s) ? 1 : more < call.key_heads ? more : call.key_heads;
    }

    // One range of one session, some of the key heads: pages are read in the order in which they lie.
    void run(const Span& s, int64_t number, int64_t head, int64_t last, float* result, float* scratch) const {
        int64_t begin = call.first[s.row], stop = s.start + s.size, size = range(s, stop - begin), rows = s.size * group;
        Partial part = partial(s, result);
        std::memset(part.sums + head * rows * value_row.padded, 0, sizeof(float) * (last - head) * rows * value_row.padded);
        for (int64_t i = head * rows; i < last * rows; i++) part.most[i] = NEVER, part.total[i] = 0;
        int64_t from = begin + number * size, end = from + size < stop ? from + size : stop;
#if defined(WITH_TILES)
        if constexpr (std::is_same<T, bf16>::value)
            if (Base::by_tiles(s)) return TiledWork<T>(call).tiled(s, from, end, part, scratch);
#endif
        // The block after the last is read next where no other thread takes the next range.
        int64_t further = call.together && call.threads > 1 ? end : stop;
        if (Base::few(s)) return FewRows<T>(call).run(s, from, end, further, part, scratch);
        read_queries(s, head, last, scratch);
        Block<T> blocks[2];
        if (from < end) locate(s, from, end, blocks[0]);
        for (int now = 0; from < end; from += BLOCK, now ^= 1) {
            Block<T>* next = from + BLOCK < further ? &blocks[now ^ 1] : nullptr;
            if (next) locate(s, from + BLOCK, from + BLOCK < end ? end : further, *next);
            for (int64_t h = head; h < last; h++)
                one_head(s, blocks[now], next, h, scratch, part, scratch + query_floats(s), scratch + work_floats(s));
        }
    }

    // Queries, scaled, of some key heads: the rows of one lie together, query by query its group of heads.
    void read_queries(const Span& s, int64_t first, int64_t last, float* to) const {
        int64_t each = s.size * group * key_width;
        std::memset(to + first * each, 0, sizeof(float) * (last - first) * each);
        for (int64_t head = first * group; head < last * group; head++)
            for (int64_t i = 0; i < s.size; i++) {
                const T* from = (const T*)call.query + (s.row + i) * call.query_row + head * call.query_head;
                int64_t row = head / group * s.size * group + i * group + head % group;
                for (int64_t d = 0; d < call.key_dim; d++) to[row * key_width + d] = get(from[d]) * call.scale;
            }
    }

    void one_head(const Span& s, const Block<T>& block, const Block<T>* next, int64_t head, const float* queries,
                  Partial part, float* scratch, float* widened) const {
        float *columns = scratch, *plain = columns + BLOCK * key_width;
        T* spare = (T*)(plain + BLOCK * value_row.padded);
        const T *keys[BLOCK], *values[BLOCK];
        Scales made;
        const Scales* scales = nullptr;
        if (call.codec) {
            widen_head(block, head, widened, keys, values, made);
            scales = &made;
        } else {
            point(block.keys, block.count, head * call.key_head, key_row, spare, keys);
            point(block.values, block.count, head * call.value_head, value_row, spare + BLOCK * CHUNK, values);
        }
        for (int j = block.count; j % LANES; j++) keys[j] = keys[j - 1], values[j] = values[j - 1];
        Ahead<T> ahead{call.codec ? nullptr : next, head * call.key_head, head * call.value_head};
        turn(keys, block.count, key_row, ahead, columns);
        int64_t rows = s.size * group, first = head * rows;
        queries += first * key_width;
        Partial mine = {part.sums + first * value_row.padded, part.most + first, part.total + first};
        if (rows <= 2 * TILE) return all_rows(s, block, scales, queries, columns, values, value_row, mine);
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
        all_rows(s, block, scales, queries, columns, floats, Row(value_row.padded), mine);
    }

    template <class V>
    void all_rows(const Span& s, const Block<T>& block, const Scales* scales, const float* queries,
                  const float* columns, const V* const* values, const Row& width, Partial part) const {
        int64_t rows = s.size * group;
        for (int64_t row = 0; row < rows; row += TILE) {
            Partial tile = {part.sums + row * width.padded, part.most + row, part.total + row};
            const float* query = queries + row * key_width;
            switch (rows - row) {
                case 1: some_rows<1>(s, block, scales, row, query, columns, values, width, tile); break;
                case 2: some_rows<2>(s, block, scales, row, query, columns, values, width, tile); break;
                case 3: some_rows<3>(s, block, scales, row, query, columns, values, width, tile); break;
                case 4: some_rows<4>(s, block, scales, row, query, columns, values, width, tile); break;
                case 5: some_rows<TILE < 5 ? TILE : 5>(s, block, scales, row, query, columns, values, width, tile); break;
                default: some_rows<TILE>(s, block, scales, row, query, columns, values, width, tile);
            }
        }
    }

    template <int ROWS, class V>
    void some_rows(const Span& s, const Block<T>& block, const Scales* scales, int64_t row, const float* query,
                   const float* columns, const V* const* values, const Row& width, Partial tile) const {
        int64_t low = seen(s, block, row / group).low, high = seen(s, block, (row + ROWS - 1) / group).high;
        if (low >= block.count || high <= 0) return;
        alignas(64) float weights[ROWS * BLOCK];
        score<ROWS>(query, columns, block.count, key_width, weights);
        for (int r = 0; r < ROWS; r++) {
            if (scales) multiply(weights + r * BLOCK, scales->keys);
            conceal(s, block, (row + r) / group, weights + r * BLOCK);
            float factor = soften(weights + r * BLOCK, largest(weights + r * BLOCK), tile.most[r], tile.total[r]);
            if (scales) multiply(weights + r * BLOCK, scales->values);
            rescale(tile.sums + r * width.padded, width, factor);
        }
        int from = low < 0 ? 0 : low, to = high < block.count ? high : block.count;
        NothingAsked nothing;
        add_rows<ROWS>(weights, values, 0, from, to, width, tile.sums, nothing);
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
        int64_t span, number, head, last;  // key heads
    }* list;
    float **results, *scratch;  // results: per span, where its ranges' results lie
    int64_t scratch_each;
    std::atomic<int64_t>* left;  // per span: tasks that are not done
    std::atomic<int64_t> next{0}, members{0};

    // Lists the tasks of all spans, each cut into `more` times as many where that is possible; results lie from `at` on.
    void cut(int64_t more, float* at) {
        for (int64_t n = 0, task = 0; n < work.call.count; n++) {
            const Span& s = work.call.spans[n];
            const int64_t ranges = work.ranges(s), parts = work.head_parts(s, more), heads = work.call.key_heads;
            new (left + n) std::atomic<int64_t>(ranges * parts);
            results[n] = at;
            at += ranges * work.partial_floats(s);
            for (int64_t i = 0; i < ranges * parts; i++) {
                const int64_t part = i % parts;
                list[task++] = {n, i / parts, part * heads / parts, (part + 1) * heads / parts};
            }
        }
    }

    static void member(void* team) { ((Team*)team)->take(); }
    void take() {
        float* mine = scratch + members.fetch_add(1) * scratch_each;
        for (int64_t i; (i = next.fetch_add(1)) < tasks;) {
            const Task& task = list[i];
            const Span& s = work.call.spans[task.span];
            float* result = results[task.span];
            work.run(s, task.number, task.head, task.last, result + task.number * work.partial_floats(s), mine);
            if (left[task.span].fetch_sub(1, std::memory_order_acq_rel) == 1) work.merge(s, result);
        }
    }
};

template <class T>
int attend(const Call& call) {
    Work<T> work(call);
    int64_t ranges = 0, tasks = 0, floats = 0, each = 0;
    for (int64_t n = 0; n < call.count; n++) {
        const Span& s = call.spans[n];
        ranges += work.ranges(s);
        floats += work.ranges(s) * work.partial_floats(s);
        if (work.scratch_floats(s) > each) each = work.scratch_floats(s);
    }
    const bool many = call.together && call.threads > 1;
    const int64_t more = many && ranges ? (TASKS * call.threads + ranges - 1) / ranges : 1;
    for (int64_t n = 0; n < call.count; n++) tasks += work.ranges(call.spans[n]) * work.head_parts(call.spans[n], more);
    const bool together = many && tasks > 1;
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
    team.cut(more, at);
    if (together) call.together(Team<T>::member, &team, unsigned(threads), nullptr);
    else team.take();
    std::free(memory);
    return 0;
}

}  // namespace

struct Store {  // new keys and values of a layer, one token after the other, that go to pages of records
    const void *key, *value;
    uint8_t *key_pages, *value_pages;
    int64_t rows, heads, key_dim, value_dim, key_begin, value_begin, key_bytes, value_bytes, codec, type;
};

template <class T>
static void store_records(const Store& s, const int64_t* places) {
    for (int64_t i = 0; i < s.rows; i++) {
        uint8_t *key = s.key_pages + places[i] * s.key_bytes, *value = s.value_pages + places[i] * s.value_bytes;
        pack_record((const T*)s.key + i * s.heads * s.key_dim, s.heads, s.key_dim, s.key_begin, Codec(s.codec), key);
        pack_record((const T*)s.value + i * s.heads * s.value_dim, s.heads, s.value_dim, s.value_begin, Codec(s.codec), value);
    }
}

// `places`: of each token, counted in tokens.
extern "C" void warmturn_store(const Store* call, const int64_t* places) {
    switch (call->type) {
        case 0: return store_records<float>(*call, places);
        case 1: return store_records<bf16>(*call, places);
        default: return store_records<f16>(*call, places);
    }
}

extern "C" int warmturn_attend(const Call* call) {  // 0, or 1 where there is no memory
    switch (call->type) {
        case 0: return attend<float>(*call);
        case 1: return attend<bf16>(*call);
        default: return attend<f16>(*call);
    }
}
