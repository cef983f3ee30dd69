// Products of many rows on the tile unit of AMX-INT8. A unit's sums (16 rows × 16 outputs × the 32 or 16 columns that share a
// scale) are exact in int32 and become floats as in linear.h, in the same order: the bits are the same, too.
//
// Weights of a block are unpacked to signed bytes, a slab of columns at a time, and meet all rows before the next slab does. The
// tile unit works on the next units while the vector unit scales what it did before; that is what bounds this. As long as the
// tile unit works, Sapphire and Emerald Rapids multiply vectors on one port instead of two (measured: 64 fma take 64 cycles
// instead of 32 as soon as one tile instruction is among them), and go on adding on both. So whole numbers become floats by an
// addition, and nothing is multiplied that needs not be.
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

// each(0) … each(M − 1), the numbers constants from the start: compilers keep an array in registers only then.
template <int M, class F>
NANO_INLINE void unrolled(const F &each) {
    [&]<int... m>(std::integer_sequence<int, m...>) __attribute__((always_inline)) {
        (each(std::integral_constant<int, m>()), ...);
    }(std::make_integer_sequence<int, M>());
}

// x as floats, exactly; |x| < 2^22. The sum's bits are those of the float 1.5 · 2^23 + x.
NANO_INLINE f32x16 added_to_f32(i32x16 x) {
    constexpr int32_t BITS = 0x4B400000;
    return from_bits(x + set1(BITS)) - from_bits(set1(BITS));
}

using Sums = int32_t[ROWS][LANES];             // of a unit, as the tile unit leaves them
using Kept = float[PANELS][2][ROWS][LANES];    // what the panels of a block hold between two slabs

// A unit of a slab and of a panel. They are worked on in this order: those of a panel's first half, of its second, the next panel's.
template <Format F, bool MINIMUM>
struct Place {
    const Slab<F, MINIMUM> &slab;
    const ActivationRow *panel;  // its first unit
    size_t stride;               // from a panel to the next
    int units, panels;
    int half = 0, unit = 0;

    NANO_INLINE const ActivationRow *activations() const { return panel + unit * UNIT<F> / BLOCK * ROWS; }
    NANO_INLINE const int8_t *columns() const { return activations()->q + unit * UNIT<F> % BLOCK; }
    NANO_INLINE const int8_t *weights() const { return slab.w[half][unit]; }
    // True where a half ends. The last panel follows itself, so that products may begin beyond the end, for nothing.
    NANO_INLINE bool step() {
        if (++unit < units) return false;
        unit = 0;
        if (half && panels > 1) panel += stride, panels--;
        half ^= 1;
        return true;
    }
};

// One slab and some panels.
template <Format F, bool MINIMUM>
struct Panels {
    const Slab<F, MINIMUM> &slab;
    const ActivationRow *x;  // the slab's first column of the first panel
    size_t stride;
    int panels, units;
    float (*kept)[2][ROWS][LANES];
    bool first, last;        // slabs of the block
    const Target &to;
    int row, rows;           // the first one, and how many there are
};

template <Format F, bool MINIMUM>
__attribute__((noinline)) void finish_half(const Panels<F, MINIMUM> &all, int panel, int half) {
    const int begin = panel * ROWS, left = all.rows - begin < ROWS ? all.rows - begin : ROWS;
    for (int m = 0; m < left; m++)
        finish(Tile<1, 1>{{{load(all.kept[panel][half][m])}}}, all.to, all.row + begin + m, half);
}

template <int R, Format F, bool MINIMUM>
NANO_INLINE void load_columns(const Place<F, MINIMUM> &begun) {
    tile_load<4 + R % 2>(begun.columns(), sizeof(ActivationRow));
}

template <int R, Format F, bool MINIMUM>
NANO_INLINE void multiply(const Place<F, MINIMUM> &begun) {
    tile_load<6 + R % 2>(begun.weights(), 64);
    tile_zero<R>();
    tile_multiply<R, 4 + R % 2, 6 + R % 2>();
}

template <int FROM, int N, bool MINIMUM, int M>
NANO_INLINE void scale(Tile<M, 1> &tile, const Sums &sums, const ActivationRow *a, f32x16 factor, f32x16 minimum) {
    unrolled<N>([&](auto i) __attribute__((always_inline)) {
        constexpr int m = FROM + decltype(i)::value;
        tile.sum[m][0] = fma(added_to_f32(load(sums[m])), factor * set1(a[m].scale), tile.sum[m][0]);
        if constexpr (MINIMUM) tile.sum[m][0] = fma(minimum, set1(a[m].shift), tile.sum[m][0]);
    });
}

// A round begins the product of a unit, stores the sums of an earlier one and scales those of one before that. A product takes longer
// than a round, so that it is stored two rounds later, and read two later again, when the store has left the core's queue. The tile
// unit's instructions are spread over the round. True at the end of a half.
template <int R, int M, Format F, bool MINIMUM>
NANO_INLINE bool round_of(Tile<M, 1> &tile, Place<F, MINIMUM> &begun, Place<F, MINIMUM> &scaled, Sums (&sums)[4]) {
    const ActivationRow *a = scaled.activations();
    const f32x16 factor = load(scaled.slab.scale[scaled.half][scaled.unit]);
    const f32x16 minimum = MINIMUM ? load(scaled.slab.minimum[scaled.half][scaled.unit]) : zero();
    scale<0, M / 4, MINIMUM>(tile, sums[R], a, factor, minimum);
    load_columns<R>(begun);
    scale<M / 4, M / 4, MINIMUM>(tile, sums[R], a, factor, minimum);
    multiply<R>(begun);
    begun.step();
    scale<M / 2, M / 4, MINIMUM>(tile, sums[R], a, factor, minimum);
    tile_store<(R + 2) % 4>(sums[(R + 2) % 4], 64);
    scale<3 * M / 4, M / 4, MINIMUM>(tile, sums[R], a, factor, minimum);
    return scaled.step();
}

template <int M, Format F, bool MINIMUM>
NANO_INLINE void start(Tile<M, 1> &tile, const Panels<F, MINIMUM> &all, int panel, int half) {
    // Stores wait for their lines in turn, those of the tile unit behind them. Rows that are not there may be asked for.
    const float *out = all.last ? all.to.out + (all.row + panel * ROWS) * all.to.ldo + half * LANES : all.kept[panel][half][0];
    const size_t ldo = all.last ? all.to.ldo : LANES;
    unrolled<M>([&](auto m) __attribute__((always_inline)) {
        __builtin_prefetch(out + decltype(m)::value * ldo, 1);
        tile.sum[decltype(m)::value][0] = all.first ? zero() : load(all.kept[panel][half][decltype(m)::value]);
    });
}

template <int M, Format F, bool MINIMUM>
NANO_INLINE void stop(const Tile<M, 1> &tile, const Panels<F, MINIMUM> &all, int panel, int half) {
    const Target &to = all.to;
    const bool whole = to.n == BLOCK && all.rows - panel * ROWS >= M && !to.bias;
    if (all.last && whole) {
        float *out = to.out + (all.row + panel * ROWS) * to.ldo + half * LANES;
        const size_t ldo = to.ldo;
        if (to.accumulate)
            unrolled<M>([&](auto m) __attribute__((always_inline)) {
                constexpr int i = decltype(m)::value;
                store(out + i * ldo, load(out + i * ldo) + tile.sum[i][0]);
            });
        else
            unrolled<M>([&](auto m) __attribute__((always_inline)) {
                store(out + decltype(m)::value * ldo, tile.sum[decltype(m)::value][0]);
            });
        return;
    }
    float (*kept)[LANES] = all.kept[panel][half];
    unrolled<M>([&](auto m) __attribute__((always_inline)) {
        store(kept[decltype(m)::value], tile.sum[decltype(m)::value][0]);
    });
    if (all.last) finish_half(all, panel, half);
}

// Adds a slab's part to the kept sums of M rows of each panel.
template <int M, Format F, bool MINIMUM>
void add_panels(const Panels<F, MINIMUM> &all) {
    alignas(64) Sums sums[4];
    Place<F, MINIMUM> begun{all.slab, all.x, all.stride, all.units, all.panels}, scaled = begun;
    load_columns<0>(begun), multiply<0>(begun), begun.step();
    load_columns<1>(begun), multiply<1>(begun), begun.step();
    load_columns<2>(begun), multiply<2>(begun), begun.step();
    tile_store<0>(sums[0], 64);
    load_columns<3>(begun), multiply<3>(begun), begun.step();
    tile_store<1>(sums[1], 64);
    Tile<M, 1> tile;
    int turn = 0;  // the round that is next
    for (int panel = 0; panel < all.panels; panel++)
        for (int half = 0; half < 2; half++) {
            start(tile, all, panel, half);
            for (bool ends = false; !ends;) {
                switch (turn) {
                case 0:
                    turn = 1;
                    if ((ends = round_of<0>(tile, begun, scaled, sums))) break;
                    [[fallthrough]];
                case 1:
                    turn = 2;
                    if ((ends = round_of<1>(tile, begun, scaled, sums))) break;
                    [[fallthrough]];
                case 2:
                    turn = 3;
                    if ((ends = round_of<2>(tile, begun, scaled, sums))) break;
                    [[fallthrough]];
                case 3:
                    turn = 0;
                    ends = round_of<3>(tile, begun, scaled, sums);
                }
            }
            stop(tile, all, panel, half);
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
        const auto add = [&](auto M, int row, int panels, int rows) __attribute__((always_inline)) {
            constexpr int m = decltype(M)::value;
            const size_t stride = (size_t)(w.k / BLOCK) * ROWS;
            shape.set(m, UNIT<F>);
            add_panels<m>(Panels<F, MINIMUM>{slab, a.at(row) + column / BLOCK * ROWS, stride, panels, units,
                                             kept + (row - begin) / ROWS, column == 0, stop == w.k, to, row, rows});
        };
        const int whole = (end - begin) / ROWS, row = begin + whole * ROWS, left = end - row;
        if (whole) add(std::integral_constant<int, 16>(), begin, whole, whole * ROWS);
        if (left > 12)
            add(std::integral_constant<int, 16>(), row, 1, left);
        else if (left > 8)
            add(std::integral_constant<int, 12>(), row, 1, left);
        else if (left > 4)
            add(std::integral_constant<int, 8>(), row, 1, left);
        else if (left)
            add(std::integral_constant<int, 4>(), row, 1, left);
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
