// Rows gathered out of packed matrices, as exactly the float32 that formats/ unpack to.
#pragma once

#include "matrix.h"
#include "simd.h"

namespace nano::NANO_ISA {

NANO_INLINE float load_half(const uint8_t *p) {
    float lanes[LANES];
    store(lanes, load_f16_n((const uint16_t *)p, 1));
    return lanes[0];
}

// Scales have 11 significant bits and quants at most 8, so scale · q is exact and only adding a minimum rounds.
NANO_INLINE void row_q4(const Matrix &w, const uint8_t *block, int o, float *out) {
    for (int k = 0; k < w.k; k += w.group) {
        const uint8_t *scales = block + w.group / BLOCK * 512;
        const float scale = load_half(scales + o * 2), minimum = w.minimum ? load_half(scales + 64 + o * 2) : 0.0f;
        for (int c = 0; c < w.group; c++) {
            const int column = c % 32, t = column % 16 / 4;
            const uint8_t byte = block[c / 32 * 512 + o / 16 * 256 + t * 64 + o % 16 * 4 + column % 4];
            const int q = column < 16 ? byte & 15 : byte >> 4;
            out[k + c] = w.minimum ? scale * (float)q + minimum : scale * (float)(q - 8);
        }
        block = scales + (w.minimum ? 128 : 64);
    }
}

NANO_INLINE void row_q8(const Matrix &w, const uint8_t *block, int o, float *out) {
    for (int k = 0; k < w.k; k += 32, block += 1024 + 64) {
        const float scale = load_half(block + 1024 + o * 2);
        for (int c = 0; c < 32; c++)
            out[k + c] = scale * (float)(block[o / 16 * 512 + c / 4 * 64 + o % 16 * 4 + c % 4] - 128);
    }
}

// d · scale has at most 19 significant bits and q six: only subtracting a minimum rounds.
NANO_INLINE void row_k(const Matrix &w, const uint8_t *block, int o, float *out) {
    const size_t step = step_bytes(w.format);
    for (int k = 0; k < w.k; k += SUPER) {
        const uint8_t *scales = block + SUPER / BLOCK * step, *mins = scales + SCALES_BYTES / 2, *halves = scales + SCALES_BYTES;
        const float d = load_half(halves + o * 2), dmin = w.format == Format::q6_k ? 0.0f : load_half(halves + 64 + o * 2);
        for (int c = 0; c < SUPER; c++) {
            const int column = c % 32, place = o % 16 * 4 + column % 4;
            const uint8_t *at = block + c / 32 * step, *high = at + 512, byte = at[o / 16 * 256 + column % 16 / 4 * 64 + place];
            int q = column < 16 ? byte & 15 : byte >> 4;
            if (w.format == Format::q6_k) {
                q += (high[o / 16 * 128 + column / 16 * 64 + place] >> column % 16 / 4 * 2 & 3) * 16;
                out[k + c] = d * (float)(int8_t)scales[c / 16 * 32 + o] * (float)(q - 32);
                continue;
            }
            if (w.format == Format::q5_k) q += (high[o / 16 * 64 + place] >> column / 4 & 1) * 16;
            out[k + c] = d * (float)scales[c / 32 * 32 + o] * (float)q - dmin * (float)mins[c / 32 * 32 + o];
        }
        block = scales + tail_bytes(w.format);
    }
}

NANO_INLINE void row_float(const Matrix &w, const uint8_t *block, int o, float *out) {
    for (int k = 0; k < w.k; k++) {
        if (w.format == Format::f32) memcpy(out + k, block + (size_t)k * 128 + o * 4, 4);
        if (w.format == Format::f16) out[k] = load_half(block + (size_t)k * 64 + o * 2);
        if (w.format == Format::bf16) {
            uint16_t upper;
            memcpy(&upper, block + (size_t)(k / 2) * 128 + o * 4 + (k % 2 ? 0 : 2), 2);
            out[k] = __builtin_bit_cast(float, (uint32_t)upper << 16);
        }
    }
}

inline void embed(const Matrix &w, const int32_t *ids, int row_begin, int row_end, float *out, size_t ldo) {
    const size_t bytes = w.bytes / w.blocks();
    for (int r = row_begin; r < row_end; r++) {
        const uint8_t *block = w.data + ids[r] / BLOCK * bytes;
        const int o = ids[r] % BLOCK;
        float *row = out + r * ldo;
        if (w.format == Format::q4) row_q4(w, block, o, row);
        else if (w.format == Format::q8) row_q8(w, block, o, row);
        else if (has_super_blocks(w.format)) row_k(w, block, o, row);
        else row_float(w, block, o, row);
    }
}

}  // namespace nano::NANO_ISA
