// out = x · wᵀ on packed matrices (see MatrixKernels::linear in matrix.h for what is computed, in which order).
//
// A tile is M rows × H halves (16 outputs each) of one block. A block meets many rows before the next one is read, so weights
// come from memory once for all of these and stay in the first two caches meanwhile, as the rows do.
#pragma once

#include "linear_k.h"
#include "tile.h"
#ifdef NANO_ISA_amx
#include "linear_amx.h"
#endif

namespace nano::NANO_ISA {

template <int M, int H, bool MINIMUM>
NANO_INLINE void tile_q4(const Matrix &w, const uint8_t *block, const Activations &a, const Target &to, int row, int half) {
    const ActivationRow *x = a.at(row), *end = x + w.k / BLOCK * a.panel;
    const int steps = w.group / BLOCK;
    Tile<M, H> tile;
    for (int m = 0; m < M; m++)
        for (int h = 0; h < H; h++) tile.sum[m][h] = zero();
    while (x < end) {
        const uint8_t *scales = block + steps * 512 + half * 32, *mins = scales + 64;
        for (int s = 0; s < steps; s++, x += a.panel, block += 512) {
            i32x16 dots[M][H];
            dot_nibbles<M, H>(block + half * 256, x, MINIMUM ? 0 : 8, dots);
            for (int h = 0; h < H; h++) {
                const f32x16 scale = load_f16((const uint16_t *)(scales + h * 32));
                for (int m = 0; m < M; m++)
                    tile.sum[m][h] = fma(to_f32(dots[m][h]), scale * set1(x[m].scale), tile.sum[m][h]);
                if constexpr (MINIMUM) {
                    const f32x16 minimum = load_f16((const uint16_t *)(mins + h * 32));
                    for (int m = 0; m < M; m++) tile.sum[m][h] = fma(minimum, set1(x[m].shift), tile.sum[m][h]);
                }
            }
        }
        block += MINIMUM ? 128 : 64;
    }
    finish(tile, to, row, half);
}

template <int M, int H>
NANO_INLINE void tile_q8(const Matrix &w, const uint8_t *block, const Activations &a, const Target &to, int row, int half) {
    const ActivationRow *x = a.at(row), *end = x + w.k / BLOCK * a.panel;
    Tile<M, H> tile;
    for (int m = 0; m < M; m++)
        for (int h = 0; h < H; h++) tile.sum[m][h] = zero();
    for (; x < end; x += a.panel, block += 1024 + 64) {
        Bytes acc[M][H];
        for (int m = 0; m < M; m++)
            for (int h = 0; h < H; h++) acc[m][h] = begin_bytes(x[m].sum);
#pragma GCC unroll 8
        for (int t = 0; t < 8; t++) {
            u8x64 weights[H];
            for (int h = 0; h < H; h++) {
                weights[h] = load_bytes(block + (half + h) * 512 + t * 64);
                ahead<M>(block + (half + h) * 512 + t * 64);
            }
            for (int m = 0; m < M; m++) {
                const int32_t columns = four(x[m].q + 4 * t);
                for (int h = 0; h < H; h++) step(acc[m][h], weights[h], columns);
            }
        }
        for (int h = 0; h < H; h++) {
            const f32x16 scale = load_f16((const uint16_t *)(block + 1024 + (half + h) * 32));
            for (int m = 0; m < M; m++)
                tile.sum[m][h] = fma(to_f32(end_bytes(acc[m][h])), scale * set1(x[m].scale), tile.sum[m][h]);
        }
    }
    finish(tile, to, row, half);
}

// Formats without scales.
template <Format F> struct Columns;
template <> struct Columns<Format::f32> {
    static constexpr size_t BYTES = 128;  // of one column
    static NANO_INLINE f32x16 get(const uint8_t *block, int k, int half) {
        return load((const float *)(block + k * BYTES) + half * LANES);
    }
};
template <> struct Columns<Format::f16> {
    static constexpr size_t BYTES = 64;
    static NANO_INLINE f32x16 get(const uint8_t *block, int k, int half) {
        return load_f16((const uint16_t *)(block + k * BYTES) + half * LANES);
    }
};
template <> struct Columns<Format::bf16> {
    static constexpr size_t BYTES = 64;
    static NANO_INLINE f32x16 get(const uint8_t *block, int k, int half) {
        const i32x16 pair = load((const int32_t *)(block + (k / 2) * 2 * BYTES) + half * LANES);
        return from_bits(k % 2 ? shift_left<16>(pair) : pair & set1(-65536));
    }
};

template <int M, int H, Format F>
NANO_INLINE void tile_float(const Matrix &w, const uint8_t *block, const float *x, size_t ldx, const Target &to, int row,
                            int half) {
    Tile<M, H> tile;
    for (int m = 0; m < M; m++)
        for (int h = 0; h < H; h++) tile.sum[m][h] = zero();
    x += row * ldx;
    const auto column = [&](int k) __attribute__((always_inline)) {
        for (int h = 0; h < H; h++) ahead<M>(block + k * Columns<F>::BYTES + (half + h) * Columns<F>::BYTES / 2);
        f32x16 weights[H];
        for (int h = 0; h < H; h++) weights[h] = Columns<F>::get(block, k, half + h);
        for (int m = 0; m < M; m++)
            for (int h = 0; h < H; h++) tile.sum[m][h] = fma(set1(x[m * ldx + k]), weights[h], tile.sum[m][h]);
    };
    int k = 0;
    for (; k + 2 <= w.k; k += 2) {
        column(k);
        column(k + 1);
    }
    if (k < w.k) column(k);
    finish(tile, to, row, half);
}

// Rows that meet all blocks before the next ones do: as many as the second cache holds beside a block.
NANO_INLINE int rows_at_once(const Matrix &w) {
    const size_t row_bytes = w.quantized() ? (size_t)w.k / BLOCK * sizeof(ActivationRow) : (size_t)w.k * 4;
    const int rows = (int)(400000 / row_bytes) / TILE_ROWS * TILE_ROWS;
    return rows < 16 ? 16 : rows;
}

// Rows [row, end) of one block in tiles of up to TILE_ROWS rows; no tile reaches over the border of a panel.
static_assert(PANEL % TILE_ROWS == 0);
template <class TileOf> NANO_INLINE void over_rows(int row, int end, int first, const TileOf &tile_of) {
    while (row < end) {
        const int most = TILE_ROWS - (first + row) % TILE_ROWS, m = end - row < most ? end - row : most;
        for (int half = 0; half < 2; half += TILE_HALVES) tile_of(m, row, half);
        row += m;
    }
}

template <int M, Format F, bool MINIMUM>
void tile(const Matrix &w, const uint8_t *block, const Activations &a, const float *x, size_t ldx, const Target &to, int row,
          int half) {
    if constexpr (F == Format::q4)
        tile_q4<M, TILE_HALVES, MINIMUM>(w, block, a, to, row, half);
    else if constexpr (F == Format::q8)
        tile_q8<M, TILE_HALVES>(w, block, a, to, row, half);
    else if constexpr (has_super_blocks(F))
        tile_k<M, TILE_HALVES, F>(w, block, a, to, row, half);
    else
        tile_float<M, TILE_HALVES, F>(w, block, x, ldx, to, row, half);
}

// AMX needs that many rows to be faster than the tiles here.
inline int panel_for([[maybe_unused]] int rows) {
#ifdef NANO_ISA_amx
    if (rows >= 2 * LARGE_PANEL) return LARGE_PANEL;
#endif
    return PANEL;
}

template <Format F, bool MINIMUM = false>
void linear_blocks(const Matrix &w, const Activations &a, const float *x, size_t ldx, int rows, float *out, size_t ldo,
                   int block_begin, int block_end, const float *bias, bool accumulate) {
#ifdef NANO_ISA_amx
    if constexpr (F >= Format::q8)
        if (a.panel == LARGE_PANEL && a.first % LARGE_PANEL == 0)
            return amx_blocks<F, MINIMUM || F == Format::q4_k || F == Format::q5_k>(w, a, rows, out, ldo, block_begin, block_end, bias,
                                                                                   accumulate);
#endif
    const size_t bytes = w.bytes / w.blocks();
    const int some = rows_at_once(w);
    for (int begin = 0; begin < rows; begin += some) {
        const int end = begin + some < rows ? begin + some : rows;
        for (int b = block_begin; b < block_end; b++) {
            const int first = b * BLOCK, left = w.n - first;
            const Target to{out + first, ldo, bias ? bias + first : nullptr, accumulate, left < BLOCK ? left : BLOCK};
            const uint8_t *block = w.data + b * bytes;
            over_rows(begin, end, a.first, [&](int m, int row, int half) __attribute__((always_inline)) {
                if (m == 1) tile<1, F, MINIMUM>(w, block, a, x, ldx, to, row, half);
                if (m == 2) tile<2, F, MINIMUM>(w, block, a, x, ldx, to, row, half);
                if constexpr (TILE_ROWS > 2) {
                    if (m == 3) tile<3, F, MINIMUM>(w, block, a, x, ldx, to, row, half);
                    if (m == 4) tile<4, F, MINIMUM>(w, block, a, x, ldx, to, row, half);
                }
            });
        }
    }
}

inline void linear(const Matrix &w, const Activations &a, const float *x, size_t ldx, int rows, float *out, size_t ldo,
                   int block_begin, int block_end, const float *bias, bool accumulate) {
    const auto run = [&](auto blocks) { blocks(w, a, x, ldx, rows, out, ldo, block_begin, block_end, bias, accumulate); };
    switch (w.format) {
        case Format::f32: return run(linear_blocks<Format::f32>);
        case Format::f16: return run(linear_blocks<Format::f16>);
        case Format::bf16: return run(linear_blocks<Format::bf16>);
        case Format::q8: return run(linear_blocks<Format::q8>);
        case Format::q4: return w.minimum ? run(linear_blocks<Format::q4, true>) : run(linear_blocks<Format::q4>);
        case Format::q4_k: return run(linear_blocks<Format::q4_k>);
        case Format::q5_k: return run(linear_blocks<Format::q5_k>);
        case Format::q6_k: return run(linear_blocks<Format::q6_k>);
    }
}

}  // namespace nano::NANO_ISA
