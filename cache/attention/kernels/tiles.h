// Tiles: up to 16 rows of 64 bytes, multiplied as a whole. Matrix units (AMX) have eight registers for them; without, sums
// lie in memory, operands stay where they are, and AVX-512 multiplies pairs of bfloat16.
//
// Macros, since the compiler wants to read the numbers of registers: TILE_ZERO, TILE_SUMS (loads what is added to),
// TILE_READ (loads an operand, which has to stay as it is until it was multiplied), TILE_MULTIPLY (to += left * right, where
// right has pairs of rows), TILE_WRITE. Steps between rows are in bytes.

#pragma once

#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#define WITH_TILES

#include <immintrin.h>

#include <cstdint>

namespace {

#if defined(__AMX_BF16__)

#define TILE_ZERO(tiles, number) _tile_zero(number)
#define TILE_SUMS(tiles, number, from, step) _tile_loadd(number, from, step)
#define TILE_READ(tiles, number, from, step) _tile_loadd(number, from, step)
#define TILE_MULTIPLY(tiles, to, left, right) _tile_dpbf16ps(to, left, right)
#define TILE_WRITE(tiles, number, to, step) _tile_stored(number, to, step)

// Sets how many rows each tile has. Other code of this thread may rely on the shapes that it has set: they come back.
class Tiles {
public:
    Tiles() { _tile_storeconfig(&before); }
    ~Tiles() { _tile_loadconfig(&before); }
    Tiles(const Tiles&) = delete;
    void operator=(const Tiles&) = delete;

    void shape(uint64_t few, uint8_t rows) {  // `rows` rows for the tiles whose bits are set in `few`, 16 for others
        Shapes shapes;
        for (int i = 0; i < 8; i++) {
            shapes.bytes[i] = 64;
            shapes.rows[i] = few >> i & 1 ? rows : 16;
        }
        _tile_loadconfig(&shapes);
    }

private:
    struct alignas(64) Shapes {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } before;
};

#else

#define TILE_ZERO(tiles, number) (tiles).zero(number)
#define TILE_SUMS(tiles, number, from, step) (tiles).load(number, from, step)
#define TILE_READ(tiles, number, from, step) (tiles).point(number, from, step)
#define TILE_MULTIPLY(tiles, to, left, right) (tiles).multiply(to, left, right)
#define TILE_WRITE(tiles, number, to, step) (tiles).store(number, to, step)

class Tiles {
public:
    void shape(uint64_t few, uint8_t count) {
        for (int i = 0; i < 8; i++) rows[i] = few >> i & 1 ? count : 16;
    }
    void zero(int number) {
        for (int r = 0; r < 16; r++) sums[number][r] = _mm512_setzero_ps();
    }
    void load(int number, const void* from, int64_t step) {
        for (int r = 0; r < rows[number]; r++) sums[number][r] = _mm512_loadu_ps((const char*)from + r * step);
    }
    void point(int number, const void* from, int64_t step) { at[number] = (const char*)from, steps[number] = step; }
    void store(int number, void* to, int64_t step) const {
        for (int r = 0; r < rows[number]; r++) _mm512_storeu_ps((char*)to + r * step, sums[number][r]);
    }
    void multiply(int to, int left, int right) {
        __m512 total[16];  // all rows at once: enough that no product waits for the one before
        for (int r = 0; r < 16; r++) total[r] = sums[to][r];
        for (int pair = 0; pair < 16; pair++) {
            __m512bh b = (__m512bh)_mm512_loadu_si512(at[right] + pair * steps[right]);
            for (int r = 0; r < 16; r++) {
                int32_t both;
                __builtin_memcpy(&both, at[left] + r * steps[left] + 4 * pair, 4);
                total[r] = _mm512_dpbf16_ps(total[r], b, (__m512bh)_mm512_set1_epi32(both));
            }
        }
        for (int r = 0; r < 16; r++) sums[to][r] = total[r];
    }

private:
    __m512 sums[8][16];
    const char* at[8];
    int64_t steps[8];
    int rows[8] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#endif

}  // namespace

#endif
