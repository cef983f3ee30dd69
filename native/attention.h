// Attention over the paged cache, the same arithmetic for prefill and decode: the result of a query depends on its own keys
// alone.
//
// Keys are split at absolute positions into splits of 256. Within a split
//   s = (chain of fma over d ascending, from zero, of k[d] · q[d]) · (scale · log2 e) lanes are keys
//   m = max s;  p = 2^(s − m);  l = Σ p: 16 partials by key mod 16, ascending, then the fixed tree
//   acc[d] = fma(p, v[d], acc[d]) over keys ascending, from zero                      lanes are d
// Splits merge ascending (Milakov & Gimelshein 2018), the first as it is, then
//   M' = max(M, m);  a = 2^(M − M');  b = 2^(m − M');  L = fma(L, a, l · b);  A[d] = fma(A[d], a, acc[d] · b)
// and the output is A[d] / L. Over a cache of whole numbers s and acc are computed as attention_whole.h says. Keys outside a query's range are skipped: their slots may hold anything, NaN as well.
#pragma once

#include <cstdint>

#include "attention_split.h"
#include "attention_whole.h"

namespace nano::NANO_ISA {

// State of a query row over the splits merged so far.
struct Merged {
    float m, l;
    alignas(64) float acc[kMaxHead];
};

inline void merge(Merged &state, bool first, float m, float l, const float *acc, int head_size) {
    if (first) {
        state.m = m;
        state.l = l;
        for (int d = 0; d < head_size; d += 16) store(state.acc + d, load(acc + d));
        return;
    }
    const float top = m > state.m ? m : state.m;
    const f32x16 a = exp2_down(set1(state.m - top)), b = exp2_down(set1(m - top));
    for (int d = 0; d < head_size; d += 16) store(state.acc + d, fma(load(state.acc + d), a, load(acc + d) * b));
    alignas(64) float sum[16];
    store(sum, fma(set1(state.l), a, set1(l) * b));
    state.l = sum[0];
    state.m = top;
}

inline void finish(const Merged &state, float *out, int head_size) {
    const f32x16 l = set1(state.l);
    for (int d = 0; d < head_size; d += 16) store_n(out + d, load(state.acc + d) / l, head_size - d < 16 ? head_size - d : 16);
}

// Query rows [query, query + kTile) of a sequence and kv head, row-major over (row, head of the group); `queries` in all.
inline QueryTile tile_of(const AttendTask &task, int sequence, int kv_head, int query, int queries) {
    const int group = task.heads / task.cache.kv_heads, head_size = task.cache.head_size;
    QueryTile tile;
    tile.sequence = sequence;
    tile.kv_head = kv_head;
    tile.count = queries - query < kTile ? queries - query : kTile;
    for (int r = 0; r < tile.count; ++r) {
        const int row = task.step->starts[sequence] + (query + r) / group, head = kv_head * group + (query + r) % group;
        const int position = task.step->positions[row];
        tile.q[r] = task.src.row(row) + head * head_size;
        tile.out[r] = task.dst.row(row) + head * head_size;
        tile.end[r] = position + 1;
        tile.begin[r] = task.window > 0 && position + 1 > task.window ? position + 1 - task.window : 0;
    }
    return tile;
}

// Visits the tiles of a step whose ordinal is `thread` modulo `threads`: visit(ordinal, tile).
template <class F>
inline void for_each_tile(const AttendTask &task, int thread, int threads, F &&visit) {
    const Step &step = *task.step;
    const int group = task.heads / task.cache.kv_heads;
    int64_t base = 0;
    for (int sequence = 0; sequence < step.sequences; ++sequence) {
        const int queries = (step.starts[sequence + 1] - step.starts[sequence]) * group;
        const int tiles = (queries + kTile - 1) / kTile;
        const int64_t units = int64_t(tiles) * task.cache.kv_heads;
        for (int64_t unit = (thread - base % threads + threads) % threads; unit < units; unit += threads)
            visit(base + unit, tile_of(task, sequence, int(unit / tiles), int(unit % tiles) * kTile, queries));
        base += units;
    }
}

inline int first_key(const QueryTile &tile) {
    int key = tile.begin[0];
    for (int r = 1; r < tile.count; ++r) key = tile.begin[r] < key ? tile.begin[r] : key;
    return key;
}

// Merges the splits of a tile that `each(split, result)` computes or finds, ascending, and writes the rows.
template <class F>
inline void merge_splits(const QueryTile &tile, int head_size, F &&each) {
    Merged merged[kTile];
    bool begun[kTile] = {};
    SplitResult space;
    for (int split = first_key(tile) / kSplit; split * kSplit < tile.end[tile.count - 1]; ++split) {
        const SplitResult &result = each(split, space);
        for (int r = 0; r < tile.count; ++r) {
            if (result.l[r] == 0.0f) continue;
            merge(merged[r], !begun[r], result.m[r], result.l[r], result.acc[r], head_size);
            begun[r] = true;
        }
    }
    for (int r = 0; r < tile.count; ++r) finish(merged[r], tile.out[r], head_size);
}

template <class T>
inline void attend_tile(const AttendTask &task, const QueryTile &tile) {
    const Queries<T> queries(task, tile);
    merge_splits(tile, task.cache.head_size, [&](int split, SplitResult &space) -> const SplitResult & {
        attend_split(task, tile, queries, split * kSplit, space);
        return space;
    });
}

inline void attend(const AttendTask &task, int thread, int threads) {
    with_elements(task.cache.type, [&](auto *of) {
        using T = std::remove_pointer_t<decltype(of)>;
        for_each_tile(task, thread, threads, [&](int64_t, const QueryTile &tile) { attend_tile<T>(task, tile); });
    });
}

inline void rotate_and_attend(const RotateTask &rotate, const AttendTask &task, int thread, int threads) {
    with_elements(task.cache.type, [&](auto *of) {
        using T = std::remove_pointer_t<decltype(of)>;
        const int kv_heads = task.cache.kv_heads, group = task.heads / kv_heads;
        for (int64_t unit = thread; unit < int64_t(task.step->sequences) * kv_heads; unit += threads) {
            const int sequence = int(unit / kv_heads), kv_head = int(unit % kv_heads);
            rotate_group<T>(rotate, task.step->starts[sequence], kv_head);
            for (int query = 0; query < group; query += kTile)
                attend_tile<T>(task, tile_of(task, sequence, kv_head, query, group));
        }
    });
}

inline void attend_splits(const AttendTask &task, int thread, int threads) {
    with_elements(task.cache.type, [&](auto *of) {
        using T = std::remove_pointer_t<decltype(of)>;
        for_each_tile(task, 0, 1, [&](int64_t unit, const QueryTile &tile) {
            const Queries<T> queries(task, tile);
            for (int split = first_key(tile) / kSplit; split * kSplit < tile.end[tile.count - 1]; ++split)
                if ((unit + split) % threads == thread)
                    attend_split(task, tile, queries, split * kSplit,
                                 static_cast<SplitResult *>(task.partials)[unit * task.splits + split]);
        });
    });
}

inline void attend_merge(const AttendTask &task, int thread, int threads) {
    const SplitResult *partials = static_cast<const SplitResult *>(task.partials);
    for_each_tile(task, thread, threads, [&](int64_t unit, const QueryTile &tile) {
        merge_splits(tile, task.cache.head_size,
                     [&](int split, SplitResult &) -> const SplitResult & { return partials[unit * task.splits + split]; });
    });
}

}  // namespace nano::NANO_ISA
