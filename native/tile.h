// What the tiles of all formats share: M rows × H halves (16 outputs each) of one block.
#pragma once

#include "matrix.h"
#include "simd.h"

namespace nano::NANO_ISA {

template <int M, int H>
struct Tile {
    f32x16 sum[M][H];
};

// Where a tile's results go: `out` at the block's first output, `n` outputs of the block that exist.
struct Target {
    float *out;
    size_t ldo;
    const float *bias;
    bool accumulate;
    int n;
};

template <int M, int H>
NANO_INLINE void finish(const Tile<M, H> &tile, const Target &to, int row, int half) {
    for (int h = 0; h < H; h++) {
        const int at = (half + h) * LANES, n = to.n - at < LANES ? to.n - at : LANES;
        if (n <= 0) return;
        for (int m = 0; m < M; m++) {
            float *out = to.out + (row + m) * to.ldo + at;
            f32x16 value = tile.sum[m][h];
            if (to.bias) value = value + load_n(to.bias + at, n);
            if (to.accumulate) value = load_n(out, n) + value;
            store_n(out, value, n);
        }
    }
}

// Weights that are asked for ahead of their use. Processors do so themselves, but not beyond a page of 4 kB: with one or two rows,
// which wait for memory, it is the next page that has to be asked for (+ 40 % of q4 from memory on an Emerald Rapids); with more,
// which compute too long per line for the hardware to run far enough ahead, lines of this one do.
template <int M>
NANO_INLINE void ahead(const uint8_t *p) {
    __builtin_prefetch(p + (M > 2 ? 1024 : 6144));
}

NANO_INLINE int32_t four(const int8_t *q) {
    int32_t word;
    memcpy(&word, q, 4);
    return word;
}

// 32 columns of q4: the exact sums of M rows; `w` is the half's 256 bytes.
template <int M, int H>
NANO_INLINE void dot_nibbles(const uint8_t *w, const ActivationRow *a, int offset, i32x16 (&dots)[M][H]) {
    Nibbles acc[M][H];
    for (int m = 0; m < M; m++)
        for (int h = 0; h < H; h++) acc[m][h] = begin_nibbles(a[m].sum, offset);
#pragma GCC unroll 4
    for (int t = 0; t < 4; t++) {
        u8x64 low[H], high[H];
        for (int h = 0; h < H; h++) {
            const u8x64 both = load_bytes(w + h * 256 + t * 64);
            ahead<M>(w + h * 256 + t * 64);
            low[h] = low_nibbles(both);
            high[h] = high_nibbles(both);
        }
        for (int m = 0; m < M; m++) {
            const int32_t first_half = four(a[m].q + 4 * t), second_half = four(a[m].q + 16 + 4 * t);
            for (int h = 0; h < H; h++) step(acc[m][h], low[h], first_half);
            for (int h = 0; h < H; h++) step(acc[m][h], high[h], second_half);
        }
    }
    for (int m = 0; m < M; m++)
        for (int h = 0; h < H; h++) dots[m][h] = end_nibbles(acc[m][h], a[m].sum, offset);
}

}  // namespace nano::NANO_ISA
