// Activations to int8 per row and 32 columns (see Activations in matrix.h).
#pragma once

#include "matrix.h"
#include "simd.h"

namespace nano::NANO_ISA {

NANO_INLINE void quantize_group(const float *x, ActivationRow &out) {
    const f32x16 low = load(x), high = load(x + LANES);
    const i32x16 magnitude = set1(0x7fffffff);
    // Magnitudes as integers: ordered like the floats, infinity and then NaN above all.
    const int32_t word = reduce_max(max(bits(low) & magnitude, bits(high) & magnitude));
    const float most = __builtin_bit_cast(float, word);
    if (word >= 0x7f800000 || most < 0x1p-119f) {
        memset(out.q, 0, BLOCK);
        out.sum = out.first = 0;
        out.scale = out.shift = word >= 0x7f800000 ? __builtin_nanf("") : 0.0f;
        return;
    }
    const f32x16 inverse = set1(127.0f / most);
    const i32x16 a = to_i32(low * inverse), b = to_i32(high * inverse);
    store_i8(out.q, a);
    store_i8(out.q + LANES, b);
    out.scale = most / 127.0f;
    out.first = reduce_add(a);
    out.sum = out.first + reduce_add(b);
    out.shift = out.scale * (float)out.sum;
}

inline void quantize(const float *x, size_t ldx, int row_begin, int row_end, Activations out) {
    for (int r = row_begin; r < row_end; r++)
        for (int g = 0; g < out.k / BLOCK; g++) quantize_group(x + r * ldx + (size_t)g * BLOCK, out.at(r)[g * out.panel]);
}

// Row `rest` of `out` becomes the rounded remainder of row `row`: x ≈ scale · q + scale' · q'.
inline void quantize_rest(const float *x, int row, int rest, Activations out) {
    for (int g = 0; g < out.k / BLOCK; g++) {
        const ActivationRow &group = out.at(row)[g * out.panel];
        float left[BLOCK];
        const f32x16 minus = set1(-group.scale);
        for (int half = 0; half < BLOCK; half += LANES)
            store(left + half, fma(minus, to_f32(load_i8(group.q + half)), load(x + g * BLOCK + half)));
        quantize_group(left, out.at(rest)[g * out.panel]);
    }
}

}  // namespace nano::NANO_ISA
