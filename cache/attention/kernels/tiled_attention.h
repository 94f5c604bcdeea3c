// Attention by tiles: 16 queries at a time, where a processor has what multiplies them (tiles.h).

#pragma once

#include "layout.h"

#if defined(WITH_TILES)

namespace {

constexpr float LOG2_E = 1.44269504f;
constexpr float SLACK = 6.0f;  // by which scores may pass the largest one before them, until sums are brought to its scale

template <class T>
struct TiledWork : Layout<T> {
    typedef Layout<T> Base;
    using Base::Base;
    using Base::call;
    using Base::key_row;
    using Base::value_row;
    using Base::group;
    using Base::query_floats;
    using Base::row_tiles;
    using Base::seen;
    using Base::tiled_floats;
    using Base::locate;
    using Base::widen_head;
    using Base::work_floats;

    // One range of one session: 16 rows at a time, keys as they lie, weights rounded to bfloat16. What was just written
    // cannot be loaded into a tile at once, so sums are one step behind the weights that they are made of.
    void tiled(const Span& s, int64_t from, int64_t end, Partial part, float* scratch) const {
        uint32_t* queries = (uint32_t*)scratch;
        uint32_t* values[2] = {queries + query_floats(s), queries + query_floats(s) + BLOCK / 2 * call.value_dim};
        uint16_t* spare = (uint16_t*)(values[1] + BLOCK / 2 * call.value_dim);
        alignas(64) bf16 weights[2][16 * BLOCK];
        tile_queries(s, queries);
        Tiles tiles;
        Sums behind{};
        int64_t rows = s.size * group, shaped = 0, step = 0, unit = 0;
        Block<T> blocks[2];
        locate(s, from, end, blocks[0]);
        for (int turn = 0; from < end; from += BLOCK, turn ^= 1) {
            const Block<T>& block = blocks[turn];
            if (from + BLOCK < end) locate(s, from + BLOCK, end, blocks[turn ^ 1]);
            for (int64_t head = 0; head < call.key_heads; head++, unit ^= 1) {
                Block<T> widened;
                Scales made;
                if (call.codec) {
                    widened.first = block.first, widened.count = block.count;
                    widen_head(block, head, scratch + work_floats(s), widened.keys, widened.values, made);
                }
                const Block<T>& read = call.codec ? widened : block;
                int64_t key_at = call.codec ? 0 : head * call.key_head, value_at = call.codec ? 0 : head * call.value_head;
                tile_values(read, key_at, value_at, values[unit]);
                bool same = head + 1 < call.key_heads;
                const Block<T>& next = same || from + BLOCK >= end ? block : blocks[turn ^ 1];
                int64_t ahead = call.codec ? -1 : (same ? head + 1 : 0) * call.value_head;
                for (int64_t row = 0; row < rows; row += 16) {
                    int64_t count = rows - row < 16 ? rows - row : 16;
                    int64_t low = seen(s, block, row / group).low, high = seen(s, block, (row + count - 1) / group).high;
                    if (low >= block.count || high <= 0) continue;
                    if (shaped != count) {
                        add_up(tiles, behind);
                        tiles.shape(0b01110000, shaped = count);
                    }
                    const uint32_t* query = queries + (head * row_tiles(s) + row / 16) * tiled_floats();
                    vf scores[BLOCK];  // of 16 rows each
                    tile_scores(tiles, read, key_at, query, spare, scores, next, row ? -1 : ahead);
                    int64_t first = head * rows + row;
                    Partial mine = {part.sums + first * value_row.padded, part.most + first, part.total + first};
                    if (behind.to == mine.sums) add_up(tiles, behind);
                    weigh(s, block, call.codec ? &made : nullptr, row, count, scores, weights[step], mine);
                    add_up(tiles, behind);
                    behind = {mine.sums, weights[step], values[unit], block.count > 32 ? 2 : 1};
                    step ^= 1;
                }
            }
        }
        add_up(tiles, behind);
    }

    struct Sums {  // of 16 rows that wait for the values of a block
        float* to;
        const bf16* weights;  // [2 halves of the block][16 rows][32]
        const uint32_t* values;
        int halves;
    };

    void add_up(Tiles& tiles, Sums& sums) const {
        for (int64_t c = 0; c < value_row.chunks && sums.to; c++) {
            float* to = sums.to + c * CHUNK;
            const uint32_t* tile = sums.values + c * 1024;
            TILE_SUMS(tiles, 4, to, value_row.padded * 4);
            TILE_SUMS(tiles, 5, to + 16, value_row.padded * 4);
            for (int half = 0; half < sums.halves; half++) {
                TILE_READ(tiles, 6, sums.weights + half * 512, 64);
                TILE_READ(tiles, 7, tile + half * 256, 64);
                TILE_MULTIPLY(tiles, 4, 6, 7);
                TILE_READ(tiles, 3, tile + half * 256 + 512, 64);
                TILE_MULTIPLY(tiles, 5, 6, 3);
            }
            TILE_WRITE(tiles, 4, to, value_row.padded * 4);
            TILE_WRITE(tiles, 5, to + 16, value_row.padded * 4);
        }
        sums.to = nullptr;
    }

    static vf power_of_two(vf x) {  // of x <= 0, to 4e-6; NaN stays NaN, and what is too small is 2^-126
        x = _mm512_max_ps(splat(-126.0f), x);
        vf n = _mm512_roundscale_ps(x, 0), r = x - n;
        vf p = splat(9.6181291e-3f);
        p = p * r + 5.5504109e-2f;
        p = p * r + 2.4022651e-1f;
        p = p * r + 6.9314718e-1f;
        return _mm512_scalef_ps(p * r + 1.0f, n);
    }

    // Scores to weights, and what was summed so far to their scale: `soften` for 16 rows at once, each in a lane.
    void weigh(const Span& s, const Block<T>& block, const Scales* scales, int64_t row, int64_t count, vf* scores,
               bf16* weights, Partial mine) const {
        vf most = splat(NEVER), total = {};
        std::memcpy(&most, mine.most, count * sizeof(float));
        std::memcpy(&total, mine.total, count * sizeof(float));
        float scale = call.scale;
        for (int j = 0; j < block.count && scales; j++) scores[j] *= scales->keys[j];
        if (call.softcap != 0.0f) {
            for (int j = 0; j < block.count; j++) scores[j] = call.softcap * tangent(scores[j] * (scale / call.softcap));
            scale = 1.0f;
        }
        conceal_lanes(s, block, row, count, scores);
        for (int j = block.count; j < BLOCK; j++) scores[j] = splat(NEVER);
        vf tops[4] = {splat(NEVER), splat(NEVER), splat(NEVER), splat(NEVER)};
        for (int j = 0; j < BLOCK; j += 4)
            for (int t = 0; t < 4; t++) tops[t] = larger(scores[j + t], tops[t]);
        vf top = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])) * scale;
        top = top > most + SLACK ? top : most;
        vf base = (top == NEVER ? splat(0.0f) : top) * LOG2_E, sums[2] = {};
        alignas(64) vf words[BLOCK / 2];  // of two keys each
        scale *= LOG2_E;
        for (int j = 0; j < BLOCK; j += 2) {
            vf a = power_of_two(scores[j] * scale - base), b = power_of_two(scores[j + 1] * scale - base);
            sums[0] += a;
            sums[1] += b;
            if (scales) a *= scales->values[j], b *= scales->values[j + 1];
            words[j / 2] = (vf)(((vu)a + 0x8000u) >> 16 | (((vu)b + 0x8000u) & 0xffff0000u));
        }
        vf factor = most == top ? splat(1.0f) : exponential(most - top);
        total = total * factor + (sums[0] + sums[1]);
        std::memcpy(mine.most, &top, count * sizeof(float));
        std::memcpy(mine.total, &total, count * sizeof(float));
        for (int half = 0; half < 2; half++) transpose(words + half * 16);
        std::memcpy((void*)weights, words, sizeof(words));
        if (!_mm512_cmpneq_ps_mask(factor, splat(1.0f))) return;
        for (int64_t r = 0; r < count; r++)
            for (int64_t i = 0; i < value_row.padded && factor[r] != 1.0f; i += LANES) {
                float* sums = mine.sums + r * value_row.padded + i;
                store(sums, load(sums) * factor[r]);
            }
    }

    // Minus infinity for what a row's query does not see.
    void conceal_lanes(const Span& s, const Block<T>& block, int64_t row, int64_t count, vf* scores) const {
        int64_t oldest = row / group, newest = (row + count - 1) / group;
        if (call.first[s.row + newest] <= block.first && s.start + oldest + 1 >= block.first + block.count &&
            block.first >= s.flagged)
            return;
        alignas(64) int32_t low[16] = {}, high[16] = {};
        bool all = true;
        for (int64_t r = 0; r < count; r++) {
            int64_t i = (row + r) / group, from = call.first[s.row + i] - block.first, to = s.start + i + 1 - block.first;
            low[r] = int32_t(from < 0 ? 0 : from > BLOCK ? BLOCK : from);
            high[r] = int32_t(to < 0 ? 0 : to > BLOCK ? BLOCK : to);
            all = all && low[r] == 0 && high[r] >= block.count;
        }
        typedef int32_t vi __attribute__((vector_size(64)));
        for (int j = 0; j < block.count && !all; j++)
            scores[j] = *(vi*)low <= j && *(vi*)high > j ? scores[j] : splat(NEVER);
        for (int j = 0; j < block.count && block.first + j < s.flagged; j++)
            if (!s.flags[block.first + j]) scores[j] = splat(NEVER);
    }

    // Per key head and 16 rows: [key_dim / 32][16 pairs of elements][16 rows], zeros where there are fewer rows.
    void tile_queries(const Span& s, uint32_t* to) const {
        std::memset(to, 0, call.key_heads * row_tiles(s) * tiled_floats() * sizeof(uint32_t));
        for (int64_t head = 0; head < call.heads; head++)
            for (int64_t i = 0; i < s.size; i++) {
                const T* from = (const T*)call.query + (s.row + i) * call.query_row + head * call.query_head;
                int64_t row = i * group + head % group;
                uint32_t* tile = to + (head / group * row_tiles(s) + row / 16) * tiled_floats() + row % 16;
                for (int64_t pair = 0; pair < call.key_dim / 2; pair++) std::memcpy(tile + pair * 16, from + 2 * pair, 4);
            }
    }

    // [value_dim / 16][2 halves of the block][16 pairs of keys][16 words]: the even elements of a chunk, then the odd ones.
    // The keys beside them are fetched meanwhile.
    void tile_values(const Block<T>& block, int64_t key_at, int64_t offset, uint32_t* to) const {
        for (int pair = 0; pair < BLOCK / 2; pair++) {
            for (int j = 2 * pair; j < 2 * pair + 2 && j < block.count; j++) fetch(block.keys[j] + key_at, key_row);
            for (int64_t c = 0; c < value_row.chunks; c++) {
                vu a = {}, b = {};
                if (2 * pair < block.count) a = *(const vu_in_memory*)(block.values[2 * pair] + offset + c * CHUNK);
                if (2 * pair + 1 < block.count) b = *(const vu_in_memory*)(block.values[2 * pair + 1] + offset + c * CHUNK);
                uint32_t* tile = to + (c * 4 + pair / 16) * 256 + pair % 16 * 16;
                *(vu_in_memory*)tile = (a & 0xffffu) | b << 16;
                *(vu_in_memory*)(tile + 512) = a >> 16 | (b & 0xffff0000u);
            }
        }
    }

    static void fetch(const T* from, const Row& row) {
        for (int64_t c = 0; c < row.chunks; c++) __builtin_prefetch(from + c * CHUNK);
    }

    // The products of every key with 16 queries. The values that come next are fetched meanwhile.
    void tile_scores(Tiles& tiles, const Block<T>& block, int64_t offset, const uint32_t* query, uint16_t* spare, vf* scores,
                     const Block<T>& next, int64_t ahead) const {
        for (int j = 0; j < block.count; j += 32) {
            int64_t apart[2];
            bool both = block.count - j > 16;
            for (int i = j; i < j + 32 && i < next.count && ahead >= 0; i++) fetch(next.values[i] + ahead, value_row);
            const uint16_t* keys = lines(block, j, offset, spare, apart[0]);
            const uint16_t* more = both ? lines(block, j + 16, offset, spare + 16 * call.key_dim, apart[1]) : nullptr;
            TILE_ZERO(tiles, 0);
            TILE_ZERO(tiles, 1);
            for (int64_t d = 0; d < call.key_dim; d += 32) {
                TILE_READ(tiles, 7, query + d * 8, 64);
                TILE_READ(tiles, 2, keys + d, apart[0] * 2);
                TILE_MULTIPLY(tiles, 0, 2, 7);
                if (!both) continue;
                TILE_READ(tiles, 3, more + d, apart[1] * 2);
                TILE_MULTIPLY(tiles, 1, 3, 7);
            }
            TILE_WRITE(tiles, 0, scores + j, 64);
            if (both) TILE_WRITE(tiles, 1, scores + j + 16, 64);
        }
    }

    // 16 keys from `j` on as rows that are `apart`: where they lie, or brought together where that is not in one page.
    const uint16_t* lines(const Block<T>& block, int j, int64_t offset, uint16_t* spare, int64_t& apart) const {
        apart = j + 16 <= block.count ? block.keys[j + 1] - block.keys[j] : 0;
        for (int i = 2; i < 16 && apart; i++)
            if (block.keys[j + i] - block.keys[j] != i * apart) apart = 0;
        if (apart) return (const uint16_t*)(block.keys[j] + offset);
        for (int i = 0; i < 16; i++)
            std::memcpy(spare + i * call.key_dim, block.keys[j + i < block.count ? j + i : j] + offset,
                        call.key_dim * sizeof(T));
        apart = call.key_dim;
        return spare;
    }
};

}  // namespace

#endif
