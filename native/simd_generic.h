// Any machine, through the compiler's four-lane vectors. See simd.h for what each function means.
#pragma once

namespace nano::NANO_ISA {

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

// Rows and halves of a block (16 outputs) that a tile of the linear kernels computes at once, by the count of registers.
constexpr int TILE_ROWS = 2, TILE_HALVES = 1;

struct f32x16 { f32x4 v[4]; };
struct i32x16 { i32x4 v[4]; };
struct mask16 { i32x4 v[4]; };
struct u8x64 { uint8_t v[64]; };

template <class To, class From> NANO_INLINE To as(From a) {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, a);
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
    return each<i32x16>([=](int i) { return (int32_t)p[i]; });
}
NANO_INLINE i32x16 load_u16_n(const uint16_t* p, int n) {
    return each<i32x16>([=](int i) { return i < n ? (int32_t)p[i] : 0; });
}
NANO_INLINE void store_u16_n(uint16_t* p, i32x16 a, int n) {
    for (int i = 0; i < n; i++) p[i] = (uint16_t)a.v[i / 4][i % 4];
}
NANO_INLINE void store_u16(uint16_t* p, i32x16 a) { store_u16_n(p, a, 16); }
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
NANO_INLINE float fma_lane(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
    return __builtin_fmaf(a, b, c);
#else
    const double product = (double)a * b, addend = c, sum = product + addend;
    const double virtual_addend = sum - product;
    const double lost = (product - (sum - virtual_addend)) + (addend - virtual_addend);
    int64_t word = as<int64_t>(sum);
    const int64_t away = (lost > 0) == (sum > 0) ? 1 : -1;
    word += ((lost > 0) | (lost < 0)) & ((word & 1) == 0) ? away : 0;
    return (float)as<double>(word);
#endif
}
NANO_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return each<f32x16>([=](int i) { return fma_lane(a.v[i / 4][i % 4], b.v[i / 4][i % 4], c.v[i / 4][i % 4]); });
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
NANO_INLINE float f16_to_f32(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    if (rest >= 0x0f800000) return as<float>(sign | 0x70000000 | rest | (rest > 0x0f800000 ? 0x00400000 : 0));
    return as<float>(sign | as<uint32_t>(as<float>(rest) * 0x1p112f));
}
NANO_INLINE uint16_t f32_to_f16(float f) {
    const uint32_t word = as<uint32_t>(f), sign = word >> 16 & 0x8000, magnitude = word & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x1ff));
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // 65,520 and more round to infinity
    if (magnitude < 0x38800000)  // a subnormal half: adding 0.5 leaves its bits, rounded, at the bottom
        return (uint16_t)(sign | (as<uint32_t>(as<float>(magnitude) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}
NANO_INLINE f32x16 load_f16(const uint16_t* p) {
    return each<f32x16>([=](int i) { return f16_to_f32(p[i]); });
}
NANO_INLINE f32x16 load_f16_n(const uint16_t* p, int n) {
    return each<f32x16>([=](int i) { return i < n ? f16_to_f32(p[i]) : 0.0f; });
}
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

NANO_INLINE u8x64 load_bytes(const uint8_t* p) {
    u8x64 r;
    memcpy(&r, p, sizeof r);
    return r;
}
NANO_INLINE u8x64 low_nibbles(u8x64 w) {
    for (int i = 0; i < 64; i++) w.v[i] &= 15;
    return w;
}
NANO_INLINE u8x64 high_nibbles(u8x64 w) {
    for (int i = 0; i < 64; i++) w.v[i] >>= 4;
    return w;
}

// acc[o] += Σ (w[4 · o + j] − offset) · a[j]
NANO_INLINE void dot4(int32_t* acc, const u8x64& w, int32_t activations, int offset) {
    int8_t a[4];
    memcpy(a, &activations, 4);
    for (int o = 0; o < 16; o++)
        for (int j = 0; j < 4; j++) acc[o] += (w.v[4 * o + j] - offset) * a[j];
}
struct Nibbles { int32_t v[16]; };
NANO_INLINE Nibbles begin_nibbles(int32_t sum, int offset) {
    Nibbles r;
    for (int i = 0; i < 16; i++) r.v[i] = -offset * sum;
    return r;
}
NANO_INLINE void step(Nibbles& acc, u8x64 w, int32_t activations) { dot4(acc.v, w, activations, 0); }
NANO_INLINE i32x16 end_nibbles(Nibbles acc, int32_t, int) { return load(acc.v); }

struct Bytes { int32_t v[16]; };
NANO_INLINE Bytes begin_bytes(int32_t) { return {}; }
NANO_INLINE void step(Bytes& acc, u8x64 w, int32_t activations) { dot4(acc.v, w, activations, 128); }
NANO_INLINE i32x16 end_bytes(Bytes acc) { return load(acc.v); }

}  // namespace nano::NANO_ISA
