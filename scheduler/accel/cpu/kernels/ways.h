// How products of 1 row, of up to FEW and of more go through a weight: sums of these bits. Which is fastest is measured
// when a model is loaded (scheduler/accel/cpu/ways.py); these serve until then. Each way gives the same bits.

#pragma once

#include "vectors.h"

namespace {

constexpr int64_t PREFETCHING = 1;  // ask for what is read next, in the order of addresses, into the second cache
constexpr int64_t PAIRED = 2;       // weights of few bits and four rows or more: multiplied as paired.h says
constexpr int64_t FEW = LANES == 16 ? 6 : 4;

}  // namespace

extern "C" {
int64_t warmturn_chosen_ways[3] = {0, LANES == 16 ? 0 : PREFETCHING, PREFETCHING};
}

namespace {

inline int64_t way_of(int64_t rows) { return warmturn_chosen_ways[rows == 1 ? 0 : rows <= FEW ? 1 : 2]; }

}  // namespace
