// The inner steps of the linear kernels on the first cache alone, to measure a processor's ceiling with.
#pragma once

#include "matrix.h"
#include "simd.h"
#ifdef NANO_ISA_amx
#include "amx.h"
#endif

namespace nano::NANO_ISA {

constexpr int CHAINS = TILE_ROWS * TILE_HALVES;  // as many sums as a tile has

// Zeros that the compiler does not know, too many for registers.
struct Unknown {
    alignas(64) uint8_t bytes[16 * 64];
    NANO_INLINE Unknown() {
        for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = *(volatile const uint8_t *)"";
    }
};

// As a sum of six-bit weights takes them, two vectors at a time.
NANO_INLINE size_t spin_sextets(size_t steps) {
    const Unknown zeros;
    const int32_t a = zeros.bytes[0];
    Sextets acc[CHAINS];
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; c++) acc[c] = begin_sextets(0);
    for (size_t i = 0; i < steps; i++) {
        const uint8_t *w = zeros.bytes + i % 4 * 64;
#pragma GCC unroll 16
        for (int c = 0; c < CHAINS; c++) step(acc[c], load_bytes(w + c * 64), a, load_bytes(w + (c + 4) * 64), a);
    }
    i32x16 all = set1(0);
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; c++) all = all + end_sextets(acc[c]);
    return steps * CHAINS * 128 + reduce_add(all);
}

template <class Begin, class End> NANO_INLINE size_t spin_dots(size_t steps, Begin begin, End end) {
    const Unknown zeros;
    const int32_t a = zeros.bytes[0];
    decltype(begin()) acc[CHAINS];
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; c++) acc[c] = begin();
    for (size_t i = 0; i < steps; i++) {
        const uint8_t *w = zeros.bytes + i % 8 * 64;
#pragma GCC unroll 16
        for (int c = 0; c < CHAINS; c++) step(acc[c], load_bytes(w + c * 64), a);
    }
    i32x16 all = set1(0);
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; c++) all = all + end(acc[c]);
    return steps * CHAINS * 64 + reduce_add(all);
}

NANO_INLINE size_t spin_fma(size_t steps) {
    const Unknown zeros;
    const float a = zeros.bytes[0];
    f32x16 acc[CHAINS];
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; c++) acc[c] = zero();
    for (size_t i = 0; i < steps; i++) {
        const float *w = (const float *)(zeros.bytes + i % 8 * 64);
#pragma GCC unroll 16
        for (int c = 0; c < CHAINS; c++) acc[c] = fma(load(w + c * LANES), set1(a), acc[c]);
    }
    f32x16 all = zero();
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; c++) all = all + acc[c];
    return steps * CHAINS * LANES + (size_t)reduce_add(all);
}

#ifdef NANO_ISA_amx
// Tiles of as many columns as share a scale.
NANO_INLINE size_t spin_tiles(int columns, size_t steps) {
    constexpr int ROWS = 16;
    const Unknown zeros;
    TileShape shape;
    shape.set(ROWS, columns);
    tile_load<4>(zeros.bytes, 64);
    tile_load<6>(zeros.bytes, 64);
    for (size_t i = 0; i < steps; i++) {
        tile_multiply<0, 4, 6>();
        tile_multiply<1, 4, 6>();
        tile_multiply<2, 4, 6>();
        tile_multiply<3, 4, 6>();
    }
    return steps * 4 * ROWS * LANES * columns;
}
#endif

inline size_t spin(Format format, size_t steps) {
#ifdef NANO_ISA_amx
    if (format == Format::q6_k) return spin_tiles(16, steps);
    if (format == Format::q4 || format == Format::q8 || format == Format::q4_k || format == Format::q5_k) return spin_tiles(32, steps);
#endif
    if (format == Format::q4 || format == Format::q4_k)
        return spin_dots(steps, [] { return begin_nibbles(0, 0); }, [](Nibbles acc) { return end_nibbles(acc, 0, 0); });
    if (format == Format::q8) return spin_dots(steps, [] { return begin_bytes(0); }, [](Bytes acc) { return end_bytes(acc); });
    if (format == Format::q5_k || format == Format::q6_k) return spin_sextets(steps);
    return spin_fma(steps);
}

}  // namespace nano::NANO_ISA
