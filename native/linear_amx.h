// Products of many rows on the tile unit of AMX-INT8. A unit's sums (16 rows × 16 outputs × the 32 or 16 columns that share a
// scale) are exact in int32 and become floats as in linear.h, in the same order: the bits are the same, too.
//
// Weights of a block are unpacked to signed bytes, a slab of columns at a time, and meet all rows before the next slab does. While
// the tile unit works on the next units, the vector unit scales what it did before: it is the one that bounds this.
#pragma once

#include <utility>

#include "amx.h"
#include "linear_k.h"
#include "tile.h"

namespace nano::NANO_ISA {

constexpr int SLAB = 768;          // columns: unpacked, they and a panel's share of activations fit the first cache
constexpr int PANELS = 16;         // that meet a slab
constexpr int ROWS = LARGE_PANEL;  // of a tile
static_assert(SLAB % SUPER == 0);

template <Format F> constexpr int UNIT = F == Format::q6_k ? 16 : 32;  // columns that share a scale

// Unpacked weights of a block of 32 outputs, by halves of 16: four columns of an output lie together.
template <Format F, bool MINIMUM>
struct Slab {
    static constexpr int UNITS = SLAB / UNIT<F>;
    alignas(64) int8_t w[2][UNITS][UNIT<F> * LANES];
    alignas(64) float scale[2][UNITS][LANES];
    alignas(64) float minimum[2][MINIMUM ? UNITS : 1][LANES];

    NANO_INLINE void put(int h, int unit, int vector, u8x64 bytes, int offset) {
        store_bytes(w[h][unit] + vector * 64, subtract(bytes, offset));
    }
};

// Columns [begin, end) of a block; begin is a multiple of SLAB.
template <bool MINIMUM>
NANO_INLINE void unpack(Slab<Format::q4, MINIMUM> &slab, const Matrix &w, const uint8_t *block, int begin, int end) {
    const int steps = w.group / BLOCK;
    const size_t group_bytes = steps * 512 + (MINIMUM ? 128 : 64);
    for (int unit = 0; begin + unit * BLOCK < end; unit++) {
        const int at = begin / BLOCK + unit;
        const uint8_t *group = block + at / steps * group_bytes, *p = group + at % steps * 512, *scales = group + steps * 512;
        for (int h = 0; h < 2; h++) {
            for (int t = 0; t < 4; t++) {
                const u8x64 both = load_bytes(p + h * 256 + t * 64);
                slab.put(h, unit, t, low_nibbles(both), MINIMUM ? 0 : 8);
                slab.put(h, unit, 4 + t, high_nibbles(both), MINIMUM ? 0 : 8);
            }
            store(slab.scale[h][unit], load_f16((const uint16_t *)(scales + h * 32)));
            if constexpr (MINIMUM) store(slab.minimum[h][unit], load_f16((const uint16_t *)(scales + 64 + h * 32)));
        }
    }
}

NANO_INLINE void unpack(Slab<Format::q8, false> &slab, const Matrix &, const uint8_t *block, int begin, int end) {
    for (int unit = 0; begin + unit * BLOCK < end; unit++) {
        const uint8_t *p = block + (size_t)(begin / BLOCK + unit) * (1024 + 64);
        for (int h = 0; h < 2; h++) {
            for (int t = 0; t < 8; t++) slab.put(h, unit, t, load_bytes(p + h * 512 + t * 64), 128);
            store(slab.scale[h][unit], load_f16((const uint16_t *)(p + 1024 + h * 32)));
        }
    }
}

// Vector T of each half of a step of columns: its four columns and those sixteen further on.
template <int T, Format F, bool MINIMUM>
NANO_INLINE void unpack_quarter(Slab<F, MINIMUM> &slab, const uint8_t *p, int step, int h) {
    const u8x64 both = load_bytes(p + h * 256 + T * 64);
    u8x64 low = low_nibbles(both), high = high_nibbles(both);
    if constexpr (F == Format::q5_k) {
        const u8x64 bits = load_bytes(p + 512 + h * 64);
        low = with_bits<4 - T, 0x10>(low, bits);
        high = with_bits<-T, 0x10>(high, bits);
    }
    if constexpr (F == Format::q6_k) {
        slab.put(h, 2 * step, T, with_bits<4 - 2 * T, 0x30>(low, load_bytes(p + 512 + h * 128)), 32);
        slab.put(h, 2 * step + 1, T, with_bits<4 - 2 * T, 0x30>(high, load_bytes(p + 512 + h * 128 + 64)), 32);
    } else {
        slab.put(h, step, T, low, 0);
        slab.put(h, step, 4 + T, high, 0);
    }
}

template <Format F, bool MINIMUM>
NANO_INLINE void unpack(Slab<F, MINIMUM> &slab, const Matrix &, const uint8_t *block, int begin, int end) {
    static_assert(has_super_blocks(F));
    constexpr int STEPS = SUPER / BLOCK, SCALES = SUPER / UNIT<F>;
    for (int s = begin / SUPER; s * SUPER < end; s++) {
        const uint8_t *p = block + s * (STEPS * step_bytes(F) + tail_bytes(F));
        const SuperBlock<2, F> super(p + STEPS * step_bytes(F), 0);
        const int first = (s * SUPER - begin) / BLOCK, unit = (s * SUPER - begin) / UNIT<F>;
        for (int h = 0; h < 2; h++) {
            for (int step = 0; step < STEPS; step++) {
                const uint8_t *at = p + step * step_bytes(F);
                unpack_quarter<0>(slab, at, first + step, h);
                unpack_quarter<1>(slab, at, first + step, h);
                unpack_quarter<2>(slab, at, first + step, h);
                unpack_quarter<3>(slab, at, first + step, h);
            }
            for (int i = 0; i < SCALES; i++) {
                store(slab.scale[h][unit + i], super.scale(i, h));
                if constexpr (MINIMUM) store(slab.minimum[h][unit + i], super.minimum(i, h));
            }
        }
    }
}

// A unit takes three rounds: its product begins, its sums are stored, they are scaled. A product takes longer than a round, and
// nothing waits for it: it is stored two rounds after it began.
using Sums = int32_t[ROWS][LANES];

template <int R, Format F, bool MINIMUM>
NANO_INLINE void begin_unit(const Slab<F, MINIMUM> &slab, const ActivationRow *x, int half, int unit, int units) {
    if (unit >= units) return;
    const int column = unit * UNIT<F>;
    tile_zero<R>();
    tile_load<4 + R % 2>(x[column / BLOCK * ROWS].q + column % BLOCK, sizeof(ActivationRow));
    tile_load<6 + R % 2>(slab.w[half][unit], 64);
    tile_multiply<R, 4 + R % 2, 6 + R % 2>();
}

// each(0) … each(M − 1), the numbers constants from the start: compilers keep an array in registers only then.
template <int M, class F>
NANO_INLINE void unrolled(const F &each) {
    [&]<int... m>(std::integer_sequence<int, m...>) __attribute__((always_inline)) {
        (each(std::integral_constant<int, m>()), ...);
    }(std::make_integer_sequence<int, M>());
}

template <int M, Format F, bool MINIMUM>
NANO_INLINE void scale(Tile<M, 1> &tile, const Slab<F, MINIMUM> &slab, const ActivationRow *a, int half, int unit,
                       const Sums &sums) {
    const f32x16 factor = load(slab.scale[half][unit]);
    unrolled<M>([&](auto row) __attribute__((always_inline)) {
        constexpr int m = decltype(row)::value;
        tile.sum[m][0] = fma(to_f32(load(sums[m])), factor * set1(a[m].scale), tile.sum[m][0]);
    });
    if constexpr (MINIMUM) {
        const f32x16 minimum = load(slab.minimum[half][unit]);
        unrolled<M>([&](auto row) __attribute__((always_inline)) {
            constexpr int m = decltype(row)::value;
            tile.sum[m][0] = fma(minimum, set1(a[m].shift), tile.sum[m][0]);
        });
    }
}

template <int R, int M, Format F, bool MINIMUM>
NANO_INLINE void round_of(Tile<M, 1> &tile, const Slab<F, MINIMUM> &slab, const ActivationRow *x, int half, int unit, int units,
                          Sums (&sums)[2]) {
    if (unit >= units) return;
    begin_unit<(R + 3) % 4>(slab, x, half, unit + 3, units);
    if (unit + 1 < units) tile_store<(R + 1) % 4>(sums[(R + 1) % 2], 64);
    scale(tile, slab, x + unit * UNIT<F> / BLOCK * ROWS, half, unit, sums[R % 2]);
}

template <int M, Format F, bool MINIMUM>
NANO_INLINE void add_slab(Tile<M, 1> &tile, const Slab<F, MINIMUM> &slab, const ActivationRow *x, int half, int units) {
    alignas(64) Sums sums[2];
    begin_unit<0>(slab, x, half, 0, units);
    begin_unit<1>(slab, x, half, 1, units);
    begin_unit<2>(slab, x, half, 2, units);
    tile_store<0>(sums[0], 64);
    for (int unit = 0; unit < units; unit += 4) {
        round_of<0>(tile, slab, x, half, unit, units, sums);
        round_of<1>(tile, slab, x, half, unit + 1, units, sums);
        round_of<2>(tile, slab, x, half, unit + 2, units, sums);
        round_of<3>(tile, slab, x, half, unit + 3, units, sums);
    }
}

// What the panels of a block hold between two slabs.
using Kept = float[PANELS][2][ROWS][LANES];

NANO_INLINE void finish_kept(const float (&kept)[ROWS][LANES], const Target &to, int row, int half, int rows) {
    for (int m = 0; m < rows; m++) finish(Tile<1, 1>{{{load(kept[m])}}}, to, row + m, half);
}

template <int M, Format F, bool MINIMUM>
void add_panel(const Slab<F, MINIMUM> &slab, const ActivationRow *x, int units, float (&kept)[2][ROWS][LANES], bool first,
               bool last, const Target &to, int row, int rows) {
    if (last)  // stores wait for lines in turn, those of the tile unit behind them
        for (int m = 0; m < rows; m++)
            for (int half = 0; half < 2; half++) __builtin_prefetch(to.out + (row + m) * to.ldo + half * LANES, 1);
    for (int half = 0; half < 2; half++) {
        Tile<M, 1> tile;
        unrolled<M>([&](auto m) __attribute__((always_inline)) {
            tile.sum[decltype(m)::value][0] = first ? zero() : load(kept[half][decltype(m)::value]);
        });
        add_slab(tile, slab, x, half, units);
        unrolled<M>([&](auto m) __attribute__((always_inline)) {
            store(kept[half][decltype(m)::value], tile.sum[decltype(m)::value][0]);
        });
        if (last) finish_kept(kept[half], to, row, half, rows);
    }
}

// Rows [begin, end) of one block, at most PANELS panels.
template <Format F, bool MINIMUM>
NANO_INLINE void amx_block(TileShape &shape, const Matrix &w, const uint8_t *block, const Activations &a, const Target &to, int begin,
                           int end) {
    Slab<F, MINIMUM> slab;
    Kept kept;
    for (int column = 0; column < w.k; column += SLAB) {
        const int stop = w.k - column < SLAB ? w.k : column + SLAB, units = (stop - column) / UNIT<F>;
        unpack(slab, w, block, column, stop);
        for (int row = begin; row < end; row += ROWS) {
            const int rows = end - row < ROWS ? end - row : ROWS;
            const ActivationRow *x = a.at(row) + column / BLOCK * ROWS;
            const auto add = [&](auto add_of) __attribute__((always_inline)) {
                add_of(slab, x, units, kept[(row - begin) / ROWS], column == 0, stop == w.k, to, row, rows);
            };
            shape.set((rows + 3) / 4 * 4, UNIT<F>);
            if (rows > 12)
                add(add_panel<16, F, MINIMUM>);
            else if (rows > 8)
                add(add_panel<12, F, MINIMUM>);
            else if (rows > 4)
                add(add_panel<8, F, MINIMUM>);
            else
                add(add_panel<4, F, MINIMUM>);
        }
    }
}

// As linear_blocks in linear.h does it; row 0 of `a` begins a panel.
template <Format F, bool MINIMUM>
void amx_blocks(const Matrix &w, const Activations &a, int rows, float *out, size_t ldo, int block_begin, int block_end,
                const float *bias, bool accumulate) {
    const size_t bytes = w.bytes / w.blocks();
    TileShape shape;
    for (int begin = 0; begin < rows; begin += PANELS * ROWS) {
        const int end = rows - begin < PANELS * ROWS ? rows : begin + PANELS * ROWS;
        for (int b = block_begin; b < block_end; b++) {
            const int first = b * BLOCK, left = w.n - first;
            const Target to{out + first, ldo, bias ? bias + first : nullptr, accumulate, left < BLOCK ? left : BLOCK};
            amx_block<F, MINIMUM>(shape, w, w.data + b * bytes, a, to, begin, end);
        }
    }
}

}  // namespace nano::NANO_ISA
