// Functions of vectors.

#pragma once

#include "vectors.h"

namespace {

inline vf each(vf v, float (*f)(float)) {
    for (int i = 0; i < LANES; i++) v[i] = f(v[i]);
    return v;
}
inline vf magnitude(vf x) { return (vf)((vu)x & 0x7fffffffu); }
inline vf any_exponential(vf x) {  // in two halves: the whole range of the result, infinity included
    vf e = exponential(magnitude(x) * -0.5f), up = 1.0f / e;
    return x > splat(0.0f) ? up * up : e * e;
}
inline vf sigmoid(vf x) {
    vf e = exponential(-magnitude(x));
    return (x < splat(0.0f) ? e : splat(1.0f)) / (1.0f + e);
}
inline vf root(vf v) {
    for (int i = 0; i < LANES; i++) v[i] = __builtin_sqrtf(v[i]);
    return v;
}
inline vf error_function(vf x) {  // Abramowitz and Stegun 7.1.26, to 1.5e-7
    vf size = magnitude(x), t = 1.0f / (1.0f + 0.3275911f * size);
    vf p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    vf value = 1.0f - p * exponential(-size * size);
    return (vf)((vu)value | ((vu)x & 0x80000000u));
}
inline float softplus_of(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
inline vf softplus(vf x) { return each(x, softplus_of); }

}  // namespace
