// Sums of weight · activation for simd_generic.h, which includes this.
#pragma once

namespace nano::NANO_ISA {

NANO_INLINE u8x64 load_bytes(const uint8_t* p) {
    u8x64 r;
    memcpy(&r, p, sizeof r);
    return r;
}
NANO_INLINE u8x64 low_nibbles(u8x64 w) {
    for (int i = 0; i < 4; i++) w.v[i] &= 15;
    return w;
}
NANO_INLINE u8x64 high_nibbles(u8x64 w) {
    for (int i = 0; i < 4; i++) w.v[i] = as<i8x16>(as<i16x8>(w.v[i]) >> 4) & 15;
    return w;
}
template <int SHIFT, int8_t MASK> NANO_INLINE u8x64 with_bits(u8x64 w, u8x64 high) {
    for (int i = 0; i < 4; i++) {
        i16x8 moved = as<i16x8>(high.v[i]);
        if constexpr (SHIFT > 0) moved <<= SHIFT;
        if constexpr (SHIFT < 0) moved >>= -SHIFT;
        w.v[i] |= as<i8x16>(moved) & MASK;
    }
    return w;
}

// Four int8 as 16-bit lanes, twice over.
NANO_INLINE i16x8 widen(int32_t activations) {
    const i32x4 a = {activations, activations, activations, activations};
    return double_low(as<i8x16>(a)) >> 8;
}
// Neighbours added as int32.
NANO_INLINE i32x4 add_pairs(i16x8 a) { return ((as<i32x4>(a) << 16) >> 16) + (as<i32x4>(a) >> 16); }
NANO_INLINE i32x4 add_pairs(i32x4 a, i32x4 b) {
    return NANO_SHUFFLE(i32x4, a, b, 0, 2, 4, 6) + NANO_SHUFFLE(i32x4, a, b, 1, 3, 5, 7);
}

// A 16-bit lane per byte: eight products of at most 15 · 127 fit.
struct Nibbles { i16x8 v[8]; };
NANO_INLINE Nibbles begin_nibbles(int32_t, int) { return {}; }
NANO_INLINE void step(Nibbles& acc, u8x64 w, int32_t activations) {
    const i16x8 a = widen(activations);
    for (int i = 0; i < 4; i++) {
        acc.v[2 * i] += (double_low(w.v[i]) & 0xff) * a;
        acc.v[2 * i + 1] += (double_high(w.v[i]) & 0xff) * a;
    }
}
NANO_INLINE i32x16 end_nibbles(Nibbles acc, int32_t sum, int offset) {
    i32x16 r = set1(-offset * sum);
    for (int i = 0; i < 4; i++) r.v[i] += add_pairs(add_pairs(acc.v[2 * i]), add_pairs(acc.v[2 * i + 1]));
    return r;
}

// One product of a byte fits 16 bits; pairs are added as int32 at once.
struct Bytes { i32x4 v[8]; };
NANO_INLINE Bytes begin_bytes(int32_t) { return {}; }
NANO_INLINE void step(Bytes& acc, u8x64 w, int32_t activations) {
    const i16x8 a = widen(activations);
    for (int i = 0; i < 4; i++) {
        const i8x16 centred = w.v[i] ^ -128;
        acc.v[2 * i] += add_pairs((double_low(centred) >> 8) * a);
        acc.v[2 * i + 1] += add_pairs((double_high(centred) >> 8) * a);
    }
}
NANO_INLINE i32x16 end_bytes(Bytes acc) {
    i32x16 r;
    for (int i = 0; i < 4; i++) r.v[i] = add_pairs(acc.v[2 * i], acc.v[2 * i + 1]);
    return r;
}

struct Pairs { i32x4 first[4], second[4]; };
NANO_INLINE Pairs load_pairs(const int16_t* p) {
    Pairs r;
    for (int i = 0; i < 4; i++) {
        i32x4 both;
        memcpy(&both, p + 8 * i, sizeof both);
        r.first[i] = (both << 16) >> 16;
        r.second[i] = both >> 16;
    }
    return r;
}
NANO_INLINE Pairs load_pairs(const int8_t* p) {
    int16_t wide[32];
    for (int i = 0; i < 32; i++) wide[i] = p[i];
    return load_pairs(wide);
}
NANO_INLINE i32x16 dot(i32x16 acc, Pairs w, int32_t two) {
    const int32_t x = (int16_t)two, y = two >> 16;
    for (int i = 0; i < 4; i++) acc.v[i] += w.first[i] * i32x4{x, x, x, x} + w.second[i] * i32x4{y, y, y, y};
    return acc;
}

// Two products of at most 63 · 127 fit 16 bits together, and their neighbours too.
struct Sextets { i32x4 v[8]; };
NANO_INLINE Sextets begin_sextets(int32_t start) {
    Sextets acc;
    for (i32x4 &v : acc.v) v = i32x4{start, 0, start, 0};
    return acc;
}
NANO_INLINE void step(Sextets& acc, u8x64 w, int32_t activations, u8x64 next, int32_t next_activations) {
    const i16x8 a = widen(activations), b = widen(next_activations);
    for (int i = 0; i < 4; i++) {
        acc.v[2 * i] += add_pairs((double_low(w.v[i]) & 0xff) * a + (double_low(next.v[i]) & 0xff) * b);
        acc.v[2 * i + 1] += add_pairs((double_high(w.v[i]) & 0xff) * a + (double_high(next.v[i]) & 0xff) * b);
    }
}
NANO_INLINE i32x16 end_sextets(Sextets acc) {
    i32x16 r;
    for (int i = 0; i < 4; i++) r.v[i] = add_pairs(acc.v[2 * i], acc.v[2 * i + 1]);
    return r;
}

}  // namespace nano::NANO_ISA
