// Any little-endian machine, through the compiler's vectors of 16 bytes. See simd.h for what each function means.
#pragma once

namespace nano::NANO_ISA {

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef float f32x2 __attribute__((vector_size(8)));
typedef double f64x2 __attribute__((vector_size(16)));
typedef int64_t i64x2 __attribute__((vector_size(16)));
typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

// Rows and halves of a block (16 outputs) that a tile of the linear kernels computes at once, by the count of registers.
constexpr int TILE_ROWS = 2, TILE_HALVES = 1;

struct f32x16 { f32x4 v[4]; };
struct i32x16 { i32x4 v[4]; };
struct mask16 { i32x4 v[4]; };
struct u8x64 { i8x16 v[4]; };

template <class To, class From> NANO_INLINE To as(From a) {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, a);
}

// Lanes of two vectors by number, in the words of either compiler.
#if defined(__clang__) || __GNUC__ >= 12
#define NANO_SHUFFLE(mask, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define NANO_SHUFFLE(mask, a, b, ...) __builtin_shuffle(a, b, mask{__VA_ARGS__})
#endif

// Each byte beside itself: what is left to do for a 16-bit lane is a shift.
NANO_INLINE i16x8 double_low(i8x16 a) {
    return as<i16x8>(NANO_SHUFFLE(i8x16, a, a, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7));
}
NANO_INLINE i16x8 double_high(i8x16 a) {
    return as<i16x8>(NANO_SHUFFLE(i8x16, a, a, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15));
}

// One result lane from each lane of one to three vectors.
template <class To, class F, class A> NANO_INLINE To map(F f, A a) {
    To r;
    for (int i = 0; i < 4; i++) r.v[i] = f(a.v[i]);
    return r;
}
template <class To, class F, class A, class B> NANO_INLINE To map(F f, A a, B b) {
    To r;
    for (int i = 0; i < 4; i++) r.v[i] = f(a.v[i], b.v[i]);
    return r;
}
template <class To, class F> NANO_INLINE To each(F f) {
    To r;
    for (int i = 0; i < 16; i++) r.v[i / 4][i % 4] = f(i);
    return r;
}

NANO_INLINE mask16 first(int n) {
    return each<mask16>([=](int i) { return i < n ? -1 : 0; });
}
NANO_INLINE f32x16 load(const float* p) {
    f32x16 r;
    memcpy(&r, p, sizeof r);
    return r;
}
NANO_INLINE i32x16 load(const int32_t* p) {
    i32x16 r;
    memcpy(&r, p, sizeof r);
    return r;
}
NANO_INLINE void store(float* p, f32x16 a) { memcpy(p, &a, sizeof a); }
NANO_INLINE void store(int32_t* p, i32x16 a) { memcpy(p, &a, sizeof a); }
NANO_INLINE f32x16 load_n(const float* p, int n) {
    float whole[16] = {};
    memcpy(whole, p, n * sizeof *p);
    return load(whole);
}
NANO_INLINE i32x16 load_n(const int32_t* p, int n) {
    int32_t whole[16] = {};
    memcpy(whole, p, n * sizeof *p);
    return load(whole);
}
NANO_INLINE void store_n(float* p, f32x16 a, int n) { memcpy(p, &a, n * sizeof *p); }
NANO_INLINE void store_n(int32_t* p, i32x16 a, int n) { memcpy(p, &a, n * sizeof *p); }
NANO_INLINE f32x16 set1(float a) {
    f32x4 v = {a, a, a, a};
    return {{v, v, v, v}};
}
NANO_INLINE i32x16 set1(int32_t a) {
    i32x4 v = {a, a, a, a};
    return {{v, v, v, v}};
}

NANO_INLINE i32x16 load_u16(const uint16_t* p) {
    i32x16 r;
    const i16x8 none = {};
    for (int i = 0; i < 2; i++) {
        i16x8 words;
        memcpy(&words, p + i * 8, sizeof words);
        r.v[2 * i] = as<i32x4>(NANO_SHUFFLE(i16x8, words, none, 0, 8, 1, 9, 2, 10, 3, 11));
        r.v[2 * i + 1] = as<i32x4>(NANO_SHUFFLE(i16x8, words, none, 4, 12, 5, 13, 6, 14, 7, 15));
    }
    return r;
}
NANO_INLINE i32x16 load_u16_n(const uint16_t* p, int n) {
    return each<i32x16>([=](int i) { return i < n ? (int32_t)p[i] : 0; });
}
NANO_INLINE void store_u16_n(uint16_t* p, i32x16 a, int n) {
    for (int i = 0; i < n; i++) p[i] = (uint16_t)a.v[i / 4][i % 4];
}
NANO_INLINE void store_u16(uint16_t* p, i32x16 a) { store_u16_n(p, a, 16); }
NANO_INLINE i32x16 load_i8(const int8_t* p) {
    return each<i32x16>([=](int i) { return (int32_t)p[i]; });
}
NANO_INLINE void store_i8(int8_t* p, i32x16 a) {
    for (int i = 0; i < 16; i++) p[i] = (int8_t)a.v[i / 4][i % 4];
}

NANO_INLINE f32x16 operator+(f32x16 a, f32x16 b) {
    return map<f32x16>([](f32x4 x, f32x4 y) { return x + y; }, a, b);
}
NANO_INLINE f32x16 operator-(f32x16 a, f32x16 b) {
    return map<f32x16>([](f32x4 x, f32x4 y) { return x - y; }, a, b);
}
NANO_INLINE f32x16 operator*(f32x16 a, f32x16 b) {
    return map<f32x16>([](f32x4 x, f32x4 y) { return x * y; }, a, b);
}
NANO_INLINE f32x16 operator/(f32x16 a, f32x16 b) {
    return map<f32x16>([](f32x4 x, f32x4 y) { return x / y; }, a, b);
}
NANO_INLINE i32x16 operator+(i32x16 a, i32x16 b) {
    return map<i32x16>([](i32x4 x, i32x4 y) { return x + y; }, a, b);
}
NANO_INLINE i32x16 operator-(i32x16 a, i32x16 b) {
    return map<i32x16>([](i32x4 x, i32x4 y) { return x - y; }, a, b);
}
NANO_INLINE i32x16 operator*(i32x16 a, i32x16 b) {
    return map<i32x16>([](i32x4 x, i32x4 y) { return x * y; }, a, b);
}
NANO_INLINE i32x16 operator&(i32x16 a, i32x16 b) {
    return map<i32x16>([](i32x4 x, i32x4 y) { return x & y; }, a, b);
}
NANO_INLINE i32x16 operator|(i32x16 a, i32x16 b) {
    return map<i32x16>([](i32x4 x, i32x4 y) { return x | y; }, a, b);
}
template <int N> NANO_INLINE i32x16 shift_left(i32x16 a) {
    return map<i32x16>([](i32x4 x) { return x << N; }, a);
}
template <int N> NANO_INLINE i32x16 shift_right(i32x16 a) {
    typedef uint32_t u32x4 __attribute__((vector_size(16)));
    return map<i32x16>([](i32x4 x) { return as<i32x4>(as<u32x4>(x) >> N); }, a);
}

// One rounding without a fused instruction: the product of two float32 is exact in double, and a double sum rounded to odd
// keeps enough of what it lost for the second rounding to be right (Boldo and Melquiond 2008).
NANO_INLINE f64x2 sum_to_odd(f64x2 product, f64x2 addend) {
    const f64x2 sum = product + addend, part = sum - product;
    const f64x2 lost = (product - (sum - part)) + (addend - part);
    const i64x2 word = as<i64x2>(sum), even = (word & 1) - 1;
    const i64x2 up = as<i64x2>(lost > 0), inexact = up | as<i64x2>(lost < 0);
    const i64x2 shrinks = up ^ as<i64x2>(sum > 0);  // in magnitude, towards what was lost
    return as<f64x2>(word + ((shrinks | 1) & inexact & even));
}
NANO_INLINE f64x2 widen(f32x2 a) { return __builtin_convertvector(a, f64x2); }
NANO_INLINE f32x4 fma4(f32x4 a, f32x4 b, f32x4 c) {
#ifdef __FP_FAST_FMAF
    return f32x4{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
            __builtin_fmaf(a[3], b[3], c[3])};
#else
    // By whole conversions, not lane by lane: GCC 12 then drops the rounding to float between two of these (-O3).
    struct Pair { f32x2 low, high; };
    const Pair x = as<Pair>(a), y = as<Pair>(b), z = as<Pair>(c);
    const auto half = [](f32x2 p, f32x2 q, f32x2 r) __attribute__((always_inline)) {
        return __builtin_convertvector(sum_to_odd(widen(p) * widen(q), widen(r)), f32x2);
    };
    return as<f32x4>(Pair{half(x.low, y.low, z.low), half(x.high, y.high, z.high)});
#endif
}
NANO_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    f32x16 r;
    for (int i = 0; i < 4; i++) r.v[i] = fma4(a.v[i], b.v[i], c.v[i]);
    return r;
}
NANO_INLINE f32x16 sqrt(f32x16 a) {
    return each<f32x16>([=](int i) { return __builtin_sqrtf(a.v[i / 4][i % 4]); });
}

NANO_INLINE i32x4 select4(i32x4 m, i32x4 yes, i32x4 no) { return (yes & m) | (no & ~m); }
NANO_INLINE mask16 less(f32x16 a, f32x16 b) {
    return map<mask16>([](f32x4 x, f32x4 y) { return as<i32x4>(x < y); }, a, b);
}
NANO_INLINE mask16 unordered(f32x16 a, f32x16 b) {
    return map<mask16>([](f32x4 x, f32x4 y) { return as<i32x4>(~((x == x) & (y == y))); }, a, b);
}
NANO_INLINE i32x16 bits(f32x16 a) { return as<i32x16>(a); }
NANO_INLINE f32x16 from_bits(i32x16 a) { return as<f32x16>(a); }
NANO_INLINE i32x16 select(mask16 m, i32x16 yes, i32x16 no) {
    i32x16 r;
    for (int i = 0; i < 4; i++) r.v[i] = select4(m.v[i], yes.v[i], no.v[i]);
    return r;
}
NANO_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) { return from_bits(select(m, bits(yes), bits(no))); }
NANO_INLINE f32x16 max(f32x16 a, f32x16 b) { return select(less(b, a), a, b); }
NANO_INLINE f32x16 min(f32x16 a, f32x16 b) { return select(less(a, b), a, b); }

NANO_INLINE i32x16 max(i32x16 a, i32x16 b) {
    return map<i32x16>([](i32x4 x, i32x4 y) { return select4(x > y, x, y); }, a, b);
}

NANO_INLINE f32x16 to_f32(i32x16 a) {
    return map<f32x16>([](i32x4 x) { return __builtin_convertvector(x, f32x4); }, a);
}
// Adding 1.5 · 2^23 leaves the nearest integer, ties to even, in the low bits; from 2^22 on the conversion is exact or nearly.
NANO_INLINE int32_t to_i32_lane(float a) {
    if (!(a >= -2147483648.0f && a < 2147483648.0f)) return INT32_MIN;
    if (a > -4194304.0f && a < 4194304.0f) return as<int32_t>(a + 12582912.0f) - 0x4b400000;
    return (int32_t)__builtin_rintf(a);
}
NANO_INLINE i32x16 to_i32(f32x16 a) {
    return each<i32x16>([=](int i) { return to_i32_lane(a.v[i / 4][i % 4]); });
}

// Half floats by shifting the fields: the exponent is re-biased by a multiplication, which also makes subnormals right.
NANO_INLINE f32x16 from_f16(i32x16 h) {
    const i32x16 sign = shift_left<16>(h & set1(0x8000)), rest = shift_left<13>(h & set1(0x7fff));
    const f32x16 finite = from_bits(rest) * set1(0x1p112f);
    const mask16 special = map<mask16>([](i32x4 x) { return x > 0x0f7fffff; }, rest);
    const mask16 nan = map<mask16>([](i32x4 x) { return x > 0x0f800000; }, rest);
    const i32x16 beyond = rest | set1(0x70000000) | select(nan, set1(0x00400000), set1(0));
    return from_bits(sign | select(special, beyond, bits(finite)));
}
NANO_INLINE uint16_t f32_to_f16(float f) {
    const uint32_t word = as<uint32_t>(f), sign = word >> 16 & 0x8000, magnitude = word & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x1ff));
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // 65,520 and more round to infinity
    if (magnitude < 0x38800000)  // a subnormal half: adding 0.5 leaves its bits, rounded, at the bottom
        return (uint16_t)(sign | (as<uint32_t>(as<float>(magnitude) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}
NANO_INLINE f32x16 load_f16(const uint16_t* p) { return from_f16(load_u16(p)); }
NANO_INLINE f32x16 load_f16_n(const uint16_t* p, int n) { return from_f16(load_u16_n(p, n)); }
NANO_INLINE void store_f16_n(uint16_t* p, f32x16 a, int n) {
    for (int i = 0; i < n; i++) p[i] = f32_to_f16(a.v[i / 4][i % 4]);
}
NANO_INLINE void store_f16(uint16_t* p, f32x16 a) { store_f16_n(p, a, 16); }

NANO_INLINE float reduce_add(f32x16 a) {
    const f32x4 c = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
    return (c[0] + c[2]) + (c[1] + c[3]);
}
NANO_INLINE int32_t reduce_add(i32x16 a) {
    const i32x4 c = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
    return (c[0] + c[2]) + (c[1] + c[3]);
}
NANO_INLINE float max_lane(float a, float b) { return a > b ? a : b; }
NANO_INLINE float reduce_max(f32x16 a) {
    float c[8];
    for (int i = 0; i < 8; i++) c[i] = max_lane(a.v[i / 4][i % 4], a.v[2 + i / 4][i % 4]);
    for (int half = 4; half; half /= 2)
        for (int i = 0; i < half; i++) c[i] = max_lane(c[i], c[i + half]);
    return c[0];
}
NANO_INLINE int32_t reduce_max(i32x16 a) {
    int32_t most = INT32_MIN;
    for (int i = 0; i < 16; i++) most = a.v[i / 4][i % 4] > most ? a.v[i / 4][i % 4] : most;
    return most;
}

}  // namespace nano::NANO_ISA

#include "simd_generic_dots.h"
