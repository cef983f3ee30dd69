// One split of attention over a cache of whole numbers (cache.h): products are exact sums in int32, twice as fast as in float32.
//   q = query · (32700 / |query|) to nearest even, its scale |query| / 32700, as an int16 key
//   s = (Σ_d q[d] · k[d]) · (q_scale · (scale · log2 e)) · k_scale          in this order
//   m = max s;  p = 2^(s − m);  l = Σ p, as over floats
//   w = p · v_scale, of a split's keys;  unit = max(Σ w / kSum, max w / 32700), 0 below 2^-100
//   acc[d] = (Σ_key W[key] · v[key][d]) · unit with W = w · (1 / unit) to nearest even
// Sums fit int32: |Σ q · k| <= |q| · |k| (Cauchy and Schwarz) <= 32708 · 127 · 16 or 32708²; Σ W · |v| <= (kSum + 128) · 4095 for
// int16, 256 · 32700 · 127 for int8. A zero weight hides what a slot outside a query's range holds.
#pragma once

#include <cstdint>

#include "attention_split.h"

namespace nano::NANO_ISA {

template <class T> constexpr float kSum = 520000.0f;
template <> constexpr float kSum<int8_t> = 256 * kLongest;

struct WholeQueries {
    alignas(64) int16_t q[kTile][kMaxHead];
    float factor[kTile];

    WholeQueries(const AttendTask &task, const QueryTile &tile) {
        for (int r = 0; r < tile.count; ++r) factor[r] = key_to_whole(tile.q[r], task.cache.head_size, q[r]) * task.scale;
    }
};
template <> struct Queries<int16_t> : WholeQueries { using WholeQueries::WholeQueries; };
template <> struct Queries<int8_t> : WholeQueries { using WholeQueries::WholeQueries; };

NANO_INLINE int32_t two(const int16_t *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return word;
}

// Scores of R queries and 16·K keys from `column` of the split on.
template <class T, int R, int K>
inline void whole_scores(const SplitKeys<T> &split, const WholeQueries &queries, int head_size, float (*s)[kSplit], int column) {
    i32x16 sum[R][K];
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < K; ++k) sum[r][k] = set1(0);
    const T *const *keys = split.keys + column / 16;
    for (int d = 0; d < head_size; d += 2) {
        Pairs pairs[K];
        for (int k = 0; k < K; ++k) pairs[k] = load_pairs(keys[k] + 16 * d);
        for (int r = 0; r < R; ++r)
            for (int k = 0; k < K; ++k) sum[r][k] = dot(sum[r][k], pairs[k], two(queries.q[r] + d));
    }
    for (int k = 0; k < K; ++k) {
        const f32x16 scales = load(split.key_scales[column / 16 + k]);
        for (int r = 0; r < R; ++r)
            store(s[r] + column + 16 * k, to_f32(sum[r][k]) * set1(queries.factor[r]) * scales);
    }
}

// Scores of keys [begin, end) to weights W of keys [low, high), zero outside; m, l and the unit. All but begin and end are
// multiples of 16.
template <class T>
inline void whole_weights(const SplitKeys<T> &split, float *s, int16_t *w, int begin, int end, int low, int high, float *m,
                          float *l, float *unit) {
    f32x16 sum = zero(), most = zero();
    *m = highest(s, begin, end);
    *l = soften(s, begin, end, *m, [&](int k, f32x16 p) {
        const f32x16 weight = keep(k, begin, end, p * load(split.value_scales[k >> 4]), zero());
        sum = sum + weight;
        most = max(most, weight);
        return weight;
    });
    const float by_sum = reduce_add(sum) * (1 / kSum<T>), by_most = reduce_max(most) * (1 / kLongest);
    const float size = by_sum < by_most ? by_most : by_sum;  // NaN if the sum is
    const f32x16 inverse = set1(size >= 0x1p-100f ? 1.0f / size : 0.0f);
    *unit = size < 0x1p-100f ? 0.0f : size;
    for (int k = low; k < high; k += 16) {
        const bool seen = k + 16 > begin && k < end;
        store_lanes(w + k, seen ? to_i32(load(s + k) * inverse) : set1(0));
    }
}

// acc[r][d] of R queries over keys [low, high).
template <class T, int R, int D>
inline void whole_weigh(const SplitKeys<T> &split, int low, int high, const int16_t (*w)[kSplit], const float *unit,
                        SplitResult &out, int head_size, int d) {
    i32x16 sum[R][D];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < D; ++i) sum[r][i] = set1(0);
    for (int key = low; key < high; key += 16) {
        const T *v = split.values[key >> 4] + 2 * d;
        for (int pair = key; pair < key + 16; pair += 2, v += 2 * head_size) {
            Pairs value[D];
            for (int i = 0; i < D; ++i) value[i] = load_pairs(v + 32 * i);
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < D; ++i) sum[r][i] = dot(sum[r][i], value[i], two(w[r] + pair));
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < D; ++i) store(out.acc[r] + d + 16 * i, to_f32(sum[r][i]) * set1(unit[r]));
}

// Of few queries more keys, and more of the values, are taken at once: enough sums run side by side to hide how long each takes.
constexpr int kAtOnce = kTile * kWide;  // vectors of sums
template <class T, int R>
inline void whole_split(const SplitKeys<T> &split, const WholeQueries &queries, const int *begin,
                        const int *end, int low, int high, int head_size, SplitResult &out) {
    alignas(64) float s[R][kSplit];
    alignas(64) int16_t w[R][kSplit];
    float unit[R];
    constexpr int K = kAtOnce / R >= 4 ? 4 : kAtOnce / R >= 2 ? 2 : 1, D = K > kWide ? K : kWide;
    int k = low;
    for (; k + 16 * K <= high; k += 16 * K) whole_scores<T, R, K>(split, queries, head_size, s, k);
    for (; k < high; k += 16) whole_scores<T, R, 1>(split, queries, head_size, s, k);
    for (int r = 0; r < R; ++r) {
        out.l[r] = unit[r] = 0.0f;
        out.m[r] = kNone;
        if (begin[r] < end[r])
            whole_weights<T>(split, s[r], w[r], begin[r], end[r], low, high, &out.m[r], &out.l[r], &unit[r]);
        else
            memset(w[r], 0, sizeof w[r]);
    }
    int d = 0;
    for (; d + 16 * (D - 1) < head_size; d += 16 * D) whole_weigh<T, R, D>(split, low, high, w, unit, out, head_size, d);
    for (; d < head_size; d += 16) whole_weigh<T, R, 1>(split, low, high, w, unit, out, head_size, d);
}

template <class T>
inline void attend_whole(const AttendTask &task, const QueryTile &tile, const WholeQueries &queries, int start,
                         SplitResult &out) {
    int begin[kTile], end[kTile], low = kSplit, high = 0;
    for (int r = 0; r < tile.count; ++r) {
        begin[r] = tile.begin[r] > start ? tile.begin[r] - start : 0;
        end[r] = tile.end[r] < start + kSplit ? tile.end[r] - start : kSplit;
        out.l[r] = 0.0f;
        if (begin[r] >= end[r]) continue;
        low = begin[r] < low ? begin[r] : low;
        high = end[r] > high ? end[r] : high;
    }
    if (low >= high) return;
    const SplitKeys<T> split = split_keys<T>(task, tile, start, start + low, start + high);
    low &= ~15;
    high = (high + 15) & ~15;
    with_count(tile.count, [&](auto count) {
        whole_split<T, decltype(count)::value>(split, queries, begin, end, low, high, task.cache.head_size, out);
    });
}

inline void attend_split(const AttendTask &task, const QueryTile &tile, const Queries<int16_t> &queries, int start,
                         SplitResult &out) {
    attend_whole<int16_t>(task, tile, queries, start, out);
}
inline void attend_split(const AttendTask &task, const QueryTile &tile, const Queries<int8_t> &queries, int start,
                         SplitResult &out) {
    attend_whole<int8_t>(task, tile, queries, start, out);
}

}  // namespace nano::NANO_ISA
