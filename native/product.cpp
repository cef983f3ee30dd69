// Products of a step: rows are rounded to int8 where the weights want it, then threads share the outputs.
#include <algorithm>
#include <cstdint>

#include "current.h"

namespace nano {
namespace {

// How threads share a product: by blocks of outputs, so that each weight is read once, and by rows too where blocks alone would
// leave threads idle.
struct Grid {
    int rows, columns;
};
Grid grid_for(int rows, int panel, int64_t blocks, int threads) {
    Grid best{1, threads};
    int64_t least = INT64_MAX;
    for (int r = 1; r <= threads; ++r) {
        if (threads % r != 0) continue;
        const int64_t columns = threads / r, longest = (((rows + panel - 1) / panel + r - 1) / r) * ((blocks + columns - 1) / columns);
        if (longest < least) {
            best = {r, int(columns)};
            least = longest;
        }
    }
    return best;
}

}  // namespace

// A row as the product takes it: of its source, or made in `space` by the op that it stands for.
const float *Session::row_of(const Linear &op, int64_t row, float *space) const {
    if (op.prologue < 0) return buffers_[op.src].rows.row(row);
    const Rows made{space, 0};
    if (const auto *norm = std::get_if<Normalize>(&ops_[op.prologue].op)) {
        const Vector &weight = vectors_[norm->weight];
        kernels_.normalize({buffers_[norm->src].rows.row(row), 0}, made, weight.memory.as<float>(), weight.size, norm->eps, 0, 1);
    } else {
        const auto &gate = std::get<Gate>(ops_[op.prologue].op);
        kernels_.gate(gate.activation, {buffers_[gate.src].rows.row(row), 0}, made, gate.size, 0, 1);
    }
    return space;
}

// All rows to int8; behind them what rounding left of those at position 0. Few rows are rounded by every thread for itself,
// many are shared out.
Activations Session::round_rows(const Linear &op, const Current &current, int thread) {
    const std::vector<int32_t> &firsts = *current.firsts;
    const int count = current.rows + int(firsts.size());
    const bool alone = count <= kFew;
    const Activations out = activations_in((alone ? own_[thread] : activations_).data(), matrices_[op.weights[0]].k,
                                           kernels_.matrix->panel(current.rows));
    const Share part = alone ? Share{0, current.rows} : share(current.rows, thread, pool_.size());
    size_t next = std::lower_bound(firsts.begin(), firsts.end(), int32_t(part.begin)) - firsts.begin();
    for (int64_t row = part.begin; row < part.end; ++row) {
        const float *x = row_of(op, row, row_[thread].as<float>());
        kernels_.matrix->quantize(x, 0, 0, 1, out.from(int(row)));
        if (next < firsts.size() && firsts[next] == row)
            kernels_.matrix->quantize_rest(x, int(row), current.rows + int(next++), out);
    }
    if (!alone) pool_.barrier();
    return out;
}

void Session::apply(const Linear &op, const Current &current, int thread) {
    const Rows &src = buffers_[op.src].rows, &dst = buffers_[op.dst].rows;
    int64_t blocks = 0;
    bool quantized = false;
    for (int w : op.weights) {
        blocks += matrices_[w].blocks();
        quantized |= matrices_[w].quantized();
    }
    const Activations activations = quantized ? round_rows(op, current, thread) : Activations{};
    const int panel = quantized ? activations.panel : PANEL;
    const Grid grid = grid_for(current.rows, panel, blocks, pool_.size());
    const Share panels = share((current.rows + panel - 1) / panel, thread / grid.columns, grid.rows),
                rows{panels.begin * panel, std::min(panels.end * panel, int64_t(current.rows))}, part = share(blocks, thread % grid.columns, grid.columns);
    if (rows.begin >= rows.end) return;
    int64_t base = 0;
    float *out = dst.data;
    for (size_t i = 0; i < op.weights.size(); ++i) {
        const Matrix &w = matrices_[op.weights[i]];
        const int begin = int(std::max(part.begin - base, int64_t(0))), end = int(std::min(part.end - base, int64_t(w.blocks())));
        base += w.blocks();
        if (begin < end) {
            const float *bias = op.biases[i] < 0 ? nullptr : vectors_[op.biases[i]].memory.as<float>();
            kernels_.matrix->linear(w, activations.from(int(rows.begin)), src.row(rows.begin), size_t(src.stride),
                                    int(rows.end - rows.begin), out + rows.begin * dst.stride, size_t(dst.stride), begin, end,
                                    bias, op.accumulate);
            if (w.quantized()) add_rests(w, activations, current, rows, {out, dst.stride}, begin, end);
        }
        out += w.n;
    }
}

// The second planes of the rows at position 0, onto the first.
void Session::add_rests(const Matrix &w, const Activations &activations, const Current &current, Share rows, Rows out, int begin,
                        int end) const {
    for (size_t i = 0; i < current.firsts->size(); ++i) {
        const int row = (*current.firsts)[i];
        if (row >= rows.begin && row < rows.end)
            kernels_.matrix->linear(w, activations.from(current.rows + int(i)), nullptr, 0, 1, out.row(row), size_t(out.stride),
                                    begin, end, nullptr, true);
    }
}

}  // namespace nano
