// A causal convolution of each channel along the tokens of a session, which goes on from the inputs that the session's
// state has kept. scheduler/accel/cpu/convolution_program.py knows these structs.

#pragma once

#include <cstdlib>
#include <cstring>

#include "vectors.h"

namespace {

// The tokens of one session in a step.
struct ConvolvedSpan {
    void* state;  // the last inputs, [channels][taps], of the rows' type
    void* saved;  // what they were before this step goes there, where it is not null
    int64_t row, size;
};

struct Convolution {
    const void* in;  // [rows][channels]
    void* out;       // the same
    const float *weight, *bias;  // [taps][channels]; [channels], or null
    const ConvolvedSpan* spans;
    int64_t count, channels, taps, type;  // of rows: 0 float32, 1 bfloat16, 2 float16
};

// The latest `taps` rows of inputs lie in a ring: that of token t is at (taps - 1 + t) % taps.
template <class T>
void convolve(const Convolution& c, const ConvolvedSpan& span, float* memory) {
    int64_t n = c.channels, taps = c.taps;
    float *ring = memory, *sum = ring + taps * n;
    T* state = (T*)span.state;
    if (span.saved) std::memcpy(span.saved, state, n * taps * sizeof(T));
    if (!span.size) return;
    for (int64_t k = 1; k < taps; k++)
        for (int64_t i = 0; i < n; i++) ring[(k - 1) * n + i] = get(state[i * taps + k]);
    for (int64_t t = 0; t < span.size; t++) {
        const T* in = (const T*)c.in + (span.row + t) * n;
        T* out = (T*)c.out + (span.row + t) * n;
        float* last = ring + (taps - 1 + t) % taps * n;
        for (int64_t i = 0; i < n; i++) last[i] = get(in[i]);
        for (int64_t i = 0; i < n; i++) sum[i] = c.bias ? c.bias[i] : 0.0f;
        for (int64_t k = 0; k < taps; k++) {
            const float *from = ring + (t + k) % taps * n, *weight = c.weight + k * n;
            for (int64_t i = 0; i < n; i++) sum[i] += weight[i] * from[i];
        }
        for (int64_t i = 0; i < n; i++) put(out + i, sum[i]);
    }
    for (int64_t k = 0; k < taps; k++)
        for (int64_t i = 0; i < n; i++) put(state + i * taps + k, ring[(span.size - 1 + k) % taps * n + i]);
}

}  // namespace

extern "C" int warmturn_convolve(const Convolution* c) {  // 0, or 1 where there is no memory
    float* memory = (float*)std::malloc((c->taps + 1) * c->channels * sizeof(float));
    if (!memory) return 1;
    for (const ConvolvedSpan* span = c->spans; span < c->spans + c->count; span++) {
        if (c->type == 0) convolve<float>(*c, *span, memory);
        else if (c->type == 1) convolve<bf16>(*c, *span, memory);
        else convolve<f16>(*c, *span, memory);
    }
    std::free(memory);
    return 0;
}
