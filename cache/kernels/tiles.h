// Tiles of matrix units (AMX): eight registers of up to 16 rows of 64 bytes.

#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <cstdint>

namespace {

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

}  // namespace

#endif
