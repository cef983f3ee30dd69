// Norm, rotation with the cache write, and the gate. One fixed order of operations each; the formulas are the definition.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace nano::NANO_ISA {

NANO_INLINE int lanes_left(int count, int i) { return count - i < 16 ? count - i : 16; }

// RMSNorm (Zhang & Sennrich 2019). Σx²: 16 partials by index mod 16, fma ascending, then the fixed tree;
// y = (x · (1 / sqrt(Σx² / width + eps))) · weight. `y` may be `x`.
NANO_INLINE void rms_norm(const float *x, float *y, const float *weight, int width, float eps) {
    f32x16 total = zero();
    for (int i = 0; i < width; i += 16) {
        const f32x16 v = load_n(x + i, lanes_left(width, i));
        total = fma(v, v, total);
    }
    const f32x16 mean = set1(reduce_add(total)) / set1(float(width));
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

// Elements of the cache: float32, or 16 bits of a kind.
struct F16 {
    uint16_t bits;
};
struct BF16 {
    uint16_t bits;
};
NANO_INLINE f32x16 load_as_f32(const float *p) { return load(p); }
NANO_INLINE f32x16 load_as_f32(const F16 *p) { return load_f16(&p->bits); }
NANO_INLINE f32x16 load_as_f32(const BF16 *p) { return load_bf16(&p->bits); }
NANO_INLINE void store_rounded(float *p, f32x16 x, int n) { store_n(p, x, n); }
NANO_INLINE void store_rounded(F16 *p, f32x16 x, int n) { store_f16_n(&p->bits, x, n); }
NANO_INLINE void store_rounded(BF16 *p, f32x16 x, int n) { store_bf16_n(&p->bits, x, n); }

template <class T>
inline void store_key(T *tile, int lane, const float *key, int head_size) {
    T rounded[16];
    for (int d = 0; d < head_size; d += 16) {
        const int n = lanes_left(head_size, d);
        store_rounded(rounded, load_n(key + d, n), n);
        for (int i = 0; i < n; ++i) tile[16 * (d + i) + lane] = rounded[i];
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
    store_key(static_cast<T *>(cache.keys) + cache.key_tile(block, kv_head, slot), slot & 15, k, size);
    const float *v = k + cache.kv_heads * size;
    T *value = static_cast<T *>(cache.values) + cache.value(block, kv_head, slot);
    for (int d = 0; d < size; d += 16) {
        const int n = lanes_left(size, d);
        store_rounded(value + d, load_n(v + d, n), n);
    }
}

template <class T>
inline void rotate_as(const RotateTask &task, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
        for (int kv_head = 0; kv_head < task.cache.kv_heads; ++kv_head) rotate_group<T>(task, row, kv_head);
}

inline void rotate_rows(const RotateTask &task, int64_t begin, int64_t end) {
    switch (task.cache.type) {
        case CacheType::f32: return rotate_as<float>(task, begin, end);
        case CacheType::f16: return rotate_as<F16>(task, begin, end);
        case CacheType::bf16: return rotate_as<BF16>(task, begin, end);
    }
}

}  // namespace nano::NANO_ISA
