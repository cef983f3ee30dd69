// Building a session: its parts, and what must hold of the ops before any of them runs.
#include "session.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace nano {
namespace {

constexpr int kMaxHeadSize = 256;

void require(bool holds, const std::string &what) {
    if (!holds) throw std::invalid_argument(what);
}

int64_t stride_of(int width) { return (int64_t(width) + 15) / 16 * 16; }

Rows rows_in(const Memory &memory, int width) { return {memory.as<float>(), stride_of(width)}; }

// A full vector may be read at the last number of the last row.
size_t rows_bytes(int64_t rows, int width) { return size_t(rows * stride_of(width) + 16) * sizeof(float); }

bool reads(const Op &op, int buffer) {
    return std::visit(
        [&](const auto &it) {
            using T = std::decay_t<decltype(it)>;
            if constexpr (std::is_same_v<T, Embed>)
                return false;
            else if constexpr (std::is_same_v<T, Rotate>)
                return it.buffer == buffer;
            else if constexpr (std::is_same_v<T, Linear>)
                return it.src == buffer || (it.accumulate && it.dst == buffer);
            else
                return it.src == buffer;
        },
        op);
}

}  // namespace

Session::Session(const SessionShape &shape, const Kernels &kernels) : shape_(shape), kernels_(kernels), pool_(shape.threads) {
    require(shape.threads >= 1 && shape.max_rows >= 1 && shape.vocab >= 1, "threads, rows and vocabulary must be positive");
    require(shape.num_blocks >= 1, "the cache must have a block");
    require(shape.block_size >= 16 && (shape.block_size & (shape.block_size - 1)) == 0,
            "block_size must be a power of two, 16 or more");
    sequence_.resize(shape.max_rows);
}

int Session::add_buffer(int width) {
    require(width >= 1, "a buffer must have a width");
    buffers_.push_back({width, true, {}, {}});
    return int(buffers_.size()) - 1;
}

int Session::add_rope(std::vector<float> frequencies, float scale) {
    Memory turns(2 * size_t(shape_.max_rows) * frequencies.size() * sizeof(float));
    ropes_.push_back({std::move(frequencies), scale, std::move(turns)});
    return int(ropes_.size()) - 1;
}

int Session::add_cache(int kv_heads, int head_size) {
    require(kv_heads >= 1 && head_size >= 2 && head_size <= kMaxHeadSize && head_size % 2 == 0,
            "head_size must be even and at most " + std::to_string(kMaxHeadSize) + ", not " + std::to_string(head_size));
    // A full vector may be read at the last number of the last value, of pairs two.
    const size_t vectors = size_t(shape_.num_blocks) * shape_.block_size * kv_heads;
    const size_t bytes = (vectors * head_size + 32) * bytes_of(shape_.cache_type);
    const size_t scales = has_scales(shape_.cache_type) ? vectors * sizeof(float) : 0;
    Cache cache{{}, Memory(bytes), Memory(bytes), Memory(scales), Memory(scales)};
    cache.view = {cache.keys.data(), cache.values.data(), cache.key_scales.as<float>(), cache.value_scales.as<float>(),
                  shape_.cache_type, shape_.block_size,   kv_heads, head_size};
    caches_.push_back(std::move(cache));
    return int(caches_.size()) - 1;
}

int Session::add_vector(const float *values, int size) {
    Memory memory(stride_of(size) * sizeof(float));
    std::fill_n(memory.as<float>(), stride_of(size), 0.0f);
    std::copy_n(values, size, memory.as<float>());
    vectors_.push_back({size, std::move(memory)});
    return int(vectors_.size()) - 1;
}

void Session::check_matrix(const Matrix &shape) {
    require(shape.n >= 1 && shape.k >= 1, "a matrix must have rows and columns");
    require(!shape.quantized() || (shape.group >= 32 && shape.group % 32 == 0 && shape.k % shape.group == 0),
            "columns must come in whole groups");
    require(!has_super_blocks(shape.format) || shape.group == SUPER, "super-blocks have 256 columns");
}

int Session::add_packed(Matrix matrix) {
    check_matrix(matrix);
    require(matrix.bytes == packed_bytes(matrix.format, matrix.n, matrix.k, matrix.group, matrix.minimum),
            "a packed matrix does not have the bytes of its shape");
    require(reinterpret_cast<uintptr_t>(matrix.data) % 64 == 0, "a packed matrix must begin at a multiple of 64 bytes");
    matrices_.push_back(matrix);
    mapped_ += matrix.bytes;
    return int(matrices_.size()) - 1;
}

int Session::add_matrix(const Matrix &shape, const Planes &planes) {
    check_matrix(shape);
    const size_t bytes = packed_bytes(shape.format, shape.n, shape.k, shape.group, shape.minimum);
    uint8_t *packed = weights_.take(bytes);
    pool_.run([&](int thread) {
        const Share part = share(shape.blocks(), thread, pool_.size());
        pack(shape, planes, packed, int(part.begin), int(part.end));
    });
    Matrix matrix = shape;
    matrix.data = packed;
    matrix.bytes = bytes;
    matrices_.push_back(matrix);
    return int(matrices_.size()) - 1;
}

void Session::check_buffer(int buffer, int width) const {
    require(buffer >= 0 && buffer < int(buffers_.size()), "an op names a buffer that does not exist");
    require(buffers_[buffer].width >= width, "an op is wider than its buffer");
}

void Session::check_vector(int vector, int size, bool optional) const {
    if (optional && vector == -1) return;
    require(vector >= 0 && vector < int(vectors_.size()), "an op names a vector that does not exist");
    require(vectors_[vector].size == size, "a vector has the wrong size for its op");
}

// Throws unless every index and width of the op fits; appends it with its destination.
void Session::add_op(Op op) {
    require(!sealed_, "the session is complete");
    Planned planned{op, true, 0, 0};
    struct Visitor {
        Session &s;
        Planned &p;

        const Matrix &matrix(int i) const {
            require(i >= 0 && i < int(s.matrices_.size()), "an op names a matrix that does not exist");
            return s.matrices_[i];
        }
        void leaves(int dst, int width) const {
            s.check_buffer(dst, width);
            p.dst = dst;
            p.width = width;
        }
        const CacheView &cache(int i, int kv_heads, int head_size, int heads) const {
            require(i >= 0 && i < int(s.caches_.size()), "an op names a cache that does not exist");
            const CacheView &view = s.caches_[i].view;
            require(view.kv_heads == kv_heads && view.head_size == head_size, "an op and its cache differ in shape");
            require(heads >= kv_heads && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
            return view;
        }
        void operator()(const Embed &op) const {
            require(matrix(op.weight).n >= s.shape_.vocab, "the embedding is smaller than the vocabulary");
            leaves(op.dst, matrix(op.weight).k);
        }
        void operator()(const Normalize &op) const {
            require(op.weight >= 0 && op.weight < int(s.vectors_.size()), "an op names a vector that does not exist");
            const int width = s.vectors_[op.weight].size;
            s.check_buffer(op.src, width);
            leaves(op.dst, width);
        }
        void operator()(const Linear &op) const {
            require(!op.weights.empty() && op.weights.size() == op.biases.size(), "weights and biases differ in number");
            require(op.src != op.dst, "a linear cannot write what it reads");
            int width = 0;
            for (size_t i = 0; i < op.weights.size(); ++i) {
                const Matrix &w = matrix(op.weights[i]);
                require(w.k == matrix(op.weights[0]).k, "weights of one linear differ in inputs");
                s.check_buffer(op.src, w.k);
                s.check_vector(op.biases[i], w.n, true);
                width += w.n;
            }
            leaves(op.dst, width);
        }
        void operator()(const Rotate &op) const {
            cache(op.cache, op.kv_heads, op.head_size, op.heads);
            require(op.rope >= 0 && op.rope < int(s.ropes_.size()), "an op names a rope that does not exist");
            require(int(s.ropes_[op.rope].frequencies.size()) * 2 == op.head_size,
                    "a rope must have half of head_size frequencies");
            s.check_vector(op.q_norm, op.head_size, true);
            s.check_vector(op.k_norm, op.head_size, true);
            leaves(op.buffer, (op.heads + 2 * op.kv_heads) * op.head_size);
        }
        void operator()(const Attend &op) const {
            cache(op.cache, op.kv_heads, op.head_size, op.heads);
            require(op.window >= 0, "a window cannot be negative");
            require(op.src != op.dst, "attention cannot write what it reads");
            s.check_buffer(op.src, op.heads * op.head_size);
            leaves(op.dst, op.heads * op.head_size);
        }
        void operator()(const Gate &op) const {
            require(op.size >= 1 && op.src != op.dst, "a gate must have a size, and cannot write what it reads");
            s.check_buffer(op.src, 2 * op.size);
            leaves(op.dst, op.size);
        }
        void operator()(const Select &op) const {
            s.check_buffer(op.src, 1);
            leaves(op.dst, s.buffers_[op.src].width);
        }
    };
    std::visit(Visitor{*this, planned}, op);
    ops_.push_back(std::move(planned));
}

// A linear over int8 rows makes the rows of the Normalize or Gate before it itself: they are rounded as they come, and are never
// written out. Its buffer is the linear's alone: every op that reads it comes after another that writes it.
void Session::absorb() {
    for (size_t i = 1; i < ops_.size(); ++i) {
        auto *linear = std::get_if<Linear>(&ops_[i].op);
        const Op &before = ops_[i - 1].op;
        const bool makes_rows = std::holds_alternative<Normalize>(before) || std::holds_alternative<Gate>(before);
        const auto quantized = [&](int w) { return matrices_[w].quantized(); };
        if (!linear || !makes_rows || ops_[i - 1].dst != linear->src ||
            !std::all_of(linear->weights.begin(), linear->weights.end(), quantized))
            continue;
        bool read_later = false;
        for (size_t j = i + 1; j < ops_.size() && !read_later && ops_[j].dst != linear->src; ++j)
            read_later = reads(ops_[j].op, linear->src);
        if (read_later) continue;
        linear->prologue = int(i) - 1;
        ops_[i - 1].absorbed = true;
    }
}

// Allocates the buffers, and finds where threads must wait for each other: rows are shared out alike in all ops that go by rows,
// so that these may follow each other without a barrier.
void Session::seal() {
    require(!sealed_ && !ops_.empty(), "a session is completed once, with ops in it");
    absorb();
    bool selected = false, all_keys = false, whole = true;
    int widest = 0;
    for (Planned &planned : ops_) {
        bool by_rows = true;
        if (const auto *op = std::get_if<Linear>(&planned.op)) {
            by_rows = false;
            for (int w : op->weights)
                if (matrices_[w].quantized()) widest = std::max(widest, matrices_[w].k);
        } else if (const auto *op = std::get_if<Attend>(&planned.op)) {
            by_rows = false;
            all_keys |= op->window == 0;
            window_ = std::max(window_, op->window);
        } else if (std::holds_alternative<Select>(planned.op)) {
            require(!selected || std::holds_alternative<Select>((&planned - 1)->op), "rows are selected at one place");
            selected = true;
            by_rows = false;
        }
        // Attention may go with the rotation before it by sequences and heads, not by rows (Session::one_call).
        planned.barrier_before = whole || !by_rows || std::holds_alternative<Rotate>(planned.op);
        if (!planned.absorbed) whole = !by_rows;
        if (!selected) buffers_[planned.dst].wanted_only = false;
    }
    if (all_keys) window_ = 0;
    logits_ = ops_.back().dst;
    require(selected && ops_.back().width == shape_.vocab, "the last op must leave logits of the selected rows");
    for (Buffer &buffer : buffers_) {
        buffer.memory = Memory(rows_bytes(buffer.wanted_only ? 1 : shape_.max_rows, buffer.width));
        buffer.rows = rows_in(buffer.memory, buffer.width);
    }
    if (widest) activations_ = Memory(activations_bytes(2 * shape_.max_rows, widest));
    for (int thread = 0; widest && thread < pool_.size(); ++thread) {
        own_.emplace_back(activations_bytes(kFew, widest));
        row_.emplace_back(rows_bytes(1, widest));
    }
    sealed_ = true;
}

void Session::grow(int wanted_rows) {
    for (Buffer &buffer : buffers_) {
        if (!buffer.wanted_only) continue;
        buffer.memory.need(rows_bytes(wanted_rows, buffer.width));
        buffer.rows = rows_in(buffer.memory, buffer.width);
    }
}

void Session::draw(Sampling parameters, int32_t *ids) {
    require(parameters.rows == wanted_rows_, "parameters must be of the rows that the last step wanted");
    parameters.vocab = shape_.vocab;
    const Rows &logits = buffers_[logits_].rows;
    sampler_.sample(logits.data, logits.stride, parameters, ids, pool_);
}

MemoryUse Session::memory() const {
    MemoryUse use{weights_.bytes(), 0,
                  activations_.bytes() + partials_.bytes() + sampler_.bytes() + sequence_.size() * sizeof(int32_t),
                  mapped_};
    for (const auto &vector : vectors_) use.weights += vector.memory.bytes();
    for (const auto &cache : caches_)
        for (const Memory *part : cache.parts()) use.kv += part->bytes();
    for (const auto &buffer : buffers_) use.scratch += buffer.memory.bytes();
    for (size_t i = 0; i < own_.size(); ++i) use.scratch += own_[i].bytes() + row_[i].bytes();
    for (const auto &rope : ropes_) use.scratch += rope.turns.bytes() + rope.frequencies.size() * sizeof(float);
    return use;
}

void Session::fill_cache(uint8_t byte) {
    for (Cache &cache : caches_)
        for (const Memory *part : cache.parts()) std::memset(part->data(), byte, part->bytes());
}

}  // namespace nano
