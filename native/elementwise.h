// Norm, rotation with the cache write, and the gate. One fixed order of operations each; the formulas are the definition.
#pragma once

#include "cache.h"
#include "kernels.h"
#include "simd.h"

namespace nano::NANO_ISA {

// RMSNorm (Zhang & Sennrich 2019). y = (x · (1 / sqrt(Σx² / width + eps))) · weight. `y` may be `x`.
NANO_INLINE void rms_norm(const float *x, float *y, const float *weight, int width, float eps) {
    const f32x16 mean = set1(sum_of_squares(x, width)) / set1(float(width));
    const f32x16 scale = set1(1.0f) / sqrt(mean + set1(eps));
    for (int i = 0; i < width; i += 16) {
        const int n = lanes_left(width, i);
        store_n(y + i, load_n(x + i, n) * scale * load_n(weight + i, n), n);
    }
}

inline void normalize_rows(Rows src, Rows dst, const float *weight, int width, float eps, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) rms_norm(src.row(row), dst.row(row), weight, width, eps);
}

// silu(x) = x / (1 + e^−x) (Elfwing et al. 2017); gelu_tanh (Hendrycks & Gimpel 2016) x/2 · (1 + tanh z) = x / (1 + e^−2z) with
// z = √(2/π) · (x + 0.044715 x³).
template <Activation A>
NANO_INLINE f32x16 activate(f32x16 x) {
    f32x16 z = x;
    if constexpr (A == Activation::gelu_tanh) z = set1(1.5957691216057308f) * fma(x * x * set1(0.044715f), x, x);
    return x / (set1(1.0f) + exp(zero() - z));
}

template <Activation A>
inline void gate_as(Rows src, Rows dst, int size, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float *x = src.row(row), *up = x + size;
        float *y = dst.row(row);
        for (int i = 0; i < size; i += 16) {
            const int n = lanes_left(size, i);
            store_n(y + i, activate<A>(load_n(x + i, n)) * load_n(up + i, n), n);
        }
    }
}

inline void gate_rows(Activation activation, Rows src, Rows dst, int size, int64_t begin, int64_t end) {
    if (activation == Activation::silu) return gate_as<Activation::silu>(src, dst, size, begin, end);
    gate_as<Activation::gelu_tanh>(src, dst, size, begin, end);
}

// Rotation by halves: a' = fma(b, −sin, a · cos), b' = fma(a, sin, b · cos) with a = x[i], b = x[i + size / 2].
NANO_INLINE void rotate_head(float *x, const float *cosine, const float *sine, int head_size) {
    const int half = head_size / 2;
    for (int i = 0; i < half; i += 16) {
        const int n = lanes_left(half, i);
        const f32x16 a = load_n(x + i, n), b = load_n(x + half + i, n), c = load_n(cosine + i, n), s = load_n(sine + i, n);
        store_n(x + i, fma(b, set1(-1.0f) * s, a * c), n);
        store_n(x + half + i, fma(a, s, b * c), n);
    }
}

// The heads of one row that share a kv head: their q and k normed and rotated, k and v put into the cache.
template <class T>
inline void rotate_group(const RotateTask &task, int64_t row, int kv_head) {
    const Step &step = *task.step;
    const CacheView &cache = task.cache;
    const int size = cache.head_size, group = task.heads / cache.kv_heads;
    const float *cosine = task.cosine + row * (size / 2), *sine = task.sine + row * (size / 2);
    const auto turn = [&](float *x, const float *norm) {
        if (norm) rms_norm(x, x, norm, size, task.eps);
        rotate_head(x, cosine, sine, size);
    };
    float *q = task.rows.row(row) + kv_head * group * size, *k = task.rows.row(row) + (task.heads + kv_head) * size;
    for (int head = 0; head < group; ++head) turn(q + head * size, task.q_norm);
    turn(k, task.k_norm);
    const int position = step.positions[row], slot = position % cache.block_size;
    const int64_t block = step.blocks[int64_t(step.sequence[row]) * step.max_blocks + position / cache.block_size];
    store_key<T>(cache, block, kv_head, slot, k);
    store_value<T>(cache, block, kv_head, slot, k + cache.kv_heads * size);
}

inline void rotate_rows(const RotateTask &task, int64_t begin, int64_t end) {
    with_elements(task.cache.type, [&](auto *of) {
        using T = std::remove_pointer_t<decltype(of)>;
        for (int64_t row = begin; row < end; ++row)
            for (int kv_head = 0; kv_head < task.cache.kv_heads; ++kv_head) rotate_group<T>(task, row, kv_head);
    });
}

}  // namespace nano::NANO_ISA
