// What waiting threads need: the time, and to let the processor rest for a moment.

#pragma once

#include <cstdint>
#include <time.h>

namespace {

inline int64_t now(clockid_t clock = CLOCK_MONOTONIC) {  // nanoseconds
    timespec at;
    clock_gettime(clock, &at);
    return at.tv_sec * 1'000'000'000 + at.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace
