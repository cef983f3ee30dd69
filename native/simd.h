// Sixteen lanes on every instruction set.
//
// A kernel is one source, compiled once per instruction set with NANO_ISA set to its name (generic, avx2, avx512, amx, neon,
// neon_dotprod); all of it lives in namespace nano::NANO_ISA. The rule of this header: EVERY FUNCTION GIVES THE SAME BITS ON
// EVERY INSTRUCTION SET (of a NaN only that it is one). Hence sixteen lanes everywhere, explicit fma, one fixed tree for
// reductions, one exp, and -ffp-contract=off. Subnormal numbers are kept: no thread may set flush-to-zero.
//
// Such a source calls inline functions from outside its namespace only if they are NANO_INLINE, none of the standard library's.
//
//   f32x16 i32x16   lanes; operators + - * (both) and / (f32x16)
//   mask16          a truth value per lane
//   u8x64           64 bytes of packed weights
//
// Each simd_<isa>.h gives (n counts lanes from the first, 0..16; `load_n` fills with zero and reads nothing past n):
//   load store load_n store_n set1              float* or int32_t*, any alignment
//   load_f16 store_f16 load_f16_n store_f16_n   round to nearest even, subnormals kept
//   load_u16 store_u16 load_u16_n store_u16_n   i32x16 zero-extended from, cut to, 16 bits
//   fma(a, b, c) = a · b + c with one rounding; sqrt
//   max(a, b), min(a, b)                        the second operand where either is NaN, and of two zeros; max of i32x16 too
//   to_i32                                      round to nearest even; INT32_MIN for NaN and out of range
//   to_f32 bits from_bits                       convert, and reinterpret
//   shift_left<n> shift_right<n>(logical) operators & |
//   less(a, b) unordered(a, b) first(n) select(mask, yes, no)   comparisons with NaN are false
//   load_i8 store_i8                            i32x16 sign-extended from, cut to, 8 bits
//   reduce_add reduce_max                       lanes i and i+8, then i+4, i+2, i+1
//   load_bytes low_nibbles high_nibbles         u8x64
//   with_bits<shift, mask>(w, high)             w | (high moved left by shift bits, or right by −shift) & mask in each byte; the
//                                               mask has none of the bits that a neighbouring byte would bring
//   Nibbles, Bytes                              exact int32 sums of weight · activation over steps of four columns:
//     begin_*(sum, …), step(acc, u8x64 w, int32 of four int8 activations), end_*(…) -> i32x16
//     lane o gets Σ w[4·o + j] · a[j]; activations lie in −127..127.
//     Nibbles: w in 0..15, at most eight steps, `offset` · sum is subtracted; Bytes: w − 128 is what counts.
//   Pairs                                       sixteen lanes of two int16, read as such or from int8: load_pairs
//     dot(acc, pairs w, two) -> acc + w[2·o] · two's lower int16 + w[2·o + 1] · its upper one; the sum must fit int32
//   Sextets                                     the same for w in 0..63, without a limit and two vectors at a time:
//     begin_sextets(start), step(acc, w, activations, next w, its activations), end_sextets(acc)
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifndef NANO_ISA
#error "compile with -DNANO_ISA=generic, avx2, avx512, amx, neon or neon_dotprod"
#endif

#include "inline.h"

// Chosen by the compiler's own flags, so that a mistaken pair of name and flags still computes the same.
// AArch64 always has NEON: there the name alone asks for the generic set.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#elif defined(__aarch64__) && !defined(NANO_ISA_generic)
#include "simd_neon.h"
#else
#include "simd_generic.h"
#endif

namespace nano::NANO_ISA {

constexpr int LANES = 16;

NANO_INLINE f32x16 zero() { return set1(0.0f); }
NANO_INLINE mask16 is_nan(f32x16 a) { return unordered(a, a); }

// bfloat16 is the upper half of a float32.
NANO_INLINE f32x16 from_bf16(i32x16 a) { return from_bits(shift_left<16>(a)); }
NANO_INLINE i32x16 to_bf16(f32x16 a) {
    i32x16 b = bits(a);
    i32x16 odd = shift_right<16>(b) & set1(1);
    i32x16 rounded = shift_right<16>(b + set1(0x7fff) + odd);
    return select(is_nan(a), shift_right<16>(b) | set1(0x40), rounded);
}
NANO_INLINE f32x16 load_bf16(const uint16_t* p) { return from_bf16(load_u16(p)); }
NANO_INLINE f32x16 load_bf16_n(const uint16_t* p, int n) { return from_bf16(load_u16_n(p, n)); }
NANO_INLINE void store_bf16(uint16_t* p, f32x16 a) { store_u16(p, to_bf16(a)); }
NANO_INLINE void store_bf16_n(uint16_t* p, f32x16 a, int n) { store_u16_n(p, to_bf16(a), n); }

}  // namespace nano::NANO_ISA

#include "simd_exp.h"
