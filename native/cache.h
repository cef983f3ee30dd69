// How keys and values lie in the cache, by the type of its elements: float32, 16 bits of a kind, or whole numbers with a float32
// scale per token and head (x ≈ scale · q).
//   int8    scale = max|x| / 127
//   int16   of a value: scale = max|x| / 4095; of a key: scale = |x| / 32700 with |x| its length (Euclidean)
// q = x · (1 / scale) to nearest even; a vector under 2^-50 counts as zero, scale 0; one with a NaN or an infinity has scale NaN.
// Products of whole numbers are exact in int32: attention_whole.h says why these limits hold.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace nano::NANO_ISA {

struct F16 {
    uint16_t bits;
};
struct BF16 {
    uint16_t bits;
};
template <class T> constexpr bool kWhole = false;
template <> constexpr bool kWhole<int8_t> = true;
template <> constexpr bool kWhole<int16_t> = true;

constexpr int kMaxHead = 256;
constexpr float kLongest = 32700.0f;  // of queries and int16 keys, in units of their scale
template <class T> constexpr float kMost = 127.0f;
template <> constexpr float kMost<int16_t> = 4095.0f;

NANO_INLINE int lanes_left(int count, int i) { return count - i < 16 ? count - i : 16; }

NANO_INLINE f32x16 load_as_f32(const float *p) { return load(p); }
NANO_INLINE f32x16 load_as_f32(const F16 *p) { return load_f16(&p->bits); }
NANO_INLINE f32x16 load_as_f32(const BF16 *p) { return load_bf16(&p->bits); }
NANO_INLINE void store_rounded(float *p, f32x16 x, int n) { store_n(p, x, n); }
NANO_INLINE void store_rounded(F16 *p, f32x16 x, int n) { store_f16_n(&p->bits, x, n); }
NANO_INLINE void store_rounded(BF16 *p, f32x16 x, int n) { store_bf16_n(&p->bits, x, n); }
NANO_INLINE void store_lanes(int16_t *p, i32x16 x) { store_u16((uint16_t *)p, x); }
NANO_INLINE void store_lanes(int8_t *p, i32x16 x) { store_i8(p, x); }

// Σx²: 16 partials by index mod 16, fma ascending, then the fixed tree.
NANO_INLINE float sum_of_squares(const float *x, int width) {
    f32x16 total = zero();
    for (int i = 0; i < width; i += 16) {
        const f32x16 v = load_n(x + i, lanes_left(width, i));
        total = fma(v, v, total);
    }
    return reduce_add(total);
}

// max|x| by the order of the bits: infinity and then NaN above all.
NANO_INLINE float largest_magnitude(const float *x, int width) {
    i32x16 most = set1(0);
    for (int i = 0; i < width; i += 16) most = max(most, bits(load_n(x + i, lanes_left(width, i))) & set1(0x7fffffff));
    return __builtin_bit_cast(float, reduce_max(most));
}

// `size` of a vector, which becomes `units` of its scale. q has room for whole vectors of lanes. Returns the scale.
template <class T>
NANO_INLINE float to_whole(const float *x, int width, float size, float units, T *q) {
    const bool zeros = !(size >= 0x1p-50f), wrong = !(size < __builtin_inff());
    const f32x16 inverse = set1(zeros || wrong ? 0.0f : units / size);
    for (int i = 0; i < width; i += 16) {
        const f32x16 scaled = load_n(x + i, lanes_left(width, i)) * inverse;
        store_lanes(q + i, wrong ? set1(0) : to_i32(scaled));
    }
    return wrong ? __builtin_nanf("") : zeros ? 0.0f : size / units;
}
NANO_INLINE float length(const float *x, int width) {
    float root[16];
    store(root, sqrt(set1(sum_of_squares(x, width))));
    return root[0];
}
template <class T>
NANO_INLINE float key_to_whole(const float *x, int width, T *q) {
    if constexpr (sizeof(T) == 2) return to_whole(x, width, length(x, width), kLongest, q);
    return to_whole(x, width, largest_magnitude(x, width), kMost<T>, q);
}

template <class T>
inline void store_key(const CacheView &cache, int64_t block, int head, int slot, const float *key) {
    T *tile = static_cast<T *>(cache.keys) + cache.key_tile(block, head, slot);
    const int lane = slot & 15, size = cache.head_size;
    if constexpr (kWhole<T>) {
        T whole[kMaxHead];
        cache.key_scales[cache.scale(block, head, slot)] = key_to_whole(key, size, whole);
        for (int d = 0; d < size; d += 2) memcpy(tile + 16 * d + 2 * lane, whole + d, 2 * sizeof(T));
    } else {
        T rounded[16];
        for (int d = 0; d < size; d += 16) {
            const int n = lanes_left(size, d);
            store_rounded(rounded, load_n(key + d, n), n);
            for (int i = 0; i < n; ++i) tile[16 * (d + i) + lane] = rounded[i];
        }
    }
}

template <class T>
inline void store_value(const CacheView &cache, int64_t block, int head, int slot, const float *value) {
    const int size = cache.head_size;
    if constexpr (kWhole<T>) {
        T whole[kMaxHead], *pair = static_cast<T *>(cache.values) + cache.value(block, head, slot & ~1) + (slot & 1);
        cache.value_scales[cache.scale(block, head, slot)] =
            to_whole(value, size, largest_magnitude(value, size), kMost<T>, whole);
        for (int d = 0; d < size; ++d) pair[2 * d] = whole[d];
    } else {
        T *to = static_cast<T *>(cache.values) + cache.value(block, head, slot);
        for (int d = 0; d < size; d += 16) store_rounded(to + d, load_n(value + d, lanes_left(size, d)), lanes_left(size, d));
    }
}

// f with a null pointer of the cache's element type.
template <class F>
inline void with_elements(CacheType type, F &&f) {
    switch (type) {
        case CacheType::f32: return f((float *)nullptr);
        case CacheType::f16: return f((F16 *)nullptr);
        case CacheType::bf16: return f((BF16 *)nullptr);
        case CacheType::int16: return f((int16_t *)nullptr);
        case CacheType::int8: return f((int8_t *)nullptr);
    }
}

}  // namespace nano::NANO_ISA
