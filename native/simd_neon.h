// AArch64: a vector is four registers, lanes 0..3, 4..7, 8..11 and 12..15. See simd.h for what each function means.
#pragma once

#include <arm_neon.h>

namespace nano::NANO_ISA {

struct f32x16 { float32x4_t a, b, c, d; };
struct i32x16 { int32x4_t a, b, c, d; };
struct u8x64 { uint8x16_t a, b, c, d; };
struct mask16 { uint32x4_t a, b, c, d; };

NANO_INLINE mask16 first(int n) {
    const int32x4_t count = vdupq_n_s32(n), lane = vcombine_s32(vcreate_s32(0x100000000), vcreate_s32(0x300000002));
    return {vcgtq_s32(count, lane), vcgtq_s32(count, vaddq_s32(lane, vdupq_n_s32(4))),
            vcgtq_s32(count, vaddq_s32(lane, vdupq_n_s32(8))), vcgtq_s32(count, vaddq_s32(lane, vdupq_n_s32(12)))};
}

NANO_INLINE f32x16 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
NANO_INLINE i32x16 load(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}; }
NANO_INLINE void store(float* p, f32x16 x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
NANO_INLINE void store(int32_t* p, i32x16 x) {
    vst1q_s32(p, x.a);
    vst1q_s32(p + 4, x.b);
    vst1q_s32(p + 8, x.c);
    vst1q_s32(p + 12, x.d);
}
NANO_INLINE f32x16 set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
NANO_INLINE i32x16 set1(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}; }

NANO_INLINE f32x16 load_f16(const uint16_t* p) {
    const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
    return {vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(low))), vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(low))),
            vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(high))), vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(high)))};
}
NANO_INLINE void store_f16(uint16_t* p, f32x16 x) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x.a)));
    vst1_u16(p + 4, vreinterpret_u16_f16(vcvt_f16_f32(x.b)));
    vst1_u16(p + 8, vreinterpret_u16_f16(vcvt_f16_f32(x.c)));
    vst1_u16(p + 12, vreinterpret_u16_f16(vcvt_f16_f32(x.d)));
}
NANO_INLINE i32x16 load_u16(const uint16_t* p) {
    const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
    return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
            vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))};
}
NANO_INLINE int16x8_t cut(int32x4_t low, int32x4_t high) { return vcombine_s16(vmovn_s32(low), vmovn_s32(high)); }
NANO_INLINE void store_u16(uint16_t* p, i32x16 x) {
    vst1q_u16(p, vreinterpretq_u16_s16(cut(x.a, x.b)));
    vst1q_u16(p + 8, vreinterpretq_u16_s16(cut(x.c, x.d)));
}
NANO_INLINE i32x16 load_i8(const int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    return {vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
            vmovl_s16(vget_high_s16(high))};
}
NANO_INLINE void store_i8(int8_t* p, i32x16 x) {
    vst1q_s8(p, vcombine_s8(vmovn_s16(cut(x.a, x.b)), vmovn_s16(cut(x.c, x.d))));
}

// Tails go through memory; most calls have none.
template <class T, class F> NANO_INLINE auto load_some(const T* p, int n, F whole) {
    if (n == 16) return whole(p);
    T some[16] = {};
    memcpy(some, p, n * sizeof *p);
    return whole(some);
}
template <class T, class F> NANO_INLINE void store_some(T* p, int n, F whole) {
    if (n == 16) return whole(p);
    T some[16];
    whole(some);
    memcpy(p, some, n * sizeof *p);
}
NANO_INLINE f32x16 load_n(const float* p, int n) {
    return load_some(p, n, [](const float* q) { return load(q); });
}
NANO_INLINE i32x16 load_n(const int32_t* p, int n) {
    return load_some(p, n, [](const int32_t* q) { return load(q); });
}
NANO_INLINE f32x16 load_f16_n(const uint16_t* p, int n) {
    return load_some(p, n, [](const uint16_t* q) { return load_f16(q); });
}
NANO_INLINE i32x16 load_u16_n(const uint16_t* p, int n) {
    return load_some(p, n, [](const uint16_t* q) { return load_u16(q); });
}
NANO_INLINE void store_n(float* p, f32x16 x, int n) {
    store_some(p, n, [=](float* q) { store(q, x); });
}
NANO_INLINE void store_n(int32_t* p, i32x16 x, int n) {
    store_some(p, n, [=](int32_t* q) { store(q, x); });
}
NANO_INLINE void store_f16_n(uint16_t* p, f32x16 x, int n) {
    store_some(p, n, [=](uint16_t* q) { store_f16(q, x); });
}
NANO_INLINE void store_u16_n(uint16_t* p, i32x16 x, int n) {
    store_some(p, n, [=](uint16_t* q) { store_u16(q, x); });
}

NANO_INLINE f32x16 operator+(f32x16 x, f32x16 y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
NANO_INLINE f32x16 operator-(f32x16 x, f32x16 y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
NANO_INLINE f32x16 operator*(f32x16 x, f32x16 y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
NANO_INLINE f32x16 operator/(f32x16 x, f32x16 y) { return {x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d}; }
NANO_INLINE f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
    return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
NANO_INLINE f32x16 sqrt(f32x16 x) { return {vsqrtq_f32(x.a), vsqrtq_f32(x.b), vsqrtq_f32(x.c), vsqrtq_f32(x.d)}; }

NANO_INLINE i32x16 operator+(i32x16 x, i32x16 y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
NANO_INLINE i32x16 operator-(i32x16 x, i32x16 y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
NANO_INLINE i32x16 operator*(i32x16 x, i32x16 y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
NANO_INLINE i32x16 operator&(i32x16 x, i32x16 y) { return {x.a & y.a, x.b & y.b, x.c & y.c, x.d & y.d}; }
NANO_INLINE i32x16 operator|(i32x16 x, i32x16 y) { return {x.a | y.a, x.b | y.b, x.c | y.c, x.d | y.d}; }
template <int N> NANO_INLINE i32x16 shift_left(i32x16 x) {
    return {vshlq_n_s32(x.a, N), vshlq_n_s32(x.b, N), vshlq_n_s32(x.c, N), vshlq_n_s32(x.d, N)};
}
template <int N> NANO_INLINE int32x4_t shift_right(int32x4_t x) {
    return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), N));
}
template <int N> NANO_INLINE i32x16 shift_right(i32x16 x) {
    return {shift_right<N>(x.a), shift_right<N>(x.b), shift_right<N>(x.c), shift_right<N>(x.d)};
}

// The instruction gives 0 for NaN and INT32_MAX above the range.
NANO_INLINE int32x4_t to_i32(float32x4_t x) {
    return vbslq_s32(vcltq_f32(x, vdupq_n_f32(0x1p31f)), vcvtnq_s32_f32(x), vdupq_n_s32(INT32_MIN));
}
NANO_INLINE i32x16 to_i32(f32x16 x) { return {to_i32(x.a), to_i32(x.b), to_i32(x.c), to_i32(x.d)}; }
NANO_INLINE f32x16 to_f32(i32x16 x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)}; }
NANO_INLINE i32x16 bits(f32x16 x) { return __builtin_bit_cast(i32x16, x); }
NANO_INLINE f32x16 from_bits(i32x16 x) { return __builtin_bit_cast(f32x16, x); }

NANO_INLINE mask16 less(f32x16 x, f32x16 y) {
    return {vcltq_f32(x.a, y.a), vcltq_f32(x.b, y.b), vcltq_f32(x.c, y.c), vcltq_f32(x.d, y.d)};
}
NANO_INLINE uint32x4_t unordered(float32x4_t x, float32x4_t y) {
    return vmvnq_u32(vandq_u32(vceqq_f32(x, x), vceqq_f32(y, y)));
}
NANO_INLINE mask16 unordered(f32x16 x, f32x16 y) {
    return {unordered(x.a, y.a), unordered(x.b, y.b), unordered(x.c, y.c), unordered(x.d, y.d)};
}
NANO_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) {
    return {vbslq_f32(m.a, yes.a, no.a), vbslq_f32(m.b, yes.b, no.b), vbslq_f32(m.c, yes.c, no.c), vbslq_f32(m.d, yes.d, no.d)};
}
NANO_INLINE i32x16 select(mask16 m, i32x16 yes, i32x16 no) { return bits(select(m, from_bits(yes), from_bits(no))); }
// Not the instructions of these names, which have other rules for NaN and zeros.
NANO_INLINE float32x4_t max(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
NANO_INLINE float32x4_t min(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
NANO_INLINE f32x16 max(f32x16 x, f32x16 y) { return {max(x.a, y.a), max(x.b, y.b), max(x.c, y.c), max(x.d, y.d)}; }
NANO_INLINE f32x16 min(f32x16 x, f32x16 y) { return {min(x.a, y.a), min(x.b, y.b), min(x.c, y.c), min(x.d, y.d)}; }
NANO_INLINE i32x16 max(i32x16 x, i32x16 y) {
    return {vmaxq_s32(x.a, y.a), vmaxq_s32(x.b, y.b), vmaxq_s32(x.c, y.c), vmaxq_s32(x.d, y.d)};
}

NANO_INLINE float reduce_add(f32x16 x) {
    const float32x4_t four = (x.a + x.c) + (x.b + x.d);
    return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
NANO_INLINE float reduce_max(f32x16 x) {
    const float32x4_t four = max(max(x.a, x.c), max(x.b, x.d)), two = max(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(max(two, vextq_f32(two, two, 1)), 0);
}
NANO_INLINE int32_t reduce_add(i32x16 x) { return vaddvq_s32((x.a + x.c) + (x.b + x.d)); }
NANO_INLINE int32_t reduce_max(i32x16 x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.a, x.c), vmaxq_s32(x.b, x.d))); }

NANO_INLINE u8x64 load_bytes(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}; }
NANO_INLINE u8x64 low_nibbles(u8x64 w) {
    const uint8x16_t mask = vdupq_n_u8(15);
    return {vandq_u8(w.a, mask), vandq_u8(w.b, mask), vandq_u8(w.c, mask), vandq_u8(w.d, mask)};
}
NANO_INLINE u8x64 high_nibbles(u8x64 w) {
    return {vshrq_n_u8(w.a, 4), vshrq_n_u8(w.b, 4), vshrq_n_u8(w.c, 4), vshrq_n_u8(w.d, 4)};
}
template <int SHIFT, int MASK> NANO_INLINE uint8x16_t with_bits(uint8x16_t w, uint8x16_t high) {
    if constexpr (SHIFT > 0) high = vshlq_n_u8(high, SHIFT);
    if constexpr (SHIFT < 0) high = vshrq_n_u8(high, -SHIFT);
    return vorrq_u8(w, vandq_u8(high, vdupq_n_u8(MASK)));
}
template <int SHIFT, int MASK> NANO_INLINE u8x64 with_bits(u8x64 w, u8x64 high) {
    return {with_bits<SHIFT, MASK>(w.a, high.a), with_bits<SHIFT, MASK>(w.b, high.b), with_bits<SHIFT, MASK>(w.c, high.c),
            with_bits<SHIFT, MASK>(w.d, high.d)};
}

}  // namespace nano::NANO_ISA

#include "simd_neon_dots.h"
