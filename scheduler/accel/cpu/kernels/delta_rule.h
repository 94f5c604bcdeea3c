// The gated delta rule (Yang and others 2024, "Gated Delta Networks"): of each head, a matrix S [depth][width] that is a
// session's state. A token with the key k, the query q, the value v, the decay d and the strength b makes it
//
//     S = d S + k (b (v - d S k))        and gives        S q
//
// where k, q and v come from a short convolution of each channel along the tokens (see convolution.h), and k and q are
// divided by their lengths. Several heads may share a key. scheduler/accel/cpu/delta_rule_program.py knows these structs.
//
// Everything is float32 and computed token after token, so that it does not matter how a prompt is cut into steps.

#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "convolution.h"
#include "functions.h"
#include "packed.h"

namespace {

// The tokens of one session in a step. What the states were before it goes to `saved`, where that is not null.
struct RuleSpan {
    void *inputs, *saved_inputs;  // the last inputs of the convolution, [channels][taps], of the rows' type
    float *state, *saved_state;   // [heads][depth][width]
    int64_t row, size;
};

struct DeltaRule {
    const void *in, *decay, *strength;  // [rows][channels]: all queries, keys, values; [rows][heads], the logarithm of
    void* out;                          // the decay; the same; [rows][heads][width]
    const float *weight, *bias;         // of the convolution: [taps][channels]; [channels], or null
    const RuleSpan* spans;
    int64_t count, taps, type, decay_type, strength_type, out_type;  // 0 float32, 1 bfloat16, 2 float16
    int64_t keys, heads, depth, width;
    int64_t activated, normalised;  // whether SiLU follows the convolution, and keys and queries have length 1
    float scale;                    // of queries
    int64_t threads;
    void (*together)(void (*)(void*), void*, unsigned, const int64_t*);  // cache/attention/kernels/team.cpp, or null
};

constexpr int64_t RULE_TOKENS = 32;   // that are worked on together
constexpr float RULE_EPSILON = 1e-6f;  // beside the square of a length

// What one key and the heads that share it need of the tokens of a session.
class RuleKey {
public:
    RuleKey(const DeltaRule& rule, float* memory) : r(rule), shared(r.heads / r.keys), n(2 * r.depth + shared * r.width) {
        row = padded(n);
        window = memory;
        mixed = window + (r.taps + RULE_TOKENS) * row;
        taps = mixed + RULE_TOKENS * row;
        bias = taps + r.taps * row;
        result = bias + row;
        edge = result + RULE_TOKENS * padded(r.width);
    }
    static int64_t floats(const DeltaRule& r) {
        int64_t row = padded(2 * r.depth + r.heads / r.keys * r.width);
        return (2 * r.taps + 2 * RULE_TOKENS + 1) * row + RULE_TOKENS * padded(r.width) + r.depth * LANES;
    }

    void run(const RuleSpan& span, int64_t key) {
        for (int64_t tap = 0; tap < r.taps; tap++) gather(r.weight + tap * channels(), key, taps + tap * row);
        if (r.bias) gather(r.bias, key, bias);
        int64_t each = shared * r.depth * r.width;
        if (span.saved_state)
            std::memcpy(span.saved_state + key * each, span.state + key * each, each * sizeof(float));
        if (r.type == 0) remember<float>(span, key);
        else if (r.type == 1) remember<bf16>(span, key);
        else remember<f16>(span, key);
        for (int64_t first = 0; first < span.size; first += RULE_TOKENS) {
            int64_t tokens = span.size - first < RULE_TOKENS ? span.size - first : RULE_TOKENS;
            if (r.type == 0) take<float>(span.row + first, tokens, key);
            else if (r.type == 1) take<bf16>(span.row + first, tokens, key);
            else take<f16>(span.row + first, tokens, key);
            mix(tokens);
            for (int64_t one = 0; one < shared; one++) advance(span, key * shared + one, one, first, tokens);
            std::memmove(window, window + tokens * row, r.taps * row * sizeof(float));
        }
        if (r.type == 0) keep<float>(span, key);
        else if (r.type == 1) keep<bf16>(span, key);
        else keep<f16>(span, key);
    }

private:
    static int64_t padded(int64_t floats) { return (floats + 2 * LANES - 1) / LANES * LANES; }
    int64_t channels() const { return 2 * r.keys * r.depth + r.heads * r.width; }

    // Calls f(channel, place, count) for the channels of a key: its query, the key, its heads' values.
    template <class F>
    void ranges(int64_t key, F f) const {
        f(key * r.depth, int64_t(0), r.depth);
        f((r.keys + key) * r.depth, r.depth, r.depth);
        f(2 * r.keys * r.depth + key * shared * r.width, 2 * r.depth, shared * r.width);
    }
    template <class T>
    void gather(const T* from, int64_t key, float* to) const {
        ranges(key, [&](int64_t channel, int64_t place, int64_t count) {
            for (int64_t i = 0; i < count; i++) to[place + i] = get(from[channel + i]);
        });
    }

    // The window has the last `taps` inputs, then those of the tokens at hand.
    template <class T>
    void remember(const RuleSpan& span, int64_t key) {
        ranges(key, [&](int64_t channel, int64_t place, int64_t count) {
            const T* from = (const T*)span.inputs + channel * r.taps;
            if (span.saved_inputs)
                std::memcpy((T*)span.saved_inputs + channel * r.taps, from, count * r.taps * sizeof(T));
            for (int64_t i = 0; i < count; i++)
                for (int64_t tap = 0; tap < r.taps; tap++) window[tap * row + place + i] = get(from[i * r.taps + tap]);
        });
    }
    template <class T>
    void keep(const RuleSpan& span, int64_t key) const {
        ranges(key, [&](int64_t channel, int64_t place, int64_t count) {
            T* to = (T*)span.inputs + channel * r.taps;
            for (int64_t i = 0; i < count; i++)
                for (int64_t tap = 0; tap < r.taps; tap++) put(to + i * r.taps + tap, window[tap * row + place + i]);
        });
    }
    template <class T>
    void take(int64_t first, int64_t tokens, int64_t key) {
        for (int64_t t = 0; t < tokens; t++)
            gather((const T*)r.in + (first + t) * channels(), key, window + (r.taps + t) * row);
    }

    void mix(int64_t tokens) {
        for (int64_t t = 0; t < tokens; t++) {
            float* to = mixed + t * row;
            for (int64_t i = 0; i < n; i += LANES) {
                vf sum = r.bias ? load(bias + i) : vf{};
                for (int64_t tap = 0; tap < r.taps; tap++)
                    sum = fused(load(taps + tap * row + i), load(window + (t + 1 + tap) * row + i), sum);
                store(to + i, r.activated ? sum * sigmoid(sum) : sum);
            }
            float query = r.scale, key = 1.0f;
            if (r.normalised) {
                query /= length(to, to);
                key /= length(to + r.depth, to + r.depth);
            }
            for (int64_t i = 0; i < r.depth; i++) to[i] *= query, to[r.depth + i] *= key;
            both[t] = dot(to, to + r.depth);
        }
    }
    float dot(const float* a, const float* b) const {
        vf sum = {};
        int64_t i = 0;
        for (; i + LANES <= r.depth; i += LANES) sum = fused(load(a + i), load(b + i), sum);
        float total = fold(sum, [](vf x, vf y) { return x + y; });
        for (; i < r.depth; i++) total += a[i] * b[i];
        return total;
    }
    float length(const float* a, const float* b) const { return std::sqrt(dot(a, b) + RULE_EPSILON); }

    static float number(const void* from, int64_t type, int64_t at) {
        return type == 0 ? ((const float*)from)[at] : type == 1 ? get(((const bf16*)from)[at]) : get(((const f16*)from)[at]);
    }

    void advance(const RuleSpan& span, int64_t head, int64_t one, int64_t first, int64_t tokens) {
        int64_t size = r.depth * r.width, values = 2 * r.depth + one * r.width, stride = padded(r.width), column = 0;
        float* state = span.state + head * size;
        for (int64_t t = 0; t < tokens; t++) {
            int64_t at = (span.row + first + t) * r.heads + head;
            decay[t] = std::exp(number(r.decay, r.decay_type, at));
            strength[t] = number(r.strength, r.strength_type, at);
        }
        for (; column + 4 * LANES <= r.width; column += 4 * LANES) columns<4>(state + column, r.width, values + column, column, tokens);
        for (; column + LANES <= r.width; column += LANES) columns<1>(state + column, r.width, values + column, column, tokens);
        if (int64_t rest = r.width - column) {
            for (int64_t i = 0; i < r.depth; i++)
                for (int64_t c = 0; c < LANES; c++) edge[i * LANES + c] = c < rest ? state[i * r.width + column + c] : 0.0f;
            columns<1>(edge, LANES, values + column, column, tokens);
            for (int64_t i = 0; i < r.depth; i++)
                std::memcpy(state + i * r.width + column, edge + i * LANES, rest * sizeof(float));
        }
        for (int64_t t = 0; t < tokens; t++) {
            int64_t at = ((span.row + first + t) * r.heads + head) * r.width;
            const float* from = result + t * stride;
            if (r.out_type == 0) std::memcpy((float*)r.out + at, from, r.width * sizeof(float));
            else if (r.out_type == 1) for (int64_t c = 0; c < r.width; c++) put((bf16*)r.out + at + c, from[c]);
            else for (int64_t c = 0; c < r.width; c++) put((f16*)r.out + at + c, from[c]);
        }
    }

    // Columns of a head's state. Each turn through it makes it the next one, and multiplies that by the key and the
    // query of the token after this one.
    template <int N>
    void columns(float* state, int64_t step, int64_t values, int64_t column, int64_t tokens) {
        vf by_key[N] = {}, by_query[N] = {};
        for (int64_t i = 0; i < r.depth; i++)
            for (int c = 0; c < N; c++) {
                vf s = load(state + i * step + c * LANES);
                by_query[c] = fused(splat(mixed[i]), s, by_query[c]);
                by_key[c] = fused(splat(mixed[r.depth + i]), s, by_key[c]);
            }
        for (int64_t t = 0; t < tokens; t++) {
            const float *now = mixed + t * row, *next = t + 1 < tokens ? now + row : now;
            vf d = splat(decay[t]), change[N];
            for (int c = 0; c < N; c++) {
                change[c] = (load(now + values + c * LANES) - d * by_key[c]) * splat(strength[t]);
                store(result + t * padded(r.width) + column + c * LANES, fused(change[c], splat(both[t]), d * by_query[c]));
                by_key[c] = by_query[c] = vf{};
            }
            const float *key = now + r.depth, *next_query = next, *next_key = next + r.depth;
            for (int64_t i = 0; i < r.depth; i++) {
                vf k = splat(key[i]), nq = splat(next_query[i]), nk = splat(next_key[i]);
                float* at = state + i * step;
                for (int c = 0; c < N; c++) {
                    vf s = fused(k, change[c], d * load(at + c * LANES));
                    store(at + c * LANES, s);
                    by_query[c] = fused(nq, s, by_query[c]);
                    by_key[c] = fused(nk, s, by_key[c]);
                }
            }
        }
    }

    const DeltaRule& r;
    int64_t shared, n, row;                                    // heads of the key; its channels; floats between rows
    float *window, *mixed, *taps, *bias, *result, *edge;       // see `floats`
    float decay[RULE_TOKENS], strength[RULE_TOKENS], both[RULE_TOKENS];  // of a head; the query times the key
};

// Threads that take keys of sessions until none is left.
struct RuleTeam {
    const DeltaRule& rule;
    std::atomic<int64_t> next{0};

    static void enter(void* team) { ((RuleTeam*)team)->work(); }
    int64_t parts() const { return rule.count * rule.keys; }

    void work() {
        float* memory = (float*)std::malloc(RuleKey::floats(rule) * sizeof(float));
        if (!memory) return;
        RuleKey one(rule, memory);
        for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts();)
            one.run(rule.spans[part / rule.keys], part % rule.keys);
        std::free(memory);
    }
};

constexpr double RULE_WORTH_IT = 40e3;  // multiplications: with fewer, one thread is over before others have come

}  // namespace

extern "C" int warmturn_delta_rule(const DeltaRule* rule) {  // 0, or 1 where there is no memory
    RuleTeam team{*rule};
    double rows = 0;
    for (int64_t i = 0; i < rule->count; i++) rows += double(rule->spans[i].size);
    bool many = rows * double(rule->heads * rule->depth * rule->width) > RULE_WORTH_IT;
    if (rule->together && rule->threads > 1 && many) rule->together(RuleTeam::enter, &team, unsigned(rule->threads), nullptr);
    else team.work();
    return team.next < team.parts();
}
