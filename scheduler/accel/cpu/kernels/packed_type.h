// What the number says by which a packed weight's type is known, as scheduler/accel/cpu/packed_form.py makes it.

#pragma once

#include <cstdint>

namespace {

// These bits, eight above them for the zero, and above those four for how many bits values have beside their low 4,
// where they have NIBBLES. REAL: see real.h.
constexpr int64_t PACKED = 16, NIBBLES = 1, FLOATS = 2, FINE = 4, MINIMA = 8, SHORT = 32, ZEROS = 64, LOOKUP = 128;
constexpr int64_t REAL = 1 << 20, TABLE_BYTES = 64;
constexpr int64_t BLOCKS_OF_COARSE = 8;
constexpr int32_t MOST_VALUE = 32, MOST_SCALE = 128;  // without their signs, where scales are whole

inline int64_t bits_of(int64_t type) { return type & NIBBLES ? 4 + (type >> 16 & 15) : 8; }
inline int32_t zero_of(int64_t type) { return int8_t(type >> 8); }

// Whether parts of 16 elements have whole numbers as scales, with which products are multiplied before they become floats.
inline bool has_whole_scales(int64_t type) {
    const int32_t zero = zero_of(type), most = (1 << bits_of(type)) - 1 - zero;
    return type & FINE && type & SHORT && !(type & LOOKUP) && zero >= 0 && zero <= MOST_VALUE && most <= MOST_VALUE;
}

}  // namespace
