// One split of attention: 256 keys at absolute positions, for a tile of query rows together. attention.h says what is computed.
#pragma once

#include <cstdint>

#include "elementwise.h"
#include "kernels.h"
#include "simd.h"

namespace nano::NANO_ISA {

constexpr float kNone = -__builtin_inff();
constexpr int kSplit = 256;
// kTile query rows are computed together: they share every load and conversion of keys and values. Of each, kWide vectors of the
// result are held in registers at a time.
#ifdef __AVX512F__
constexpr int kTile = 12, kWide = 2;
#else
constexpr int kTile = 6, kWide = 1;
#endif
constexpr int kSplitTiles = kSplit / 16;

// Query rows of one sequence and kv head: row-major over (row, head of the group).
struct QueryTile {
    int count;
    const float *q[kTile];
    float *out[kTile];
    int begin[kTile], end[kTile];  // keys seen: [begin, end)
    int sequence, kv_head;
};

// A split's result for each query row; empty where l is zero.
struct SplitResult {
    float m[kTile], l[kTile];
    alignas(64) float acc[kTile][kMaxHead];
};

// What a split needs of its queries besides; nothing where the cache holds floats.
template <class T>
struct Queries {
    Queries(const AttendTask &, const QueryTile &) {}
};

template <class T>
struct SplitKeys {
    const T *keys[kSplitTiles];
    const T *values[kSplitTiles];
    const float *key_scales[kSplitTiles], *value_scales[kSplitTiles];  // of whole numbers
};

template <class T>
inline SplitKeys<T> split_keys(const AttendTask &task, const QueryTile &tile, int start, int low, int end) {
    SplitKeys<T> out;
    const CacheView &cache = task.cache;
    const int32_t *table = task.step->blocks + int64_t(tile.sequence) * task.step->max_blocks;
    for (int t = 0, key = start; key < end; ++t, key += 16) {
        if (key + 16 <= low) {  // behind every window: the block may have been given back
            out.keys[t] = out.values[t] = nullptr;
            continue;
        }
        const int64_t block = table[key / cache.block_size];
        const int slot = key % cache.block_size;
        out.keys[t] = static_cast<const T *>(cache.keys) + cache.key_tile(block, tile.kv_head, slot);
        out.values[t] = static_cast<const T *>(cache.values) + cache.value(block, tile.kv_head, slot);
        if constexpr (kWhole<T>) {
            out.key_scales[t] = cache.key_scales + cache.scale(block, tile.kv_head, slot);
            out.value_scales[t] = cache.value_scales + cache.scale(block, tile.kv_head, slot);
        }
    }
    return out;
}

// s[r] = scale · (q[r] · k) for 16 keys.
template <class T, int R>
inline void scores(const T *keys, const float *const *q, int head_size, float scale, float (*s)[kSplit], int column) {
    f32x16 sum[R];
    for (int r = 0; r < R; ++r) sum[r] = zero();
    for (int d = 0; d < head_size; ++d) {
        const f32x16 k = load_as_f32(keys + 16 * d);
        for (int r = 0; r < R; ++r) sum[r] = fma(k, set1(q[r][d]), sum[r]);
    }
    for (int r = 0; r < R; ++r) store(s[r] + column, sum[r] * set1(scale));
}

// acc[r][d] += p[r][key] · v[key][d] over keys [begin, end) of the split, ascending; D vectors of d at a time stay in registers.
template <class T, int R, int D>
inline void weigh(const SplitKeys<T> &split, int begin, int end, const float *const *p, float *const *acc, int head_size, int d) {
    f32x16 sum[R][D];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < D; ++i) sum[r][i] = load(acc[r] + d + 16 * i);
    for (int key = begin; key < end; ++key) {
        const T *v = split.values[key >> 4] + int64_t(key & 15) * head_size + d;
        f32x16 value[D];
        for (int i = 0; i < D; ++i) value[i] = load_as_f32(v + 16 * i);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < D; ++i) sum[r][i] = fma(set1(p[r][key]), value[i], sum[r][i]);
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < D; ++i) store(acc[r] + d + 16 * i, sum[r][i]);
}

template <class T, int R>
inline void weigh_rows(const SplitKeys<T> &split, int begin, int end, const float *const *p, float *const *acc, int head_size) {
    if (begin >= end) return;
    int d = 0;
    if constexpr (kWide == 2)
        for (; d + 16 < head_size; d += 32) weigh<T, R, 2>(split, begin, end, p, acc, head_size, d);
    for (; d < head_size; d += 16) weigh<T, R, 1>(split, begin, end, p, acc, head_size, d);
}

template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls f with a compile-time count of 1 to kTile.
template <int N = kTile, class F>
inline void with_count(int count, F &&f) {
    if constexpr (N > 1)
        if (count < N) return with_count<N - 1>(count, f);
    f(Count<N>());
}

// x where the lanes' columns k, k + 1, … lie in [begin, end), else `other`.
NANO_INLINE f32x16 keep(int k, int begin, int end, f32x16 x, f32x16 other) {
    if (begin > k) x = select(first(begin - k), other, x);
    if (end < k + 16) x = select(first(end - k), x, other);
    return x;
}

inline float highest(const float *s, int begin, int end) {
    f32x16 top = set1(kNone);
    for (int k = begin & ~15; k < end; k += 16) top = max(top, keep(k, begin, end, load(s + k), set1(kNone)));
    return reduce_max(top);
}

// Scores of keys [begin, end) (relative to the split) to p = 2^(s − m), of which each(k, p) is kept; returns Σ p.
template <class F>
inline float soften(float *s, int begin, int end, float m, F &&each) {
    const f32x16 shift = set1(m);
    f32x16 total = zero();
    for (int k = begin & ~15; k < end; k += 16) {
        const f32x16 p = keep(k, begin, end, exp2_down(load(s + k) - shift), zero());
        total = total + p;
        store(s + k, each(k, p));
    }
    return reduce_add(total);
}

// One split of 256 keys from `start` for all query rows of a tile.
template <class T>
inline void attend_split(const AttendTask &task, const QueryTile &tile, const Queries<T> &, int start, SplitResult &out) {
    const int head_size = task.cache.head_size;
    alignas(64) float s[kTile][kSplit];
    int begin[kTile], end[kTile], low = kSplit, high = 0;
    int common_begin = 0, common_end = kSplit, active = 0;
    const float *p[kTile];
    float *acc[kTile];
    int rows[kTile];
    for (int r = 0; r < tile.count; ++r) {
        begin[r] = tile.begin[r] > start ? tile.begin[r] - start : 0;
        end[r] = tile.end[r] < start + kSplit ? tile.end[r] - start : kSplit;
        out.l[r] = 0.0f;
        out.m[r] = kNone;
        if (begin[r] >= end[r]) continue;
        low = begin[r] < low ? begin[r] : low;
        high = end[r] > high ? end[r] : high;
        common_begin = begin[r] > common_begin ? begin[r] : common_begin;
        common_end = end[r] < common_end ? end[r] : common_end;
        p[active] = s[r];
        acc[active] = out.acc[r];
        rows[active++] = r;
    }
    if (active == 0) return;
    const SplitKeys<T> split = split_keys<T>(task, tile, start, start + low, start + high);
    with_count(tile.count, [&](auto count) {
        for (int k = low & ~15; k < high; k += 16)
            scores<T, decltype(count)::value>(split.keys[k >> 4], tile.q, head_size, task.scale, s, k);
    });
    if (common_begin > common_end) common_begin = common_end = kSplit;  // windows that do not meet: every key by itself
    for (int i = 0; i < active; ++i) {
        const int r = rows[i];
        out.m[r] = highest(s[r], begin[r], end[r]);
        out.l[r] = soften(s[r], begin[r], end[r], out.m[r], [](int, f32x16 p) { return p; });
        for (int d = 0; d < head_size; d += 16) store(out.acc[r] + d, zero());
        weigh_rows<T, 1>(split, begin[r], common_begin < end[r] ? common_begin : end[r], p + i, acc + i, head_size);
    }
    with_count(active,
               [&](auto count) { weigh_rows<T, decltype(count)::value>(split, common_begin, common_end, p, acc, head_size); });
    for (int i = 0; i < active; ++i) {
        const int r = rows[i];
        weigh_rows<T, 1>(split, common_end > begin[r] ? common_end : begin[r], end[r], p + i, acc + i, head_size);
    }
}

}  // namespace nano::NANO_ISA
