// AVX2 with FMA and F16C: a vector is two registers, lanes 0..7 and 8..15. See simd.h for what each function means.
#pragma once

#include <immintrin.h>

namespace nano::NANO_ISA {

// Rows and halves of a block (16 outputs) that a tile of the linear kernels computes at once, by the count of registers.
constexpr int TILE_ROWS = 4, TILE_HALVES = 1;

struct f32x16 { __m256 a, b; };
struct i32x16 { __m256i a, b; };
struct u8x64 { __m256i a, b; };
struct mask16 { __m256 a, b; };

NANO_INLINE mask16 first(int n) {
    const __m256i count = _mm256_set1_epi32(n), lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane)),
            _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_add_epi32(lane, _mm256_set1_epi32(8))))};
}

NANO_INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
NANO_INLINE i32x16 load(const int32_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
NANO_INLINE void store(float* p, f32x16 v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
NANO_INLINE void store(int32_t* p, i32x16 v) {
    _mm256_storeu_si256((__m256i*)p, v.a);
    _mm256_storeu_si256((__m256i*)(p + 8), v.b);
}
NANO_INLINE f32x16 load_n(const float* p, int n) {
    mask16 m = first(n);
    return {_mm256_maskload_ps(p, _mm256_castps_si256(m.a)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.b))};
}
NANO_INLINE void store_n(float* p, f32x16 v, int n) {
    mask16 m = first(n);
    _mm256_maskstore_ps(p, _mm256_castps_si256(m.a), v.a);
    _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.b), v.b);
}
NANO_INLINE i32x16 load_n(const int32_t* p, int n) {
    f32x16 v = load_n((const float*)p, n);
    return {_mm256_castps_si256(v.a), _mm256_castps_si256(v.b)};
}
NANO_INLINE void store_n(int32_t* p, i32x16 v, int n) {
    store_n((float*)p, f32x16{_mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b)}, n);
}
NANO_INLINE f32x16 set1(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
NANO_INLINE i32x16 set1(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }

NANO_INLINE f32x16 load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
NANO_INLINE void store_f16(uint16_t* p, f32x16 v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
NANO_INLINE i32x16 load_u16(const uint16_t* p) {
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
NANO_INLINE void store_u16(uint16_t* p, i32x16 v) {
    const __m256i low = _mm256_set1_epi32(0xffff);
    __m256i packed = _mm256_packus_epi32(_mm256_and_si256(v.a, low), _mm256_and_si256(v.b, low));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
NANO_INLINE f32x16 load_f16_n(const uint16_t* p, int n) {
    uint16_t whole[16] = {};
    memcpy(whole, p, n * sizeof *p);
    return load_f16(whole);
}
NANO_INLINE void store_f16_n(uint16_t* p, f32x16 v, int n) {
    uint16_t whole[16];
    store_f16(whole, v);
    memcpy(p, whole, n * sizeof *p);
}
NANO_INLINE i32x16 load_u16_n(const uint16_t* p, int n) {
    uint16_t whole[16] = {};
    memcpy(whole, p, n * sizeof *p);
    return load_u16(whole);
}
NANO_INLINE void store_u16_n(uint16_t* p, i32x16 v, int n) {
    uint16_t whole[16];
    store_u16(whole, v);
    memcpy(p, whole, n * sizeof *p);
}

NANO_INLINE f32x16 operator+(f32x16 x, f32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
NANO_INLINE f32x16 operator-(f32x16 x, f32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
NANO_INLINE f32x16 operator*(f32x16 x, f32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
NANO_INLINE f32x16 operator/(f32x16 x, f32x16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
NANO_INLINE f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
NANO_INLINE f32x16 max(f32x16 x, f32x16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
NANO_INLINE f32x16 min(f32x16 x, f32x16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
NANO_INLINE i32x16 max(i32x16 x, i32x16 y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
NANO_INLINE f32x16 sqrt(f32x16 x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }

NANO_INLINE i32x16 operator+(i32x16 x, i32x16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
NANO_INLINE i32x16 operator-(i32x16 x, i32x16 y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
NANO_INLINE i32x16 operator*(i32x16 x, i32x16 y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
NANO_INLINE i32x16 operator&(i32x16 x, i32x16 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
NANO_INLINE i32x16 operator|(i32x16 x, i32x16 y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int N> NANO_INLINE i32x16 shift_left(i32x16 x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> NANO_INLINE i32x16 shift_right(i32x16 x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }

NANO_INLINE i32x16 to_i32(f32x16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
NANO_INLINE f32x16 to_f32(i32x16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
NANO_INLINE i32x16 bits(f32x16 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
NANO_INLINE f32x16 from_bits(i32x16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

NANO_INLINE mask16 less(f32x16 x, f32x16 y) {
    return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
}
NANO_INLINE mask16 unordered(f32x16 x, f32x16 y) {
    return {_mm256_cmp_ps(x.a, y.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, y.b, _CMP_UNORD_Q)};
}
NANO_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) {
    return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
NANO_INLINE i32x16 select(mask16 m, i32x16 yes, i32x16 no) { return bits(select(m, from_bits(yes), from_bits(no))); }

NANO_INLINE float reduce_add(f32x16 x) {
    __m256 b = _mm256_add_ps(x.a, x.b);
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
NANO_INLINE float reduce_max(f32x16 x) {
    __m256 b = _mm256_max_ps(x.a, x.b);
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
NANO_INLINE int32_t reduce_add(i32x16 x) {
    __m256i b = _mm256_add_epi32(x.a, x.b);
    __m128i c = _mm_add_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    c = _mm_add_epi32(c, _mm_shuffle_epi32(c, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
}
NANO_INLINE int32_t reduce_max(i32x16 x) {
    __m256i b = _mm256_max_epi32(x.a, x.b);
    __m128i c = _mm_max_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    c = _mm_max_epi32(c, _mm_shuffle_epi32(c, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
}

NANO_INLINE i32x16 load_i8(const int8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
NANO_INLINE void store_i8(int8_t* p, i32x16 x) {
    const __m256i low = _mm256_set1_epi32(0xff);
    __m256i words = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

NANO_INLINE u8x64 load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
NANO_INLINE u8x64 low_nibbles(u8x64 w) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(w.a, mask), _mm256_and_si256(w.b, mask)};
}
NANO_INLINE u8x64 high_nibbles(u8x64 w) {
    return low_nibbles({_mm256_srli_epi16(w.a, 4), _mm256_srli_epi16(w.b, 4)});
}
template <int SHIFT, int MASK> NANO_INLINE __m256i with_bits(__m256i w, __m256i high) {
    if constexpr (SHIFT > 0) high = _mm256_slli_epi16(high, SHIFT);
    if constexpr (SHIFT < 0) high = _mm256_srli_epi16(high, -SHIFT);
    return _mm256_or_si256(w, _mm256_and_si256(high, _mm256_set1_epi8(MASK)));
}
template <int SHIFT, int MASK> NANO_INLINE u8x64 with_bits(u8x64 w, u8x64 high) {
    return {with_bits<SHIFT, MASK>(w.a, high.a), with_bits<SHIFT, MASK>(w.b, high.b)};
}

// Compilers would compute all products of a group first and add them as a tree, spilling most of them.
NANO_INLINE void keep(__m256i &a, __m256i &b) {
#ifdef __GNUC__
    asm("" : "+x"(a), "+x"(b));
#endif
}

// Eight steps of 2 · 15 · 127 are 30,480, which 16 bits hold: pairs are widened once, at the end.
struct Nibbles { __m256i a, b; };
NANO_INLINE Nibbles begin_nibbles(int32_t, int) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
NANO_INLINE void step(Nibbles& acc, u8x64 w, int32_t activations) {
    const __m256i x = _mm256_set1_epi32(activations);
    acc.a = _mm256_add_epi16(acc.a, _mm256_maddubs_epi16(w.a, x));
    acc.b = _mm256_add_epi16(acc.b, _mm256_maddubs_epi16(w.b, x));
    keep(acc.a, acc.b);
}
NANO_INLINE i32x16 end_nibbles(Nibbles acc, int32_t sum, int offset) {
    const __m256i one = _mm256_set1_epi16(1), start = _mm256_set1_epi32(-offset * sum);
    return {_mm256_add_epi32(_mm256_madd_epi16(acc.a, one), start), _mm256_add_epi32(_mm256_madd_epi16(acc.b, one), start)};
}

// |w| is at most 128, and 2 · 128 · 127 = 32,512 fits 16 bits; the weight's sign goes to the activation.
struct Bytes { __m256i a, b; };
NANO_INLINE Bytes begin_bytes(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
NANO_INLINE __m256i dot_signed(__m256i acc, __m256i w, __m256i x) {
    w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
NANO_INLINE void step(Bytes& acc, u8x64 w, int32_t activations) {
    const __m256i x = _mm256_set1_epi32(activations);
    acc.a = dot_signed(acc.a, w.a, x);
    acc.b = dot_signed(acc.b, w.b, x);
    keep(acc.a, acc.b);
}
NANO_INLINE i32x16 end_bytes(Bytes acc) { return {acc.a, acc.b}; }

struct Pairs { __m256i a, b; };
NANO_INLINE Pairs load_pairs(const int16_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))};
}
NANO_INLINE Pairs load_pairs(const int8_t* p) {
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
NANO_INLINE i32x16 dot(i32x16 acc, Pairs w, int32_t two) {
    const __m256i x = _mm256_set1_epi32(two);
    acc.a = _mm256_add_epi32(acc.a, _mm256_madd_epi16(w.a, x));
    acc.b = _mm256_add_epi32(acc.b, _mm256_madd_epi16(w.b, x));
    keep(acc.a, acc.b);
    return acc;
}

// Two vectors of pairs, each at most 2 · 63 · 127 = 16,002, fit 16 bits together.
struct Sextets { __m256i a, b; };
NANO_INLINE Sextets begin_sextets(int32_t start) { return {_mm256_set1_epi32(start), _mm256_set1_epi32(start)}; }
NANO_INLINE __m256i dot_both(__m256i acc, __m256i w, __m256i x, __m256i next, __m256i y) {
    const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(w, x), _mm256_maddubs_epi16(next, y));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
NANO_INLINE void step(Sextets& acc, u8x64 w, int32_t activations, u8x64 next, int32_t next_activations) {
    const __m256i x = _mm256_set1_epi32(activations), y = _mm256_set1_epi32(next_activations);
    acc.a = dot_both(acc.a, w.a, x, next.a, y);
    acc.b = dot_both(acc.b, w.b, x, next.b, y);
    keep(acc.a, acc.b);
}
NANO_INLINE i32x16 end_sextets(Sextets acc) { return {acc.a, acc.b}; }

}  // namespace nano::NANO_ISA
