// A loaded model: packed weights, cache, buffers, and the ops that a step runs over them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "matrix.h"
#include "memory.h"
#include "pool.h"
#include "program.h"
#include "sampling.h"

namespace nano {

constexpr int kFew = 4;  // rows that every thread rounds for itself, which takes less than to wait for another

struct SessionShape {
    int threads;
    int max_rows;  // tokens of a step
    int vocab;
    CacheType cache_type;
    int block_size, num_blocks;
};

// One step as it comes from outside: int32 arrays, checked by `run` before anything is read or written through them.
struct StepInput {
    int rows, sequences, max_blocks, wanted_rows;
    const int32_t *tokens;     // (rows,)
    const int32_t *positions;  // (rows,)
    const int32_t *starts;     // (sequences + 1,)
    const int32_t *blocks;     // (sequences, max_blocks), unused entries -1
    const int32_t *wanted;     // (wanted_rows,) ascending
};

// What an op left in its destination: (rows, width).
struct Copy {
    int rows = 0, width = 0;
    std::vector<float> values;
};

// Bytes that were allocated, and of matrices that lie in memory of others.
struct MemoryUse {
    size_t weights, kv, scratch, mapped;
};

// Built by the add_* calls, each of which returns the index that ops refer to, then `seal`. Not for two threads at once.
// Wrong arguments throw std::invalid_argument.
class Session {
public:
    Session(const SessionShape &shape, const Kernels &kernels);

    int add_buffer(int width);
    int add_rope(std::vector<float> frequencies, float scale);
    int add_cache(int kv_heads, int head_size);
    int add_vector(const float *values, int size);
    int add_matrix(const Matrix &shape, const Planes &planes);  // packs a copy
    int add_packed(Matrix matrix);  // whose data is packed already, and stays where it is as long as the session
    void add_op(Op op);
    void seal();

    // Runs all ops; the logits of the wanted rows are in the last op's destination until the next run.
    // copies: null, or gets one entry per op.
    void run(const StepInput &input, std::vector<Copy> *copies);

    // Draws from the logits of the last run; parameters.rows must be its wanted rows. ids: (rows,).
    void draw(Sampling parameters, int32_t *ids);

    // Logits of the last run: rows, of `vocab` numbers each.
    int logits_rows() const { return wanted_rows_; }
    const float *logits(int row) const { return buffers_[logits_].rows.row(row); }

    MemoryUse memory() const;
    void fill_cache(uint8_t byte);  // for tests: what is not written must not matter
    const Kernels &kernels() const { return kernels_; }
    const SessionShape &shape() const { return shape_; }

private:
    struct Buffer {
        int width;
        bool wanted_only;  // written after Select alone: has as many rows as are wanted
        Rows rows;
        Memory memory;
    };
    struct Rope {
        std::vector<float> frequencies;
        float scale;
        Memory turns;  // (2, max_rows, head_size / 2): cosine and sine of the step's rows
    };
    struct Cache {
        CacheView view;
        Memory keys, values, key_scales, value_scales;
        std::array<const Memory *, 4> parts() const { return {&keys, &values, &key_scales, &value_scales}; }
    };
    struct Vector {
        int size;
        Memory memory;
    };
    // An op with what `seal` found out about it.
    struct Planned {
        Op op;
        bool barrier_before;    // it reads what other threads wrote
        int dst, width;         // of what it leaves
        bool absorbed = false;  // the next op does its work, unless its result is asked for
    };
    struct Current;  // the step under way, current.h

    static void check_matrix(const Matrix &shape);
    void check_buffer(int buffer, int width) const;
    void check_vector(int vector, int size, bool optional) const;
    void check_step(const StepInput &input) const;
    void grow(int wanted_rows);
    void prepare(const StepInput &input, Current &current);
    int64_t partial_bytes(const Attend &op, const Current &current) const;
    void absorb();
    void execute(Current &current, int thread);
    void turn(const Rope &rope, const Current &current, int thread);
    RotateTask rotate_task(const Rotate &op, const Current &current) const;
    AttendTask attend_task(const Attend &op, const Current &current) const;
    Activations round_rows(const Linear &op, const Current &current, int thread);
    void add_rests(const Matrix &w, const Activations &activations, const Current &current, Share rows, Rows out, int begin,
                   int end) const;
    bool one_call(size_t i, const Current &current, int thread) const;
    const float *row_of(const Linear &op, int64_t row, float *space) const;
    void copy_out(const Planned &op, int rows, Copy &copy) const;

    void apply(const Embed &op, const Current &current, int thread);
    void apply(const Normalize &op, const Current &current, int thread);
    void apply(const Linear &op, const Current &current, int thread);
    void apply(const Rotate &op, const Current &current, int thread);
    void apply(const Attend &op, const Current &current, int thread);
    void apply(const Gate &op, const Current &current, int thread);
    void apply(const Select &op, const Current &current, int thread);

    SessionShape shape_;
    const Kernels &kernels_;
    std::vector<Buffer> buffers_;
    std::vector<Rope> ropes_;
    std::vector<Cache> caches_;
    std::vector<Vector> vectors_;
    std::vector<Matrix> matrices_;  // in weights_, or packed where others keep them
    Arena weights_;
    size_t mapped_ = 0;
    std::vector<Planned> ops_;
    bool sealed_ = false;
    int logits_ = -1;
    int wanted_rows_ = 0;
    int window_ = 0;  // the widest; 0 where an op sees all keys
    Memory activations_, partials_;
    std::vector<Memory> own_, row_;                // of each thread: activations of a few rows, and one row of float32
    std::vector<int32_t> sequence_;                // (max_rows,)
    std::vector<int32_t> firsts_, wanted_firsts_;  // rows at position 0, among all rows and among the wanted ones
    Sampler sampler_;
    Pool pool_;
};

}  // namespace nano
