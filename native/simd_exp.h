// The exponentials of the CPU kernels.
#pragma once

namespace nano::NANO_ISA {

// e^x within 1 ulp for x >= -126 ln 2, exactly 0 below (a result would be subnormal), exactly 1 at 0; +inf above ln(FLT_MAX),
// NaN for NaN. e^x = 2^n · e^r with n the integer nearest to x / ln 2 and |r| <= ln(2) / 2; ln 2 is taken off in two pieces
// (Cody and Waite), e^r = 1 + r + r² · q(r) with q a minimax polynomial of degree 4 (relative error of e^r 2^-28).
NANO_INLINE f32x16 exp(f32x16 x) {
    const f32x16 lowest = set1(-87.336540f), highest = set1(88.722839f);
    const f32x16 within = min(highest, max(lowest, x));  // a NaN stays one
    const i32x16 n = to_i32(within * set1(0x1.715476p+0f));
    const f32x16 steps = to_f32(n);
    f32x16 r = fma(steps, set1(-0x1.62e4p-1f), within);
    r = fma(steps, set1(-0x1.7f7d1cp-20f), r);
    f32x16 q = fma(set1(0x1.6a1a72p-10f), r, set1(0x1.123fc6p-7f));
    q = fma(q, r, set1(0x1.555916p-5f));
    q = fma(q, r, set1(0x1.55548ap-3f));
    q = fma(q, r, set1(0x1.fffffcp-2f));
    const f32x16 power = fma(q, r * r, r) + set1(1.0f);
    f32x16 result = from_bits(bits(power) + shift_left<23>(n));
    result = select(less(x, lowest), zero(), result);
    return select(less(highest, x), from_bits(set1(0x7f800000)), result);
}

// 2^x for x <= 0, within 1 ulp, exactly 0 below -126, exactly 1 at 0, NaN for NaN: half the work of exp. 2^x = 2^n · 2^r with n the
// integer nearest to x, which leaves r exact; 2^r = 1 + r · q(r), q minimax of degree 5 (relative error 2^-28).
NANO_INLINE f32x16 exp2_down(f32x16 x) {
    const f32x16 lowest = set1(-126.0f), within = max(lowest, x);
    const i32x16 n = to_i32(within);
    const f32x16 r = within - to_f32(n);
    f32x16 q = fma(set1(0x1.41fbccp-13f), r, set1(0x1.5f3e5ap-10f));
    q = fma(q, r, set1(0x1.3b2d4cp-7f));
    q = fma(q, r, set1(0x1.c6aee8p-5f));
    q = fma(q, r, set1(0x1.ebfbdcp-3f));
    q = fma(q, r, set1(0x1.62e43p-1f));
    const f32x16 result = from_bits(bits(fma(q, r, set1(1.0f))) + shift_left<23>(n));
    return select(less(x, lowest), zero(), result);
}

}  // namespace nano::NANO_ISA
