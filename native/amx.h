// The tile unit of AMX-INT8 and what it needs of vectors. Written as assembly because compilers' own functions take the numbers of
// registers as text only, and do not say that they read memory.
#pragma once

#include "simd.h"

namespace nano::NANO_ISA {

template <int T> NANO_INLINE void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> NANO_INLINE void tile_load(const void *p, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T> NANO_INLINE void tile_store(void *p, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
// C += A · B in int32: A holds rows of bytes, B four rows of the product's inner dimension in each of its rows.
template <int C, int A, int B> NANO_INLINE void tile_multiply() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// Registers 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights. Given back at the end: a thread that holds them costs the
// system more to switch.
class TileShape {
public:
    TileShape() = default;
    TileShape(const TileShape &) = delete;
    ~TileShape() {
        if (rows_) asm volatile("tilerelease");
    }
    // `rows` rows of activations, `columns` of them and of weights, 16 outputs.
    NANO_INLINE void set(int rows, int columns) {
        if (rows == rows_ && columns == columns_) return;
        rows_ = rows;
        columns_ = columns;
        alignas(64) Layout layout{};
        layout.palette = 1;
        for (int t = 0; t < 8; t++) {
            layout.rows[t] = (uint8_t)(t < 6 ? rows : columns / 4);
            layout.row_bytes[t] = (uint16_t)(t == 4 || t == 5 ? columns : 64);
        }
        asm volatile("ldtilecfg %0" ::"m"(layout));
    }

private:
    struct Layout {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    static_assert(sizeof(Layout) == 64);
    int rows_ = 0, columns_ = 0;
};

NANO_INLINE u8x64 subtract(u8x64 a, int offset) { return {_mm512_sub_epi8(a.v, _mm512_set1_epi8((char)offset))}; }
NANO_INLINE void store_bytes(int8_t *p, u8x64 a) { _mm512_store_si512(p, a.v); }

}  // namespace nano::NANO_ISA
