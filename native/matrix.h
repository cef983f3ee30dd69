// Weight matrices packed for the kernels, and what can be done with them.
//
// Packed layout "n32", the same for every instruction set. The n outputs lie in blocks of 32 (the last padded with zeros), one
// block after the other; a block is one forward stream over k, and every part of it is 64-byte aligned:
//   q4    per scale group: group / 32 steps of 512 bytes of nibbles; 32 float16 scales; with a minimum 32 float16 minima.
//         A step is 32 columns: two halves (outputs 0..15, 16..31) × four vectors t of 64 bytes; byte 4·o + j of a vector holds
//         column 4·t + j of output o in its low nibble and column 16 + 4·t + j in its high one.
//   q8    per 32 columns: two halves × eight vectors of 64 bytes, byte 4·o + j = q[o][4·t + j] + 128; 32 float16 scales.
//   q4_k  per 256 columns, a super-block: eight steps of 512 bytes of nibbles as in q4; [8][32 outputs] scales, one byte each,
//         for each step; as many minima; 32 float16 d; 32 float16 dmin.
//   q5_k  as q4_k, and behind each step's nibbles two halves × 64 bytes: byte 4·o + j holds in bit i the fifth bit of column
//         4·i + j of output o.
//   q6_k  per 256 columns eight steps of 512 bytes of nibbles, each followed by two halves × two vectors v of 64 bytes: byte
//         4·o + j holds in bits 2·i and 2·i + 1 those above the nibble of column 16·v + 4·i + j of output o; then
//         [16][32 outputs] int8 scales, for 16 columns each; 32 float16 d.
//   bf16  [(k + 1) / 2][32 outputs] uint32: the even column in the upper half, the odd one in the lower (zero past k).
//   f16   [k][32 outputs] uint16.   f32   [k][32 outputs] float.
// Quantised formats need k to be a multiple of the group, and the group of 32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "inline.h"

namespace nano {

enum class Format { f32, f16, bf16, q8, q4, q4_k, q5_k, q6_k };  // from q8 on quantised

constexpr int BLOCK = 32;  // outputs of a block, columns of a quantised group of activations
constexpr int SUPER = 256;  // columns of a super-block

NANO_INLINE constexpr bool has_super_blocks(Format f) { return f == Format::q4_k || f == Format::q5_k || f == Format::q6_k; }
// Bytes of a super-block's step of 32 columns × 32 outputs, of its scales and minima, and of those and d and dmin.
NANO_INLINE constexpr size_t step_bytes(Format f) { return f == Format::q6_k ? 768 : f == Format::q5_k ? 640 : 512; }
constexpr size_t SCALES_BYTES = 512;
NANO_INLINE constexpr size_t tail_bytes(Format f) { return SCALES_BYTES + (f == Format::q6_k ? 64 : 128); }

struct Matrix {
    Format format = Format::f32;
    int n = 0, k = 0;      // outputs, inputs
    int group = 0;         // columns that share a float16 scale: q8 32, q4 a multiple of 32, q4_k … 256, otherwise 0
    bool minimum = false;  // q4: w = scale · q + min, else scale · (q − 8)
    const uint8_t *data = nullptr;  // 64-byte aligned
    size_t bytes = 0;

    NANO_INLINE int blocks() const { return (n + BLOCK - 1) / BLOCK; }
    NANO_INLINE bool quantized() const { return format >= Format::q8; }
};

// Bytes of one block of 32 outputs, and of a whole packed matrix.
size_t block_bytes(Format format, int k, int group, bool minimum);
size_t packed_bytes(Format format, int n, int k, int group, bool minimum);

// A canonical plane (see formats/__init__.py) where it lies, strides in bytes. `group` leads from one scale group to the next
// inside a row, so that the blocks of a file need no copy; what lies inside a group is contiguous. Formats without groups
// have contiguous rows.
struct Plane {
    const uint8_t *data = nullptr;
    ptrdiff_t row = 0, group = 0;
};

struct Planes {
    Plane values;  // values or quants
    Plane scales, mins;
    Plane high, sub_scales, sub_mins;  // of formats with super-blocks
};

// Bytes of each plane in one scale group (without groups in a row); 0: the format has no such plane.
struct PlaneBytes {
    size_t values, scales, mins, high, sub_scales, sub_mins;
};
PlaneBytes plane_bytes(const Matrix &shape);

// Blocks [block_begin, block_end) of `shape` (whose data is not read) to their places in `dst`, the start of the matrix.
void pack(const Matrix &shape, const Planes &planes, uint8_t *dst, int block_begin, int block_end);

// Rows of float32 rounded to int8 per 32 columns: x ≈ scale · q with scale = max|x| / 127, q = x · (127 / max|x|) to nearest
// even. A group whose largest magnitude is under 2^-119 counts as zero (scale 0). A group with a NaN or an infinity has scale
// NaN and q 0: every output of its row becomes NaN.
struct ActivationRow {  // 32 columns of a row, with all that a product needs of them
    int8_t q[BLOCK];
    float scale;
    int32_t sum;    // Σ q
    float shift;    // scale · Σ q, what a minimum is multiplied with
    int32_t first;  // Σ q of columns 0..15
};
static_assert(sizeof(ActivationRow) == 48);

// Panels of rows: the first 32 columns of all its rows, then the next 32, so that a tile of rows reads one forward stream.
struct Activations {
    ActivationRow *rows = nullptr;  // (panels, k / 32, panel)
    int k = 0;
    int panel = 0;  // rows of one
    int first = 0;  // row 0 of this view

    // The same with `row` as its first.
    NANO_INLINE Activations from(int row) const { return {rows, k, panel, first + row}; }
    // The first columns of a row, of the rows of its panel behind it; the next columns lie `panel` further on.
    NANO_INLINE ActivationRow *at(int row) const {
        return rows + (size_t)((first + row) / panel) * (k / BLOCK) * panel + (first + row) % panel;
    }
};

// Memory for `rows` rows of activations (k a multiple of 32) in panels of any size, and its use; `memory` is 64-byte aligned.
constexpr int PANEL = 4, LARGE_PANEL = 16;
size_t activations_bytes(int rows, int k);
Activations activations_in(void *memory, int k, int panel);

// Functions of simd.h that tests call through `probe`.
enum class Probe {
    add, subtract, multiply, divide, fma, max, min, sqrt, exp, exp2_down, f16, bf16, to_i32, select_less, first, reduce_add, reduce_max
};

// One instruction set's kernels; all give the same bits.
struct MatrixKernels {
    const char *name;

    // Rows of a panel, PANEL or LARGE_PANEL, that `linear` likes best for so many rows.
    int (*panel)(int rows);

    // Rows [row_begin, row_end) of x, whose rows begin every ldx floats, into the same rows of `out`.
    void (*quantize)(const float *x, size_t ldx, int row_begin, int row_end, Activations out);

    // What rounding took from row `row` of out, whose numbers were the k of x, rounded in its turn into row `rest`.
    void (*quantize_rest)(const float *x, int row, int rest, Activations out);

    // out[r][o] for r < rows and the outputs of blocks [block_begin, block_end): out = Σ_k w[o][k] · x[r][k] + bias[o], and with
    // `accumulate` out = out + (Σ + bias). `out` points at output 0 of row 0, rows begin every ldo floats; bias may be null.
    // Quantised formats read `a` (x unused), the others x (a unused). Per output one chain in ascending k, whatever the rows,
    // blocks and threads. f32, f16, bf16: acc = fma(x, w, acc). q8 and q4 per 32 columns: acc = fma(float(Σ q_w · q_x), w_scale ·
    // x_scale, acc), where q4 without a minimum counts q_w from −8; with a minimum then acc = fma(min, x_shift, acc). q4_k and
    // q5_k do the same with w_scale = d · scale and min = (0 − dmin) · minimum; q6_k counts q_w from −32 and does it per 16
    // columns, the same x_scale for both halves of 32. d · scale and dmin · minimum are exact in float32.
    void (*linear)(const Matrix &w, const Activations &a, const float *x, size_t ldx, int rows, float *out, size_t ldo,
                   int block_begin, int block_end, const float *bias, bool accumulate);

    // out[r] = row ids[r] of w as float32, for rows [row_begin, row_end); ids lie in 0..n−1.
    void (*embed)(const Matrix &w, const int32_t *ids, int row_begin, int row_end, float *out, size_t ldo);

    // The inner step of `linear` for a format, without its memory: the ceiling that it is measured against. Returns the
    // number of multiply-adds done in `steps` rounds.
    size_t (*spin)(Format format, size_t steps);

    // op on n numbers of a, b and c (those that it takes), sixteen lanes at a time; results that are no floats as their bits.
    void (*probe)(Probe op, const float *a, const float *b, const float *c, float *out, size_t n);
};

// Defined by matrix.cpp, which is compiled once per instruction set.
namespace generic { extern const MatrixKernels matrix_kernels; }
namespace avx2 { extern const MatrixKernels matrix_kernels; }
namespace avx512 { extern const MatrixKernels matrix_kernels; }
namespace amx { extern const MatrixKernels matrix_kernels; }
namespace neon { extern const MatrixKernels matrix_kernels; }
namespace neon_dotprod { extern const MatrixKernels matrix_kernels; }

}  // namespace nano
