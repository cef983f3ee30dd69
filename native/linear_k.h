// Tiles of the formats with super-blocks of 256 columns: q4_k, q5_k and q6_k (layout and order of sums in matrix.h).
#pragma once

#include "tile.h"

namespace nano::NANO_ISA {

// d and dmin of a super-block, and from them what a group of columns is multiplied with.
template <int H, Format F>
struct SuperBlock {
    const uint8_t *scales;  // of the tile's first half
    f32x16 d[H], minus_dmin[H];

    NANO_INLINE SuperBlock(const uint8_t *tail, int half) : scales(tail + half * LANES) {
        for (int h = 0; h < H; h++) {
            const uint16_t *halves = (const uint16_t *)(tail + SCALES_BYTES) + (half + h) * LANES;
            d[h] = load_f16(halves);
            if constexpr (F != Format::q6_k) minus_dmin[h] = zero() - load_f16(halves + BLOCK);
        }
    }
    static NANO_INLINE f32x16 bytes(const uint8_t *p) { return to_f32(load_i8((const int8_t *)p)); }
    NANO_INLINE f32x16 scale(int group, int h) const { return d[h] * bytes(scales + group * BLOCK + h * LANES); }
    NANO_INLINE f32x16 minimum(int group, int h) const {
        return minus_dmin[h] * bytes(scales + SCALES_BYTES / 2 + group * BLOCK + h * LANES);
    }
};

// Columns 4·T … 4·T + 3 and 16 + 4·T … of a step of q5_k. `step_of` points at the tile's first half of the nibbles.
template <int T, int M, int H>
NANO_INLINE void quarter_q5_k(const uint8_t *step_of, const u8x64 (&bits)[H], const ActivationRow *a,
                              Sextets (&acc)[M][H]) {
    u8x64 low[H], high[H];
    for (int h = 0; h < H; h++) {
        const u8x64 both = load_bytes(step_of + h * 256 + T * 64);
        ahead<M>(step_of + h * 256 + T * 64);
        low[h] = with_bits<4 - T, 0x10>(low_nibbles(both), bits[h]);
        high[h] = with_bits<-T, 0x10>(high_nibbles(both), bits[h]);
    }
    for (int m = 0; m < M; m++) {
        const int32_t first = four(a[m].q + 4 * T), second = four(a[m].q + 16 + 4 * T);
        for (int h = 0; h < H; h++) step(acc[m][h], low[h], first, high[h], second);
    }
}

template <int M, int H>
NANO_INLINE void dot_q5_k(const uint8_t *at, int half, const ActivationRow *a, i32x16 (&dots)[M][H]) {
    Sextets acc[M][H];
    u8x64 bits[H];
    for (int h = 0; h < H; h++) {
        bits[h] = load_bytes(at + 512 + (half + h) * 64);
        ahead<M>(at + 512 + (half + h) * 64);
    }
    for (int m = 0; m < M; m++)
        for (int h = 0; h < H; h++) acc[m][h] = begin_sextets(0);
    quarter_q5_k<0>(at + half * 256, bits, a, acc);
    quarter_q5_k<1>(at + half * 256, bits, a, acc);
    quarter_q5_k<2>(at + half * 256, bits, a, acc);
    quarter_q5_k<3>(at + half * 256, bits, a, acc);
    for (int m = 0; m < M; m++)
        for (int h = 0; h < H; h++) dots[m][h] = end_sextets(acc[m][h]);
}

// Columns 16·PART + 4·T … 16·PART + 4·T + 7 of a step of q6_k.
template <int PART, int T, int M, int H>
NANO_INLINE void quarter_q6_k(const uint8_t *step_of, const u8x64 (&bits)[H], const ActivationRow *a,
                              Sextets (&acc)[M][H]) {
    u8x64 one[H], next[H];
    for (int h = 0; h < H; h++) {
        const uint8_t *p = step_of + h * 256 + T * 64;
        one[h] = load_bytes(p);
        next[h] = load_bytes(p + 64);
        if constexpr (PART == 0) ahead<M>(p);
        if constexpr (PART == 0) ahead<M>(p + 64);
        one[h] = with_bits<4 - 2 * T, 0x30>(PART ? high_nibbles(one[h]) : low_nibbles(one[h]), bits[h]);
        next[h] = with_bits<2 - 2 * T, 0x30>(PART ? high_nibbles(next[h]) : low_nibbles(next[h]), bits[h]);
    }
    for (int m = 0; m < M; m++) {
        const int8_t *q = a[m].q + 16 * PART + 4 * T;
        for (int h = 0; h < H; h++) step(acc[m][h], one[h], four(q), next[h], four(q + 4));
    }
}

template <int PART, int M, int H>
NANO_INLINE void dot_q6_k(const uint8_t *at, int half, const ActivationRow *a, i32x16 (&dots)[M][H]) {
    Sextets acc[M][H];
    u8x64 bits[H];
    for (int h = 0; h < H; h++) {
        bits[h] = load_bytes(at + 512 + (half + h) * 128 + PART * 64);
        ahead<M>(at + 512 + (half + h) * 128 + PART * 64);
    }
    for (int m = 0; m < M; m++) {
        const int32_t sum = PART ? a[m].sum - a[m].first : a[m].first;
        for (int h = 0; h < H; h++) acc[m][h] = begin_sextets(-32 * sum);
    }
    quarter_q6_k<PART, 0>(at + half * 256, bits, a, acc);
    quarter_q6_k<PART, 2>(at + half * 256, bits, a, acc);
    for (int m = 0; m < M; m++)
        for (int h = 0; h < H; h++) dots[m][h] = end_sextets(acc[m][h]);
}

template <int M, int H>
NANO_INLINE void add(Tile<M, H> &tile, const i32x16 (&dots)[M][H], int h, f32x16 scale, const ActivationRow *a) {
    for (int m = 0; m < M; m++) tile.sum[m][h] = fma(to_f32(dots[m][h]), scale * set1(a[m].scale), tile.sum[m][h]);
}

template <int M, int H, Format F>
NANO_INLINE void tile_k(const Matrix &w, const uint8_t *block, const Activations &a, const Target &to, int row, int half) {
    const ActivationRow *x = a.at(row), *end = x + w.k / BLOCK * a.panel;
    Tile<M, H> tile;
    for (int m = 0; m < M; m++)
        for (int h = 0; h < H; h++) tile.sum[m][h] = zero();
    while (x < end) {
        const SuperBlock<H, F> super(block + SUPER / BLOCK * step_bytes(F), half);
        for (int s = 0; s < SUPER / BLOCK; s++, x += a.panel, block += step_bytes(F)) {
            i32x16 dots[M][H];
            if constexpr (F == Format::q6_k) {
                dot_q6_k<0>(block, half, x, dots);
                for (int h = 0; h < H; h++) add(tile, dots, h, super.scale(2 * s, h), x);
                dot_q6_k<1>(block, half, x, dots);
                for (int h = 0; h < H; h++) add(tile, dots, h, super.scale(2 * s + 1, h), x);
                continue;
            }
            if constexpr (F == Format::q4_k) dot_nibbles<M, H>(block + half * 256, x, 0, dots);
            if constexpr (F == Format::q5_k) dot_q5_k(block, half, x, dots);
            for (int h = 0; h < H; h++) {
                add(tile, dots, h, super.scale(s, h), x);
                const f32x16 minimum = super.minimum(s, h);
                for (int m = 0; m < M; m++) tile.sum[m][h] = fma(minimum, set1(x[m].shift), tile.sum[m][h]);
            }
        }
        block += tail_bytes(F);
    }
    finish(tile, to, row, half);
}

}  // namespace nano::NANO_ISA
