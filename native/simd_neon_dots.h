// Sums of weight · activation for simd_neon.h, which includes this: with sdot (ARMv8.2 dotprod), and without.
#pragma once

namespace nano::NANO_ISA {

NANO_INLINE int8x16_t four_columns(int32_t activations) { return vreinterpretq_s8_s32(vdupq_n_s32(activations)); }
NANO_INLINE int8x16_t centred(uint8x16_t w) { return vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(128))); }

// Rows and halves of a block (16 outputs) that a tile of the linear kernels computes at once, by the count of registers.
#ifdef __ARM_FEATURE_DOTPROD
constexpr int TILE_ROWS = 4, TILE_HALVES = 1;

struct Nibbles { i32x16 v; };
NANO_INLINE Nibbles begin_nibbles(int32_t sum, int offset) { return {set1(-offset * sum)}; }
NANO_INLINE void step(Nibbles& acc, u8x64 w, int32_t activations) {
    const int8x16_t x = four_columns(activations);
    acc.v.a = vdotq_s32(acc.v.a, vreinterpretq_s8_u8(w.a), x);
    acc.v.b = vdotq_s32(acc.v.b, vreinterpretq_s8_u8(w.b), x);
    acc.v.c = vdotq_s32(acc.v.c, vreinterpretq_s8_u8(w.c), x);
    acc.v.d = vdotq_s32(acc.v.d, vreinterpretq_s8_u8(w.d), x);
}
NANO_INLINE i32x16 end_nibbles(Nibbles acc, int32_t, int) { return acc.v; }

NANO_INLINE int32x4_t dot_bytes(int32x4_t acc, uint8x16_t w, int8x16_t x) { return vdotq_s32(acc, centred(w), x); }
NANO_INLINE int32x4_t dot_both(int32x4_t acc, uint8x16_t w, int8x16_t x, uint8x16_t next, int8x16_t y) {
    return vdotq_s32(vdotq_s32(acc, vreinterpretq_s8_u8(w), x), vreinterpretq_s8_u8(next), y);
}

#else
constexpr int TILE_ROWS = 2, TILE_HALVES = 1;

// A 16-bit lane per byte: eight products of at most 15 · 127 fit; they are widened once, at the end.
struct Wide { int16x8_t low, high; };
struct Nibbles { Wide a, b, c, d; };
NANO_INLINE Nibbles begin_nibbles(int32_t, int) {
    const Wide none = {vdupq_n_s16(0), vdupq_n_s16(0)};
    return {none, none, none, none};
}
NANO_INLINE void add_products(Wide& acc, uint8x16_t w, int8x16_t x) {
    acc.low = vmlal_s8(acc.low, vget_low_s8(vreinterpretq_s8_u8(w)), vget_low_s8(x));
    acc.high = vmlal_high_s8(acc.high, vreinterpretq_s8_u8(w), x);
}
NANO_INLINE void step(Nibbles& acc, u8x64 w, int32_t activations) {
    const int8x16_t x = four_columns(activations);
    add_products(acc.a, w.a, x);
    add_products(acc.b, w.b, x);
    add_products(acc.c, w.c, x);
    add_products(acc.d, w.d, x);
}
NANO_INLINE int32x4_t add_fours(Wide acc) { return vpaddq_s32(vpaddlq_s16(acc.low), vpaddlq_s16(acc.high)); }
NANO_INLINE i32x16 end_nibbles(Nibbles acc, int32_t sum, int offset) {
    return i32x16{add_fours(acc.a), add_fours(acc.b), add_fours(acc.c), add_fours(acc.d)} + set1(-offset * sum);
}

// Two products of at most 128 · 127 fit 16 bits.
NANO_INLINE int32x4_t dot_bytes(int32x4_t acc, uint8x16_t w, int8x16_t x) {
    const int16x8_t low = vmull_s8(vget_low_s8(centred(w)), vget_low_s8(x)), high = vmull_high_s8(centred(w), x);
    return vpadalq_s16(acc, vpaddq_s16(low, high));
}
// Four of at most 63 · 127 do, too.
NANO_INLINE int32x4_t dot_both(int32x4_t acc, uint8x16_t w, int8x16_t x, uint8x16_t next, int8x16_t y) {
    Wide sum = {vmull_s8(vget_low_s8(vreinterpretq_s8_u8(w)), vget_low_s8(x)), vmull_high_s8(vreinterpretq_s8_u8(w), x)};
    add_products(sum, next, y);
    return vpadalq_s16(acc, vpaddq_s16(sum.low, sum.high));
}
#endif

struct Bytes { i32x16 v; };
NANO_INLINE Bytes begin_bytes(int32_t) { return {set1(0)}; }
NANO_INLINE void step(Bytes& acc, u8x64 w, int32_t activations) {
    const int8x16_t x = four_columns(activations);
    acc.v = {dot_bytes(acc.v.a, w.a, x), dot_bytes(acc.v.b, w.b, x), dot_bytes(acc.v.c, w.c, x), dot_bytes(acc.v.d, w.d, x)};
}
NANO_INLINE i32x16 end_bytes(Bytes acc) { return acc.v; }

// First and second numbers apart, of lanes 0..7 and 8..15.
struct Pairs { int16x8x2_t low, high; };
NANO_INLINE Pairs load_pairs(const int16_t* p) { return {vld2q_s16(p), vld2q_s16(p + 16)}; }
NANO_INLINE Pairs load_pairs(const int8_t* p) {
    const int8x16x2_t all = vld2q_s8(p);
    return {{{vmovl_s8(vget_low_s8(all.val[0])), vmovl_s8(vget_low_s8(all.val[1]))}},
            {{vmovl_high_s8(all.val[0]), vmovl_high_s8(all.val[1])}}};
}
NANO_INLINE i32x16 dot(i32x16 acc, Pairs w, int32_t two) {
    const int16x8_t x = vdupq_n_s16((int16_t)two), y = vdupq_n_s16((int16_t)(two >> 16));
    acc.a = vmlal_s16(vmlal_s16(acc.a, vget_low_s16(w.low.val[0]), vget_low_s16(x)), vget_low_s16(w.low.val[1]), vget_low_s16(y));
    acc.b = vmlal_high_s16(vmlal_high_s16(acc.b, w.low.val[0], x), w.low.val[1], y);
    acc.c = vmlal_s16(vmlal_s16(acc.c, vget_low_s16(w.high.val[0]), vget_low_s16(x)), vget_low_s16(w.high.val[1]), vget_low_s16(y));
    acc.d = vmlal_high_s16(vmlal_high_s16(acc.d, w.high.val[0], x), w.high.val[1], y);
    return acc;
}

struct Sextets { i32x16 v; };
NANO_INLINE Sextets begin_sextets(int32_t start) { return {set1(start)}; }
NANO_INLINE void step(Sextets& acc, u8x64 w, int32_t activations, u8x64 next, int32_t next_activations) {
    const int8x16_t x = four_columns(activations), y = four_columns(next_activations);
    acc.v = {dot_both(acc.v.a, w.a, x, next.a, y), dot_both(acc.v.b, w.b, x, next.b, y),
             dot_both(acc.v.c, w.c, x, next.c, y), dot_both(acc.v.d, w.d, x, next.d, y)};
}
NANO_INLINE i32x16 end_sextets(Sextets acc) { return acc.v; }

}  // namespace nano::NANO_ISA
