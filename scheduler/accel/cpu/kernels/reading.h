// Reading memory and nothing else: what products are compared with, since their speed is bound by it.

#pragma once

#include <atomic>

#include "vectors.h"

namespace {

struct Region {
    const char* data;
    int64_t bytes;
};

struct Reading {
    const Region* regions;
    int64_t count;
    std::atomic<int64_t> next{0}, seen{0};

    static constexpr int64_t PART = 1 << 20;  // bytes that a thread takes at a time

    static void enter(void* reading) { ((Reading*)reading)->work(); }

    // Every thread takes parts until none is left. A few bytes at the end of a region may be left out.
    void work() {
        vu sums[8] = {};
        for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) >= 0;) {
            const Region* region = regions;
            for (; region < regions + count && part >= parts(*region); region++) part -= parts(*region);
            if (region == regions + count) break;
            const char* from = region->data + part * PART;
            int64_t left = region->bytes - part * PART, bytes = (left < PART ? left : PART) / sizeof(sums) * sizeof(sums);
            for (int64_t at = 0; at < bytes; at += sizeof(sums))
                for (int i = 0; i < 8; i++) sums[i] ^= *(const vu_in_memory*)(from + at + i * sizeof(vu));
        }
        for (int i = 1; i < 8; i++) sums[0] ^= sums[i];
        seen.fetch_xor(sums[0][0], std::memory_order_relaxed);  // so that the compiler leaves nothing out
    }

    static int64_t parts(const Region& region) { return (region.bytes + PART - 1) / PART; }
};

}  // namespace
