// Activations to int8 per row and 32 columns (see Activations in matrix.h).
#pragma once

#include "matrix.h"
#include "simd.h"

namespace nano::NANO_ISA {

NANO_INLINE void quantize_group(const float *x, int8_t *q, float *scale, int32_t *sum, float *shift) {
    const f32x16 low = load(x), high = load(x + LANES);
    const i32x16 magnitude = set1(0x7fffffff);
    // Magnitudes as integers: ordered like the floats, infinity and then NaN above all.
    const int32_t word = reduce_max(max(bits(low) & magnitude, bits(high) & magnitude));
    const float most = __builtin_bit_cast(float, word);
    if (word >= 0x7f800000 || most < 0x1p-119f) {
        memset(q, 0, BLOCK);
        *sum = 0;
        *scale = *shift = word >= 0x7f800000 ? __builtin_nanf("") : 0.0f;
        return;
    }
    const f32x16 inverse = set1(127.0f / most);
    const i32x16 a = to_i32(low * inverse), b = to_i32(high * inverse);
    store_i8(q, a);
    store_i8(q + LANES, b);
    *scale = most / 127.0f;
    *sum = reduce_add(a + b);
    *shift = *scale * (float)*sum;
}

inline void quantize(const float *x, size_t ldx, int row_begin, int row_end, Activations out) {
    const int groups = out.k / BLOCK;
    for (int r = row_begin; r < row_end; r++) {
        const Activations row = out.from(r);
        for (int g = 0; g < groups; g++)
            quantize_group(x + r * ldx + (size_t)g * BLOCK, row.q + (size_t)g * BLOCK, row.scale + g, row.sum + g, row.shift + g);
    }
}

// Row `rest` of `out` becomes the rounded remainder of row `row`: x ≈ scale · q + scale' · q'.
inline void quantize_rest(const float *x, int row, int rest, Activations out) {
    const Activations first = out.from(row), second = out.from(rest);
    for (int g = 0; g < out.k / BLOCK; g++) {
        float left[BLOCK];
        const f32x16 minus = set1(-first.scale[g]);
        for (int half = 0; half < BLOCK; half += LANES)
            store(left + half, fma(minus, to_f32(load_i8(first.q + g * BLOCK + half)), load(x + g * BLOCK + half)));
        quantize_group(left, second.q + g * BLOCK, second.scale + g, second.sum + g, second.shift + g);
    }
}

}  // namespace nano::NANO_ISA
