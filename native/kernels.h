// The kernels of one instruction set as a table of functions. Every table computes the same bits.
#pragma once

#include <cstdint>
#include <vector>

#include "inline.h"
#include "matrix.h"

namespace nano {

enum class Activation { silu, gelu_tanh };

enum class CacheType { f32, f16, bf16, int16, int8 };  // the last two with a scale per token and head

NANO_INLINE int64_t bytes_of(CacheType type) { return type == CacheType::f32 ? 4 : type == CacheType::int8 ? 1 : 2; }
NANO_INLINE bool has_scales(CacheType type) { return type == CacheType::int16 || type == CacheType::int8; }

// Rows of float32; a row begins every `stride` floats (a multiple of 16), so that a full vector may be read at its end.
struct Rows {
    float *data = nullptr;
    int64_t stride = 0;
    NANO_INLINE float *row(int64_t i) const { return data + i * stride; }
};

// Keys and values of one layer in blocks of `block_size` tokens (a power of two >= 16):
//   keys   [block][kv_head][block_size / 16][head_size][16]    a tile of 16 keys lies d by d, so that lanes are keys
//   values [block][kv_head][block_size][head_size]             so that lanes are numbers of a value
// Whole numbers lie in pairs, for products that add two at a time, and have scales:
//   keys   [block][kv_head][block_size / 16][head_size / 2][16][2]   values [block][kv_head][block_size / 2][head_size][2]
//   scales [block][kv_head][block_size]                              of keys and of values
struct CacheView {
    void *keys, *values;
    float *key_scales, *value_scales;
    CacheType type;
    int block_size, kv_heads, head_size;

    NANO_INLINE int64_t key_tile(int64_t block, int head, int slot) const {
        return (((block * kv_heads + head) * block_size + slot) >> 4) * 16 * head_size;
    }
    NANO_INLINE int64_t value(int64_t block, int head, int slot) const {
        return ((block * kv_heads + head) * block_size + slot) * head_size;
    }
    NANO_INLINE int64_t scale(int64_t block, int head, int slot) const { return (block * kv_heads + head) * block_size + slot; }
};

// One step as the kernels see it. Rows of a sequence are consecutive, at consecutive positions.
struct Step {
    int rows, sequences, max_blocks;
    const int32_t *positions;  // (rows,)
    const int32_t *sequence;   // (rows,) to which each row belongs
    const int32_t *starts;     // (sequences + 1,)
    const int32_t *blocks;     // (sequences, max_blocks)
};

struct RotateTask {
    const Step *step;
    Rows rows;
    CacheView cache;
    int heads;
    const float *cosine, *sine;    // (rows, head_size / 2)
    const float *q_norm, *k_norm;  // (head_size,) or null
    float eps;
};

struct AttendTask {
    const Step *step;
    Rows src, dst;
    CacheView cache;
    int heads;
    float scale;  // of scores, times log2 e: probabilities are powers of two
    int window;
    void *partials;  // of attend_splits: (units, splits, attend_partial_bytes), 64-byte aligned
    int splits;      // splits of the longest context
};

struct Kernels {
    const char *name;
    const MatrixKernels *matrix;  // quantisation of rows, linear, embedding

    // dst = src / sqrt(mean(src²) + eps) · weight for rows [begin, end) of `width` numbers.
    void (*normalize)(Rows src, Rows dst, const float *weight, int width, float eps, int64_t begin, int64_t end);

    // dst = activation(src[:size]) · src[size:2·size] for rows [begin, end).
    void (*gate)(Activation activation, Rows src, Rows dst, int size, int64_t begin, int64_t end);

    // Norm and rotation of q and k in place, k and v into the cache, for rows [begin, end).
    void (*rotate)(const RotateTask &task, int64_t begin, int64_t end);

    // Attention over whole contexts: units i with i % threads == thread.
    void (*attend)(const AttendTask &task, int thread, int threads);

    // rotate, then attend, of a step whose sequences have one row each: a thread reads no key of another's of this step, so that
    // nothing stands between the two.
    void (*rotate_and_attend)(const RotateTask &rotate, const AttendTask &task, int thread, int threads);

    // The same bits in two halves with a barrier between them, for few queries over long contexts: each split on its own, then
    // the merge.
    void (*attend_splits)(const AttendTask &task, int thread, int threads);
    void (*attend_merge)(const AttendTask &task, int thread, int threads);

    int attend_tile;               // query rows (row, head of the group) that are one unit
    int attend_split;              // keys in a split
    int64_t attend_partial_bytes;  // of one unit and split
};

// Tables of the instruction sets that were compiled in and that this processor has, widest first.
std::vector<const Kernels *> available_kernels();

// The table by name, or the widest for an empty name; null if it is not available here.
const Kernels *find_kernels(const char *name);

// Units of attention in a step: tiles of query rows, per kv head and sequence.
int64_t attend_units(const Step &step, int heads, int kv_heads, int tile);

}  // namespace nano
