// The functions of simd.h by name, so that tests can hold every instruction set to the same bits.
#pragma once

#include "matrix.h"
#include "simd.h"

namespace nano::NANO_ISA {

NANO_INLINE f32x16 through_f16(f32x16 a, int n) {
    uint16_t halves[LANES] = {};
    if (n == LANES) {
        store_f16(halves, a);
        return load_f16(halves);
    }
    store_f16_n(halves, a, n);
    return load_f16_n(halves, n);
}

NANO_INLINE f32x16 through_bf16(f32x16 a, int n) {
    uint16_t halves[LANES] = {};
    if (n == LANES) {
        store_bf16(halves, a);
        return load_bf16(halves);
    }
    store_bf16_n(halves, a, n);
    return load_bf16_n(halves, n);
}

NANO_INLINE f32x16 apply(Probe op, f32x16 a, f32x16 b, f32x16 c, int n) {
    switch (op) {
        case Probe::add: return a + b;
        case Probe::subtract: return a - b;
        case Probe::multiply: return a * b;
        case Probe::divide: return a / b;
        case Probe::fma: return fma(a, b, c);
        case Probe::max: return max(a, b);
        case Probe::min: return min(a, b);
        case Probe::sqrt: return sqrt(a);
        case Probe::exp: return exp(a);
        case Probe::exp2_down: return exp2_down(a);
        case Probe::f16: return through_f16(a, n);
        case Probe::bf16: return through_bf16(a, n);
        case Probe::to_i32: return from_bits(to_i32(a));
        case Probe::select_less: return select(less(a, b), c, a);
        case Probe::first: return select(first(n), a, b);
        case Probe::reduce_add: return set1(reduce_add(a));
        case Probe::reduce_max: return set1(reduce_max(a));
    }
    return a;
}

// Sixteen lanes at a time; the last n % 16 through load_n and store_n.
inline void probe(Probe op, const float *a, const float *b, const float *c, float *out, size_t n) {
    for (size_t i = 0; i < n; i += LANES) {
        const size_t left = n - i;
        if (left >= (size_t)LANES) {
            store(out + i, apply(op, load(a + i), load(b + i), load(c + i), LANES));
        } else {
            const int k = (int)left;
            store_n(out + i, apply(op, load_n(a + i, k), load_n(b + i, k), load_n(c + i, k), k), k);
        }
    }
}

}  // namespace nano::NANO_ISA
