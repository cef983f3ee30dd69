// One step: checked at the door, then every op over all rows, all threads together.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "current.h"

namespace nano {

namespace {

void require(bool holds, const char *what) {
    if (!holds) throw std::invalid_argument(what);
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
        if (planned.absorbed && !current.copies) continue;
        if (planned.barrier_before || current.copies) pool_.barrier();
        if (std::holds_alternative<Select>(planned.op) && current.wanted_rows == 0 && !current.copies) return;
        if (one_call(i, current, thread)) {
            ++i;
            continue;
        }
        std::visit([&](const auto &op) { apply(op, current, thread); }, planned.op);
        if (std::holds_alternative<Select>(planned.op)) {
            current.rows = current.wanted_rows;
            current.firsts = &wanted_firsts_;
        }
        if (current.copies) {
            pool_.barrier();
            if (thread == 0) copy_out(planned, current.rows, (*current.copies)[i]);
        }
    }
}

// Rotation and attention of a step of single rows, with nothing between them.
bool Session::one_call(size_t i, const Current &current, int thread) const {
    if (current.step.rows != current.step.sequences || current.copies || i + 1 == ops_.size()) return false;
    const auto *rotate = std::get_if<Rotate>(&ops_[i].op);
    const auto *attend = std::get_if<Attend>(&ops_[i + 1].op);
    if (!rotate || !attend || rotate->cache != attend->cache || rotate->buffer != attend->src) return false;
    if (partial_bytes(*attend, current)) return false;
    kernels_.rotate_and_attend(rotate_task(*rotate, current), attend_task(*attend, current), thread, pool_.size());
    return true;
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
    kernels_.matrix->embed(matrices_[op.weight], current.tokens, int(part.begin), int(part.end), dst.data, size_t(dst.stride));
}

void Session::apply(const Normalize &op, const Current &current, int thread) {
    const Share part = share(current.rows, thread, pool_.size());
    const Vector &weight = vectors_[op.weight];
    kernels_.normalize(buffers_[op.src].rows, buffers_[op.dst].rows, weight.memory.as<float>(), weight.size, op.eps, part.begin,
                       part.end);
}

RotateTask Session::rotate_task(const Rotate &op, const Current &current) const {
    const Rope &rope = ropes_[op.rope];
    const float *cosine = rope.turns.as<float>();
    const auto vector = [&](int i) { return i < 0 ? nullptr : vectors_[i].memory.as<float>(); };
    return {&current.step,
            buffers_[op.buffer].rows,
            caches_[op.cache].view,
            op.heads,
            cosine,
            cosine + shape_.max_rows * int64_t(rope.frequencies.size()),
            vector(op.q_norm),
            vector(op.k_norm),
            op.eps};
}

AttendTask Session::attend_task(const Attend &op, const Current &current) const {
    return {&current.step,
            buffers_[op.src].rows,
            buffers_[op.dst].rows,
            caches_[op.cache].view,
            op.heads,
            op.scale * 1.44269504f,
            op.window,
            partials_.data(),
            (current.longest + kernels_.attend_split - 1) / kernels_.attend_split};
}

void Session::apply(const Rotate &op, const Current &current, int thread) {
    const Share part = share(current.rows, thread, pool_.size());
    kernels_.rotate(rotate_task(op, current), part.begin, part.end);
}

void Session::apply(const Attend &op, const Current &current, int thread) {
    const AttendTask task = attend_task(op, current);
    if (partial_bytes(op, current) == 0) return kernels_.attend(task, thread, pool_.size());
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
