// Canonical planes into the packed layout of matrix.h. Not compiled per instruction set: it moves bytes.
#include "matrix.h"

#include <cstring>

namespace nano {

size_t block_bytes(Format format, int k, int group, bool minimum) {
    const size_t columns = (size_t)k;
    switch (format) {
        case Format::f32: return columns * 128;
        case Format::f16: return columns * 64;
        case Format::bf16: return (columns + 1) / 2 * 128;
        case Format::q8: return columns / 32 * (1024 + 64);
        case Format::q4_k:
        case Format::q5_k:
        case Format::q6_k: return columns / SUPER * (SUPER / BLOCK * step_bytes(format) + tail_bytes(format));
        case Format::q4: return columns / group * ((size_t)group / 32 * 512 + (minimum ? 128 : 64));
    }
    return 0;
}

size_t packed_bytes(Format format, int n, int k, int group, bool minimum) {
    return block_bytes(format, k, group, minimum) * (((size_t)n + BLOCK - 1) / BLOCK);
}

PlaneBytes plane_bytes(const Matrix &shape) {
    const size_t columns = shape.k, group = shape.group;
    switch (shape.format) {
        case Format::f32: return {columns * 4, 0, 0, 0, 0, 0};
        case Format::f16:
        case Format::bf16: return {columns * 2, 0, 0, 0, 0, 0};
        case Format::q8: return {group, 2, 0, 0, 0, 0};
        case Format::q4: return {group / 2, 2, size_t(shape.minimum ? 2 : 0), 0, 0, 0};
        case Format::q4_k: return {SUPER / 2, 2, 2, 0, 8, 8};
        case Format::q5_k: return {SUPER / 2, 2, 2, SUPER / 8, 8, 8};
        case Format::q6_k: return {SUPER / 2, 2, 0, SUPER / 4, 16, 0};
    }
    return {};
}

size_t activations_bytes(int rows, int k) {
    return (size_t)(rows + LARGE_PANEL - 1) / LARGE_PANEL * LARGE_PANEL * (k / BLOCK) * sizeof(ActivationRow);
}

Activations activations_in(void *memory, int k, int panel) { return {(ActivationRow *)memory, k, panel, 0}; }

namespace {

// The half floats of outputs first..first+count−1 in group g; 32 of them, zeros past count.
void pack_halves(const Plane &plane, int first, int count, int g, uint8_t *dst) {
    memset(dst, 0, 64);
    for (int o = 0; o < count; o++) memcpy(dst + o * 2, plane.data + (first + o) * plane.row + g * plane.group, 2);
}

// `vectors` vectors a half, each four bytes per output, for outputs 0..31, each byte xor `flip`; missing outputs are zeros.
void pack_step(const uint8_t *src, ptrdiff_t row, int count, int vectors, uint8_t flip, uint8_t *dst) {
    for (int o = 0; o < BLOCK; o++) {
        uint8_t *out = dst + o / 16 * vectors * 64 + o % 16 * 4;
        for (int t = 0; t < vectors; t++) {
            uint8_t four[4] = {};
            if (o < count) memcpy(four, src + o * row + t * 4, 4);
            for (uint8_t &byte : four) byte ^= flip;
            memcpy(out + t * 64, four, 4);
        }
    }
}

// Byte j of 32 columns holds columns j and j + 16 in file and kernel alike, so nibbles move as whole bytes.
void pack_q4(const Matrix &shape, const Planes &planes, int first, int count, uint8_t *dst) {
    const Plane &quants = planes.values;
    for (int g = 0; g < shape.k / shape.group; g++) {
        const uint8_t *src = quants.data + first * quants.row + g * quants.group;
        for (int s = 0; s < shape.group / 32; s++, dst += 512) pack_step(src + s * 16, quants.row, count, 4, 0, dst);
        pack_halves(planes.scales, first, count, g, dst);
        dst += 64;
        if (shape.minimum) {
            pack_halves(planes.mins, first, count, g, dst);
            dst += 64;
        }
    }
}

void pack_q8(const Matrix &shape, const Planes &planes, int first, int count, uint8_t *dst) {
    const Plane &quants = planes.values;
    for (int g = 0; g < shape.k / 32; g++) {
        pack_step(quants.data + first * quants.row + g * quants.group, quants.row, count, 8, 0x80, dst);  // q + 128
        pack_halves(planes.scales, first, count, g, dst + 1024);
        dst += 1024 + 64;
    }
}

// `groups` bytes of each of outputs first..first+count−1 in super-block g, the 32 outputs of a group together.
void pack_scales(const Plane &plane, int first, int count, int g, int groups, uint8_t *dst) {
    memset(dst, 0, groups * BLOCK);
    for (int o = 0; o < count; o++)
        for (int i = 0; i < groups; i++) dst[i * BLOCK + o] = plane.data[(first + o) * plane.row + g * plane.group + i];
}

void pack_k(const Matrix &shape, const Planes &planes, int first, int count, uint8_t *dst) {
    const Plane &quants = planes.values, &high = planes.high;
    const int vectors = shape.format == Format::q4_k ? 0 : shape.format == Format::q5_k ? 1 : 2;  // of high bits, a half
    const bool minimum = shape.format != Format::q6_k;
    for (int g = 0; g < shape.k / SUPER; g++) {
        const uint8_t *src = quants.data + first * quants.row + g * quants.group;
        const uint8_t *more = vectors ? high.data + first * high.row + g * high.group : nullptr;
        for (int s = 0; s < SUPER / BLOCK; s++, dst += step_bytes(shape.format)) {
            pack_step(src + s * 16, quants.row, count, 4, 0, dst);
            if (vectors) pack_step(more + s * 4 * vectors, high.row, count, vectors, 0, dst + 512);
        }
        pack_scales(planes.sub_scales, first, count, g, minimum ? 8 : 16, dst);
        if (minimum) pack_scales(planes.sub_mins, first, count, g, 8, dst + SCALES_BYTES / 2);
        pack_halves(planes.scales, first, count, g, dst + SCALES_BYTES);
        if (minimum) pack_halves(planes.mins, first, count, g, dst + SCALES_BYTES + 64);
        dst += tail_bytes(shape.format);
    }
}

// A column is 32 values of `size` bytes; bf16's columns lie in pairs, the even one in the upper half of each word.
void pack_float(const Matrix &shape, const Planes &planes, int first, int count, size_t size, bool pairs, uint8_t *dst) {
    for (int o = 0; o < count; o++) {
        const uint8_t *src = planes.values.data + (first + o) * planes.values.row;
        for (size_t k = 0; k < (size_t)shape.k; k++) {
            uint8_t *out = pairs ? dst + k / 2 * 128 + o * 4 + (k % 2 ? 0 : 2) : dst + (k * BLOCK + o) * size;
            memcpy(out, src + k * size, size);
        }
    }
}

}  // namespace

void pack(const Matrix &shape, const Planes &planes, uint8_t *dst, int block_begin, int block_end) {
    const size_t bytes = block_bytes(shape.format, shape.k, shape.group, shape.minimum);
    for (int b = block_begin; b < block_end; b++) {
        uint8_t *block = dst + b * bytes;
        const int first = b * BLOCK, count = shape.n - first < BLOCK ? shape.n - first : BLOCK;
        if (shape.format == Format::q4) {
            pack_q4(shape, planes, first, count, block);
        } else if (shape.format == Format::q8) {
            pack_q8(shape, planes, first, count, block);
        } else if (has_super_blocks(shape.format)) {
            pack_k(shape, planes, first, count, block);
        } else {
            const bool wide = shape.format == Format::f32;
            if (count < BLOCK || shape.k % 2) memset(block, 0, bytes);
            pack_float(shape, planes, first, count, wide ? 4 : 2, shape.format == Format::bf16, block);
        }
    }
}

}  // namespace nano
