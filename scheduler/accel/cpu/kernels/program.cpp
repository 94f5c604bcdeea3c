// A program: what one module computes from the rows of a step, as instructions on rows of float32, and products with
// weights between them. Rows do not meet each other here. scheduler/accel/cpu/program.py writes programs and knows these structs.
//
// A row's values lie in an arena [rows][width] where they outlive a stage, else in a scratch that every row uses anew
// and that stays in the nearest cache. What is multiplied is prepared for that in a place of its own, all rows together. All vectors are written up to a multiple of LANES; what lies there is never read
// as a value.

#include <atomic>
#include <cstdlib>
#include <pthread.h>
#include <sched.h>

#include "convolution.h"
#include "delta_rule.h"
#include "experts.h"
#include "functions.h"
#include "low_rank.h"
#include "matrix.h"
#include "reading.h"
#include "scales.h"
#include "waiting.h"

namespace {

enum Opcode : int64_t { ADD, SUB, MUL, DIV, MAX, MIN, ABS, EXP, SQRT, TANH, SIGMOID, SILU,
                      ERF, SOFTPLUS, REDUCE_SUM, REDUCE_MAX, COPY, GATHER, LOAD, STORE, PACK, TOPK, TAKE, SCATTER };

enum Space : int64_t { SCRATCH, ARENA, FIXED };

struct Operand {
    int64_t at;      // floats from the start of its space; an address where it is FIXED
    int64_t space;
    int64_t period;  // element i is i % period; i / -period where negative; i where 0
};

struct Instruction {
    int64_t code, n;
    Operand out, a, b;
    const int64_t* table;  // COPY: (to, from, length) each; GATHER: (to, from) each; TOPK, TAKE and SCATTER:
                           // groups, elements of a group, and how many of them are chosen; PACK: how many products
                           // adapters may add to, and of each the number of its weight and its own; or null
    int64_t count;         // of the table; of a group that is reduced; the external; the type of what is prepared
};

struct External {
    void* data;
    int64_t stride, type;  // elements from row to row; 0 float32, 1 bfloat16, 2 float16, 3 int64, which is only read
};

// Between two blocks of a program: new keys and values are stored in pages, then attended to. Where there is a
// convolution or a delta rule instead, nothing is stored.
struct Attention {
    int (*attend)(const void*);  // cache/attention/kernels/attention.cpp; or that of convolution.h or of delta_rule.h
    const void* call;
    const char *key, *value;  // of `rows` tokens, one after the other
    char *key_pages, *value_pages;
    const int64_t* places;  // of each token, counted in tokens
    int64_t rows, key_bytes, value_bytes;  // of one token
    void (*store)(const void*, const int64_t*);  // of cache/attention/kernels/attention.cpp, if pages hold records; else null
    const void* records;         // its call
};

struct Stage {
    int64_t first, last;  // instructions; where they are none, a product
    Weight weight;
    int64_t in, out;      // of the product: floats of a row before it in what is prepared, and in the arena
    int64_t external;     // or, where it is not -1, that it is written to at once
    const Experts* experts;  // null where all rows meet the same weight
    int64_t adapted, product;  // the number of the weight, by which adapters know it, or -1; of the product
};

struct Call {
    const Stage* stages;
    int64_t count;
    const Instruction* instructions;
    const External* externals;
    float *arena, *prepared;
    int64_t width, chunk, rows;  // floats of a row, a multiple of 16; rows that the arena holds
    float* scratch;
    int64_t scratch_each, threads;
    void (*together)(void (*)(void*), void*, unsigned, const int64_t*);  // cache/attention/kernels/team.cpp; null: one thread
    const Adapters* adapters;  // null where adapters are added outside
    int64_t products;          // that adapters may add to
};

template <class F>
inline void unary(const Instruction& in, float* out, const float* a, F f) {
    for (int64_t i = 0; i < in.n; i += LANES) store(out + i, f(load(a + i)));
}

inline const float* place(const Operand& o, const float* base, int64_t i) {
    return base + (o.period == 0 ? i : o.period > 0 ? i % o.period : i / -o.period);
}

template <class F>
inline void binary(const Instruction& in, float* out, const float* a, const float* b, F f) {
    int64_t run = in.n, steps[2] = {in.a.period, in.b.period};
    for (int64_t step : steps)
        if (step && (step < 0 ? -step : step) < run) run = step < 0 ? -step : step;
    for (int64_t at = 0; at < in.n; at += run) {
        const float *left = place(in.a, a, at), *right = place(in.b, b, at);
        float* to = out + at;
        if (in.a.period < 0) {
            vf value = splat(*left);
            for (int64_t i = 0; i < run; i += LANES) store(to + i, f(value, load(right + i)));
        } else if (in.b.period < 0) {
            vf value = splat(*right);
            for (int64_t i = 0; i < run; i += LANES) store(to + i, f(load(left + i), value));
        } else {
            for (int64_t i = 0; i < run; i += LANES) store(to + i, f(load(left + i), load(right + i)));
        }
    }
}

template <class F>
inline void reduce(const Instruction& in, float* out, const float* a, float start, F f) {  // n groups of `count`
    for (int64_t g = 0; g < in.n; g++, a += in.count) {
        vf sums = splat(start);
        int64_t i = 0;
        for (; i + LANES <= in.count; i += LANES) sums = f(sums, load(a + i));
        for (; i < in.count; i++) sums = f(sums, [&] { vf one = splat(start); one[0] = a[i]; return one; }());
        out[g] = fold(sums, f);
    }
}

// The places of the largest elements of each group in descending order, of equal ones the first.
inline void topk(const int64_t* table, float* out, const float* a) {
    int64_t groups = table[0], size = table[1], most = table[2];
    for (int64_t g = 0; g < groups; g++, a += size, out += most) {
        int64_t found = 0;
        for (int64_t i = 0; i < size; i++) {
            if (found == most && a[i] <= a[int64_t(out[most - 1])]) continue;
            int64_t at = found < most ? found++ : most - 1;
            for (; at > 0 && !(a[i] <= a[int64_t(out[at - 1])]); at--) out[at] = out[at - 1];
            out[at] = float(i);
        }
    }
}
// The elements of each group at the places `b`.
inline void take(const int64_t* table, float* out, const float* a, const float* b) {
    for (int64_t g = 0; g < table[0]; g++, a += table[1])
        for (int64_t i = 0; i < table[2]; i++) *out++ = a[int64_t(*b++)];
}
// Ones at the places `a` of each group, zeros elsewhere.
inline void scatter(const int64_t* table, float* out, const float* a) {
    std::memset(out, 0, table[0] * table[1] * sizeof(float));
    for (int64_t g = 0; g < table[0]; g++, out += table[1])
        for (int64_t i = 0; i < table[2]; i++) out[int64_t(*a++)] = 1;
}

template <class T>
inline void read_row(const T* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i++) to[i] = get(from[i]);
}
template <class T>
inline void write_row(const float* from, int64_t n, T* to) {
    for (int64_t i = 0; i < n; i++) put(to + i, from[i]);
}

class Member {  // of a team, with a scratch of its own
public:
    Member(const Call& c, int64_t number) : call(c), scratch(c.scratch + number * c.scratch_each) {}

    // Part `part` of `parts` of a stage, for the rows from `start` on that are in the arena.
    void run(const Stage& stage, int64_t start, int64_t rows, int64_t part, int64_t parts) const {
        if (stage.experts) {
            RoutedProduct product(*stage.experts, stage.weight, call.arena, call.width, stage.out, rows, call.chunk, scratch);
            return product.run(part, parts);
        }
        if (stage.first == stage.last) {
            int64_t groups = column_groups(stage.weight), first = groups * part / parts, last = groups * (part + 1) / parts;
            const float* x = call.prepared + stage.in * call.chunk;
            if (stage.external < 0) {
                multiply(stage.weight, x, rows, call.arena + stage.out, call.width, first, last);
                adapt(stage, start, rows, call.arena + stage.out, call.width, first, last);
            }
            for (int64_t g = first; stage.external >= 0 && g < last; g++) {
                int64_t column = g * GROUP, n = stage.weight.out - column < GROUP ? stage.weight.out - column : GROUP;
                multiply(stage.weight, x, rows, scratch - column, GROUP, g, g + 1);
                adapt(stage, start, rows, scratch - column, GROUP, g, g + 1);
                for (int64_t row = 0; row < rows; row++)
                    write(call.externals[stage.external], start + row, column, n, scratch + row * GROUP);
            }
            return;
        }
        for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++)
            for (int64_t i = stage.first; i < stage.last; i++) execute(call.instructions[i], row, rows, start + row);
    }

private:
    const Call& call;
    float* scratch;

    bool adapts() const { return call.adapters && call.adapters->of_row; }

    // Adds what the rows' adapters add to groups of columns of a product.
    void adapt(const Stage& stage, int64_t start, int64_t rows, float* y, int64_t y_row, int64_t first, int64_t last) const {
        if (stage.adapted < 0 || !adapts()) return;
        int64_t low_row = call.products * call.adapters->most, end = last * GROUP;
        if (end > stage.weight.out) end = stage.weight.out;
        const float* low = call.adapters->low + stage.product * call.adapters->most;
        add_adapters(*call.adapters, stage.adapted, start, rows, low, low_row, y, y_row, first * GROUP, end);
    }

    // What these adapters make of a row before it is multiplied.
    void lower(const Instruction& in, const float* x, int64_t row, int64_t outside) const {
        const Adapters& adapters = *call.adapters;
        if (adapters.of_row[outside] < 0) return;
        const LowRank* maps = adapters.maps + adapters.of_row[outside] * adapters.weights;
        float* low = adapters.low + row * call.products * adapters.most;
        for (const int64_t* each = in.table + 1; each < in.table + 1 + 2 * in.table[0]; each += 2)
            if (maps[each[0]].rank) compute_low(maps[each[0]], x, in.n, low + each[1] * adapters.most);
    }

    float* find(const Operand& o, int64_t row) const {
        if (o.space == SCRATCH) return scratch + o.at;
        return o.space == ARENA ? call.arena + row * call.width + o.at : (float*)o.at;
    }

    void execute(const Instruction& in, int64_t row, int64_t rows, int64_t outside) const {
        float* out = find(in.out, row);
        const float *a = find(in.a, row), *b = find(in.b, row);
        switch (Opcode(in.code)) {
            case ADD: return binary(in, out, a, b, [](vf x, vf y) { return x + y; });
            case SUB: return binary(in, out, a, b, [](vf x, vf y) { return x - y; });
            case MUL: return binary(in, out, a, b, [](vf x, vf y) { return x * y; });
            case DIV: return binary(in, out, a, b, [](vf x, vf y) { return x / y; });
            case MAX: return binary(in, out, a, b, [](vf x, vf y) { return x > y || x != x ? x : y; });
            case MIN: return binary(in, out, a, b, [](vf x, vf y) { return x < y || x != x ? x : y; });
            case ABS: return unary(in, out, a, magnitude);
            case EXP: return unary(in, out, a, any_exponential);
            case SQRT: return unary(in, out, a, root);
            case TANH: return unary(in, out, a, tangent);
            case SIGMOID: return unary(in, out, a, sigmoid);
            case SILU: return unary(in, out, a, [](vf x) { return x * sigmoid(x); });
            case ERF: return unary(in, out, a, error_function);
            case SOFTPLUS: return unary(in, out, a, softplus);
            case REDUCE_SUM: return reduce(in, out, a, 0.0f, [](vf x, vf y) { return x + y; });
            case REDUCE_MAX: return reduce(in, out, a, -INFINITY, [](vf x, vf y) { return x > y || x != x ? x : y; });
            case COPY:
                for (const int64_t* run = in.table; run < in.table + 3 * in.count; run += 3)
                    std::memcpy(out + run[0], a + run[1], run[2] * sizeof(float));
                return;
            case GATHER:
                for (int64_t i = 0; i < in.count; i++) out[in.table[2 * i]] = a[in.table[2 * i + 1]];
                return;
            case LOAD: return read(call.externals[in.count], outside, in.n, out);
            case STORE: return write(call.externals[in.count], outside, 0, in.n, a);
            case TOPK: return topk(in.table, out, a);
            case TAKE: return take(in.table, out, a, b);
            case SCATTER: return scatter(in.table, out, a);
            case PACK:
                if (in.table && adapts()) lower(in, a, row, outside);
                return prepare(in.count, a, in.n, row, rows, call.prepared + in.out.at * call.chunk);
        }
    }

    static void read(const External& from, int64_t row, int64_t n, float* to) {
        int64_t at = row * from.stride;
        if (from.type == 0) read_row((const float*)from.data + at, n, to);
        else if (from.type == 1) read_row((const bf16*)from.data + at, n, to);
        else if (from.type == 2) read_row((const f16*)from.data + at, n, to);
        else for (int64_t i = 0; i < n; i++) to[i] = float(((const int64_t*)from.data)[at + i]);
    }
    static void write(const External& to, int64_t row, int64_t column, int64_t n, const float* from) {
        int64_t at = row * to.stride + column;
        if (to.type == 0) write_row(from, n, (float*)to.data + at);
        else if (to.type == 1) write_row(from, n, (bf16*)to.data + at);
        else write_row(from, n, (f16*)to.data + at);
    }
};

const double WORTH_IT = 20e3;  // nanoseconds: with less to do, one thread is over before others have come

// How many experts `rows` rows name at most.
inline int64_t met(const Stage& stage, int64_t rows) {
    int64_t choices = rows * stage.experts->choices;
    return choices < stage.experts->count ? choices : stage.experts->count;
}

// Threads that take parts of a stage until none is left, and then wait for each other. It may have fewer members than
// were asked for.
struct Team {
    const Call& call;
    struct Progress {
        std::atomic<int64_t> next, done;
    }* progress;  // of every stage of every turn
    std::atomic<int64_t> members{0};
    const pthread_t caller = pthread_self();
    int64_t waited = 0;  // nanoseconds that the caller waited for others, where it was long

    static void enter(void* team) { ((Team*)team)->work(); }

    void work() {
        Member member(call, members.fetch_add(1));
        Progress* at = progress;
        for (int64_t start = 0; start < call.rows; start += call.chunk) {
            int64_t rows = call.rows - start < call.chunk ? call.rows - start : call.chunk;
            for (const Stage* stage = call.stages; stage < call.stages + call.count; stage++, at++) {
                int64_t parts = stage->first == stage->last ? column_groups(stage->weight) : rows;
                if (stage->experts) parts *= met(*stage, rows);
                if (parts > 2 * call.threads) parts = 2 * call.threads;
                for (int64_t part; (part = at->next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
                    member.run(*stage, start, rows, part, parts);
                    at->done.fetch_add(1, std::memory_order_release);
                }
                wait(at->done, parts);
            }
        }
    }

    void wait(const std::atomic<int64_t>& done, int64_t all) {
        int64_t begun = 0;
        for (int64_t spins = 0; done.load(std::memory_order_acquire) < all; spins++) {
            if (spins == 1024) begun = now();
            if (spins >= 4096) sched_yield();
            else relax();
        }
        if (begun && pthread_equal(pthread_self(), caller)) waited += now() - begun;
    }
};

// What one thread takes, about: weights come from memory, and every row meets all of them.
double nanoseconds(const Call& call) {
    double sum = 0;
    for (const Stage* stage = call.stages; stage < call.stages + call.count; stage++) {
        double size = double(stage->weight.out) * stage->weight.in;
        if (stage->experts) sum += size * (0.05 * met(*stage, call.rows) + 0.005 * call.rows * stage->experts->choices);
        else if (stage->first == stage->last) sum += size * (0.05 + 0.005 * call.rows);
        for (int64_t i = stage->first; i < stage->last; i++) sum += 0.2 * call.instructions[i].n * call.rows;
    }
    return sum;
}

int together(const Call& call) {
    int64_t turns = (call.rows + call.chunk - 1) / call.chunk;
    void* memory = std::calloc(turns * call.count, sizeof(Team::Progress));
    if (!memory) return 1;
    Team team{call, (Team::Progress*)memory};
    call.together(Team::enter, &team, unsigned(call.threads), &team.waited);
    std::free(memory);
    return 0;
}

}  // namespace

extern "C" int warmturn_run(const Call* call) {  // 0, or 1 where there is no memory
    if (call->together && call->threads > 1 && nanoseconds(*call) > WORTH_IT) return together(*call);
    Member member(*call, 0);
    for (int64_t start = 0; start < call->rows; start += call->chunk) {
        int64_t rows = call->rows - start < call->chunk ? call->rows - start : call->chunk;
        for (int64_t i = 0; i < call->count; i++) member.run(call->stages[i], start, rows, 0, 1);
    }
    return 0;
}

extern "C" int warmturn_attend_between(const Call* before, const Attention* a, const Call* after) {
    if (warmturn_run(before)) return 1;
    if (a->store) a->store(a->records, a->places);
    for (int64_t i = 0; i < a->rows && !a->store; i++) {
        std::memcpy(a->key_pages + a->places[i] * a->key_bytes, a->key + i * a->key_bytes, a->key_bytes);
        std::memcpy(a->value_pages + a->places[i] * a->value_bytes, a->value + i * a->value_bytes, a->value_bytes);
    }
    return a->attend(a->call) || (after && warmturn_run(after));
}

// Layers whose output is the next one's input.
struct Link {
    const Call* before;
    const Attention* attention;
    const Call* after;  // null: is left out
};

extern "C" int warmturn_chain(const Link* links, int64_t count) {
    for (const Link* link = links; link < links + count; link++)
        if (warmturn_attend_between(link->before, link->attention, link->after)) return 1;
    return 0;
}

extern "C" int warmturn_tiles() {  // whether this was compiled for matrix units
#if defined(__AMX_BF16__)
    return 1;
#else
    return 0;
#endif
}

// The bits of kernels/ways.h that make a difference to products of so many rows with tiles, or with weights of few bits.
extern "C" int64_t warmturn_way_bits(int64_t packed, int64_t rows) {
    return packed ? ways_of_packed(rows) : WAYS_OF_TILES;
}

extern "C" int64_t warmturn_together() { return TOGETHER; }  // elements of a column that lie so in packed weights

extern "C" void warmturn_order(const Codes* codes) { order(*codes); }

extern "C" void warmturn_place_numbers(const Numbers* numbers) { place_numbers(*numbers); }

// Reads all bytes of the regions, by as many threads as there are for programs.
extern "C" void warmturn_read(const Region* regions, int64_t count, int64_t threads,
                              void (*together)(void (*)(void*), void*, unsigned, const int64_t*)) {
    Reading reading{regions, count};
    if (together && threads > 1) together(Reading::enter, &reading, unsigned(threads), nullptr);
    else reading.work();
}
