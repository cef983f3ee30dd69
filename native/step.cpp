// One step: checked at the door, then every op over all rows, all threads together.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "session.h"

namespace nano {

struct Session::Current {
    Step step;
    const int32_t *tokens, *wanted;
    int wanted_rows;
    int rows;         // that ops run on: all, or the wanted ones after Select
    const std::vector<int32_t> *firsts;  // those of them at position 0
    int longest = 0;  // context in the step
    std::vector<Copy> *copies;
};

namespace {

void require(bool holds, const char *what) {
    if (!holds) throw std::invalid_argument(what);
}

// How threads share a product: by blocks of outputs, so that each weight is read once, and by rows too where blocks alone would
// leave threads idle.
struct Grid {
    int rows, columns;
};
Grid grid_for(int rows, int64_t blocks, int threads) {
    Grid best{1, threads};
    int64_t least = INT64_MAX;
    for (int r = 1; r <= threads; ++r) {
        if (threads % r != 0) continue;
        const int64_t columns = threads / r, longest = ((rows + r - 1) / r) * ((blocks + columns - 1) / columns);
        if (longest < least) {
            best = {r, int(columns)};
            least = longest;
        }
    }
    return best;
}

}  // namespace

// Whatever the arrays hold, nothing outside the session's memory is touched once this has passed.
void Session::check_step(const StepInput &in) const {
    require(sealed_, "the session is not complete");
    require(in.rows >= 1, "a step has no rows");
    require(in.rows <= shape_.max_rows, "a step has more rows than the session was made for");
    require(in.sequences >= 1 && in.starts[0] == 0 && in.starts[in.sequences] == in.rows,
            "starts must lead from 0 to the number of rows");
    require(in.wanted_rows >= 0 && in.wanted_rows <= in.rows, "more rows are wanted than there are");
    for (int i = 0; i < in.rows; ++i)
        require(in.tokens[i] >= 0 && in.tokens[i] < shape_.vocab, "a token id is outside the vocabulary");
    for (int i = 0; i < in.wanted_rows; ++i) {
        require(in.wanted[i] >= 0 && in.wanted[i] < in.rows, "a wanted row does not exist");
        require(i == 0 || in.wanted[i] > in.wanted[i - 1], "wanted rows must ascend");
    }
    for (int s = 0; s < in.sequences; ++s) {
        const int begin = in.starts[s], end = in.starts[s + 1];
        require(begin < end && end <= in.rows, "starts must ascend");
        const int first = in.positions[begin], count = end - begin;
        require(first >= 0 && int64_t(first) + count <= int64_t(in.max_blocks) * shape_.block_size,
                "a position is outside the block table");
        for (int i = 0; i < count; ++i)
            require(in.positions[begin + i] == first + i, "positions of a sequence must be consecutive");
        const int lowest = window_ > 0 ? std::max(0, first + 1 - window_) : 0;
        for (int b = lowest / shape_.block_size; b <= (first + count - 1) / shape_.block_size; ++b) {
            const int32_t block = in.blocks[int64_t(s) * in.max_blocks + b];
            require(block >= 0 && block < shape_.num_blocks, "a block of the table is outside the pool");
        }
    }
}

// All memory that the step needs exists after this: threads allocate nothing.
void Session::prepare(const StepInput &in, Current &current) {
    firsts_.clear();
    wanted_firsts_.clear();
    for (int row = 0; row < in.rows; ++row)
        if (in.positions[row] == 0) firsts_.push_back(row);
    for (int i = 0; i < in.wanted_rows; ++i)
        if (in.positions[in.wanted[i]] == 0) wanted_firsts_.push_back(i);
    for (int s = 0; s < in.sequences; ++s) {
        for (int row = in.starts[s]; row < in.starts[s + 1]; ++row) sequence_[row] = s;
        current.longest = std::max(current.longest, in.positions[in.starts[s + 1] - 1] + 1);
    }
    current.step = {in.rows, in.sequences, in.max_blocks, in.positions, sequence_.data(), in.starts, in.blocks};
    grow(in.wanted_rows);
    int64_t partials = 0;
    for (const Planned &planned : ops_)
        if (const auto *op = std::get_if<Attend>(&planned.op)) partials = std::max(partials, partial_bytes(*op, current));
    partials_.need(size_t(partials));
    wanted_rows_ = in.wanted_rows;
}

// Attention goes by splits where whole contexts would leave threads idle. 0: it does not.
int64_t Session::partial_bytes(const Attend &op, const Current &current) const {
    const int64_t units = attend_units(current.step, op.heads, op.kv_heads, kernels_.attend_tile);
    if (pool_.size() == 1 || units >= 2 * pool_.size() || current.longest <= kernels_.attend_split) return 0;
    const int64_t splits = (current.longest + kernels_.attend_split - 1) / kernels_.attend_split;
    return units * splits * kernels_.attend_partial_bytes;
}

void Session::run(const StepInput &input, std::vector<Copy> *copies) {
    check_step(input);
    Current current{{}, input.tokens, input.wanted, input.wanted_rows, input.rows, &firsts_, 0, copies};
    prepare(input, current);
    if (copies) copies->resize(ops_.size());
    pool_.run([&](int thread) {
        Current mine = current;
        execute(mine, thread);
    });
}

void Session::execute(Current &current, int thread) {
    for (const Rope &rope : ropes_) turn(rope, current, thread);
    for (size_t i = 0; i < ops_.size(); ++i) {
        const Planned &planned = ops_[i];
        if (planned.barrier_before) pool_.barrier();
        if (std::holds_alternative<Select>(planned.op) && current.wanted_rows == 0 && !current.copies) return;
        std::visit([&](const auto &op) { apply(op, current, thread); }, planned.op);
        if (std::holds_alternative<Select>(planned.op)) {
            current.rows = current.wanted_rows;
            current.firsts = &wanted_firsts_;
        }
        if (current.copies) {
            pool_.barrier();
            if (thread == 0) copy_out(planned, current.rows, (*current.copies)[i]);
            pool_.barrier();
        }
    }
}

void Session::copy_out(const Planned &planned, int rows, Copy &copy) const {
    copy.rows = rows;
    copy.width = planned.width;
    copy.values.resize(size_t(rows) * planned.width);
    for (int row = 0; row < rows; ++row)
        std::copy_n(buffers_[planned.dst].rows.row(row), planned.width, copy.values.begin() + int64_t(row) * planned.width);
}

// Cosine and sine of each row's position: the angle is a float32 product, its cosine and sine are taken in float64 and rounded.
void Session::turn(const Rope &rope, const Current &current, int thread) {
    const int64_t half = int64_t(rope.frequencies.size());
    float *cosine = rope.turns.as<float>(), *sine = cosine + shape_.max_rows * half;
    const Share part = share(current.step.rows, thread, pool_.size());
    for (int64_t row = part.begin; row < part.end; ++row) {
        const float position = float(current.step.positions[row]);
        for (int64_t i = 0; i < half; ++i) {
            const float angle = position * rope.frequencies[i];
            cosine[row * half + i] = float(std::cos(double(angle))) * rope.scale;
            sine[row * half + i] = float(std::sin(double(angle))) * rope.scale;
        }
    }
}

void Session::apply(const Embed &op, const Current &current, int thread) {
    const Share part = share(current.rows, thread, pool_.size());
    const Rows &dst = buffers_[op.dst].rows;
    kernels_.matrix->embed(matrices_[op.weight].matrix, current.tokens, int(part.begin), int(part.end), dst.data,
                           size_t(dst.stride));
}

void Session::apply(const Normalize &op, const Current &current, int thread) {
    const Share part = share(current.rows, thread, pool_.size());
    const Vector &weight = vectors_[op.weight];
    kernels_.normalize(buffers_[op.src].rows, buffers_[op.dst].rows, weight.memory.as<float>(), weight.size, op.eps, part.begin,
                       part.end);
}

void Session::apply(const Linear &op, const Current &current, int thread) {
    const Rows &src = buffers_[op.src].rows, &dst = buffers_[op.dst].rows;
    Activations activations;
    int64_t blocks = 0;
    bool quantized = false;
    for (int w : op.weights) {
        blocks += matrices_[w].matrix.blocks();
        quantized |= matrices_[w].matrix.quantized();
    }
    if (quantized) {
        const int rests = int(current.firsts->size());
        activations = activations_in(activations_.data(), current.rows + rests, matrices_[op.weights[0]].matrix.k);
        const Share part = share(current.rows, thread, pool_.size());
        kernels_.matrix->quantize(src.data, size_t(src.stride), int(part.begin), int(part.end), activations);
        for (int i = 0; i < rests; ++i) {
            const int row = (*current.firsts)[i];
            if (row >= part.begin && row < part.end)
                kernels_.matrix->quantize_rest(src.row(row), row, current.rows + i, activations);
        }
        pool_.barrier();
    }
    const Grid grid = grid_for(current.rows, blocks, pool_.size());
    const Share rows = share(current.rows, thread / grid.columns, grid.rows),
                part = share(blocks, thread % grid.columns, grid.columns);
    if (rows.begin == rows.end) return;
    int64_t base = 0;
    float *out = dst.row(rows.begin);
    for (size_t i = 0; i < op.weights.size(); ++i) {
        const Matrix &w = matrices_[op.weights[i]].matrix;
        const int64_t begin = std::max(part.begin - base, int64_t(0)), end = std::min(part.end - base, int64_t(w.blocks()));
        const float *bias = op.biases[i] < 0 ? nullptr : vectors_[op.biases[i]].memory.as<float>();
        if (begin < end) {
            kernels_.matrix->linear(w, activations.from(int(rows.begin)), src.row(rows.begin), size_t(src.stride),
                                    int(rows.end - rows.begin), out, size_t(dst.stride), int(begin), int(end), bias,
                                    op.accumulate);
            for (size_t f = 0; w.quantized() && f < current.firsts->size(); ++f) {
                const int row = (*current.firsts)[f];
                if (row >= rows.begin && row < rows.end)
                    kernels_.matrix->linear(w, activations.from(current.rows + int(f)), nullptr, 0, 1,
                                            out + (row - rows.begin) * dst.stride, size_t(dst.stride), int(begin), int(end),
                                            nullptr, true);
            }
        }
        base += w.blocks();
        out += w.n;
    }
}

void Session::apply(const Rotate &op, const Current &current, int thread) {
    const Rope &rope = ropes_[op.rope];
    const float *cosine = rope.turns.as<float>();
    const auto vector = [&](int i) { return i < 0 ? nullptr : vectors_[i].memory.as<float>(); };
    const RotateTask task{&current.step,
                          buffers_[op.buffer].rows,
                          caches_[op.cache].view,
                          op.heads,
                          cosine,
                          cosine + shape_.max_rows * int64_t(rope.frequencies.size()),
                          vector(op.q_norm),
                          vector(op.k_norm),
                          op.eps};
    const Share part = share(current.rows, thread, pool_.size());
    kernels_.rotate(task, part.begin, part.end);
}

void Session::apply(const Attend &op, const Current &current, int thread) {
    AttendTask task{&current.step,
                    buffers_[op.src].rows,
                    buffers_[op.dst].rows,
                    caches_[op.cache].view,
                    op.heads,
                    op.scale,
                    op.window,
                    partials_.data(),
                    0};
    if (partial_bytes(op, current) == 0) return kernels_.attend(task, thread, pool_.size());
    task.splits = (current.longest + kernels_.attend_split - 1) / kernels_.attend_split;
    kernels_.attend_splits(task, thread, pool_.size());
    pool_.barrier();
    kernels_.attend_merge(task, thread, pool_.size());
}

void Session::apply(const Gate &op, const Current &current, int thread) {
    const Share part = share(current.rows, thread, pool_.size());
    kernels_.gate(op.activation, buffers_[op.src].rows, buffers_[op.dst].rows, op.size, part.begin, part.end);
}

// Wanted rows ascend, so that a row moves to its place or one before it: in place, one after the other.
void Session::apply(const Select &op, const Current &current, int thread) {
    if (thread != 0) return;
    const Rows &src = buffers_[op.src].rows, &dst = buffers_[op.dst].rows;
    for (int i = 0; i < current.wanted_rows; ++i)
        std::memmove(dst.row(i), src.row(current.wanted[i]), size_t(buffers_[op.src].width) * sizeof(float));
}

}  // namespace nano
