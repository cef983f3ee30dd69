// AVX-512 (F, BW, VL, DQ, VNNI): a vector is one register. See simd.h for what each function means.
#pragma once

// GCC 12 warns of its own undefined operands in this header.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

namespace nano::NANO_ISA {

// Rows and halves of a block (16 outputs) that a tile of the linear kernels computes at once, by the count of registers.
constexpr int TILE_ROWS = 4, TILE_HALVES = 2;

struct f32x16 { __m512 v; };
struct i32x16 { __m512i v; };
struct u8x64 { __m512i v; };
using mask16 = __mmask16;

NANO_INLINE mask16 first(int n) { return (mask16)((1u << n) - 1u); }

NANO_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
NANO_INLINE i32x16 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
NANO_INLINE f32x16 load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
NANO_INLINE i32x16 load_n(const int32_t* p, int n) { return {_mm512_maskz_loadu_epi32(first(n), p)}; }
NANO_INLINE void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
NANO_INLINE void store(int32_t* p, i32x16 a) { _mm512_storeu_si512(p, a.v); }
NANO_INLINE void store_n(float* p, f32x16 a, int n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
NANO_INLINE void store_n(int32_t* p, i32x16 a, int n) { _mm512_mask_storeu_epi32(p, first(n), a.v); }
NANO_INLINE f32x16 set1(float a) { return {_mm512_set1_ps(a)}; }
NANO_INLINE i32x16 set1(int32_t a) { return {_mm512_set1_epi32(a)}; }

NANO_INLINE f32x16 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
NANO_INLINE f32x16 load_f16_n(const uint16_t* p, int n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p))}; }
NANO_INLINE void store_f16(uint16_t* p, f32x16 a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
NANO_INLINE void store_f16_n(uint16_t* p, f32x16 a, int n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
NANO_INLINE i32x16 load_u16(const uint16_t* p) { return {_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))}; }
NANO_INLINE i32x16 load_u16_n(const uint16_t* p, int n) {
    return {_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p))};
}
NANO_INLINE void store_u16(uint16_t* p, i32x16 a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a.v)); }
NANO_INLINE void store_u16_n(uint16_t* p, i32x16 a, int n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(a.v));
}

NANO_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
NANO_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
NANO_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
NANO_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
NANO_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
NANO_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
NANO_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
NANO_INLINE i32x16 max(i32x16 a, i32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
NANO_INLINE f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }

NANO_INLINE i32x16 operator+(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
NANO_INLINE i32x16 operator-(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
NANO_INLINE i32x16 operator*(i32x16 a, i32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
NANO_INLINE i32x16 operator&(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
NANO_INLINE i32x16 operator|(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N> NANO_INLINE i32x16 shift_left(i32x16 a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> NANO_INLINE i32x16 shift_right(i32x16 a) { return {_mm512_srli_epi32(a.v, N)}; }

NANO_INLINE i32x16 to_i32(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
NANO_INLINE f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
NANO_INLINE i32x16 bits(f32x16 a) { return {_mm512_castps_si512(a.v)}; }
NANO_INLINE f32x16 from_bits(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }

NANO_INLINE mask16 less(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
NANO_INLINE mask16 unordered(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q); }
NANO_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) { return {_mm512_mask_blend_ps(m, no.v, yes.v)}; }
NANO_INLINE i32x16 select(mask16 m, i32x16 yes, i32x16 no) { return {_mm512_mask_blend_epi32(m, no.v, yes.v)}; }

NANO_INLINE float reduce_add(f32x16 a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
NANO_INLINE float reduce_max(f32x16 a) {
    __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
NANO_INLINE int32_t reduce_add(i32x16 a) { return _mm512_reduce_add_epi32(a.v); }
NANO_INLINE int32_t reduce_max(i32x16 a) { return _mm512_reduce_max_epi32(a.v); }

NANO_INLINE i32x16 load_i8(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
NANO_INLINE void store_i8(int8_t* p, i32x16 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }

NANO_INLINE u8x64 load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
NANO_INLINE u8x64 low_nibbles(u8x64 w) { return {_mm512_and_si512(w.v, _mm512_set1_epi8(15))}; }
NANO_INLINE u8x64 high_nibbles(u8x64 w) { return {_mm512_and_si512(_mm512_srli_epi16(w.v, 4), _mm512_set1_epi8(15))}; }
template <int SHIFT, int MASK> NANO_INLINE u8x64 with_bits(u8x64 w, u8x64 high) {
    __m512i moved = high.v;
    if constexpr (SHIFT > 0) moved = _mm512_slli_epi16(moved, SHIFT);
    if constexpr (SHIFT < 0) moved = _mm512_srli_epi16(moved, -SHIFT);
    return {_mm512_ternarylogic_epi32(w.v, moved, _mm512_set1_epi8(MASK), 0xf8)};
}

struct Nibbles { __m512i v; };
NANO_INLINE Nibbles begin_nibbles(int32_t sum, int offset) { return {_mm512_set1_epi32(-offset * sum)}; }
NANO_INLINE void step(Nibbles& acc, u8x64 w, int32_t a) { acc.v = _mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(a)); }
NANO_INLINE i32x16 end_nibbles(Nibbles acc, int32_t, int) { return {acc.v}; }

struct Bytes { __m512i v; };
NANO_INLINE Bytes begin_bytes(int32_t sum) { return {_mm512_set1_epi32(-128 * sum)}; }
NANO_INLINE void step(Bytes& acc, u8x64 w, int32_t a) { acc.v = _mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(a)); }
NANO_INLINE i32x16 end_bytes(Bytes acc) { return {acc.v}; }

struct Pairs { __m512i v; };
NANO_INLINE Pairs load_pairs(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
NANO_INLINE Pairs load_pairs(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
NANO_INLINE i32x16 dot(i32x16 acc, Pairs w, int32_t two) {
    acc.v = _mm512_dpwssd_epi32(acc.v, w.v, _mm512_set1_epi32(two));
#ifdef __GNUC__
    asm("" : "+v"(acc.v));  // in this order: compilers would load every factor of a tile first, and spill the sums for them
#endif
    return acc;
}

struct Sextets { __m512i v; };
NANO_INLINE Sextets begin_sextets(int32_t start) { return {_mm512_set1_epi32(start)}; }
NANO_INLINE void step(Sextets& acc, u8x64 w, int32_t a, u8x64 next, int32_t b) {
    acc.v = _mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(a));
    acc.v = _mm512_dpbusd_epi32(acc.v, next.v, _mm512_set1_epi32(b));
}
NANO_INLINE i32x16 end_sextets(Sextets acc) { return {acc.v}; }

}  // namespace nano::NANO_ISA
