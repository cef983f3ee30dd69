#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "philox.h"

namespace nano {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kExcluded = -std::numeric_limits<float>::infinity();

// Lowest id of the largest logit; -1 if a logit is NaN or the largest is not finite.
int32_t argmax(const float *logits, int vocab) {
    int32_t best = 0;
    bool nan = false;
    for (int i = 0; i < vocab; ++i) {
        nan |= logits[i] != logits[i];
        if (logits[i] > logits[best]) best = i;
    }
    return nan || !std::isfinite(logits[best]) ? -1 : best;
}

float scaled(float logit, float factor) { return logit == kExcluded ? logit : std::clamp(logit / factor, -kLargest, kLargest); }

// True where the id is simply the argmax.
bool plain(const Sampling &p, int row) {
    const bool penalties = p.repetition[row] != 1.0f || p.frequency[row] != 0.0f || p.presence[row] != 0.0f;
    return p.banned_starts[row] == p.banned_starts[row + 1] && !penalties && !(p.temperature[row] > 0);
}

int32_t draw(const std::vector<Kept> &kept, double u) {
    double total = 0.0, sum = 0.0;
    for (const Kept &token : kept) total += token.odds;
    const double target = u * total;  // below the total also after rounding, because u is at most 1 − 2^-53
    for (const Kept &token : kept)
        if ((sum += token.odds) > target) return token.id;
    return kept.back().id;
}

void check_ranges(const int32_t *starts, int rows, const int32_t *ids, int64_t total, int vocab, const char *what) {
    bool fits = starts[0] == 0 && starts[rows] == total;
    for (int i = 0; i < rows; ++i) fits &= starts[i] <= starts[i + 1];
    for (int64_t i = 0; fits && i < total; ++i) fits &= ids[i] >= 0 && ids[i] < vocab;
    if (!fits) throw std::invalid_argument(std::string(what) + " ids or their ranges are outside their arrays");
}

}  // namespace

void check(const Sampling &p, int64_t history, int64_t banned) {
    check_ranges(p.history_starts, p.rows, p.history, history, p.vocab, "history");
    check_ranges(p.banned_starts, p.rows, p.banned, banned, p.vocab, "banned");
    for (int i = 0; i < p.rows; ++i) {
        // a row that needs no history has none, whatever its prompt's length
        const int length = p.history_starts[i + 1] - p.history_starts[i];
        if (length > 0 && (p.prompt_lengths[i] < 0 || p.prompt_lengths[i] > length))
            throw std::invalid_argument("a prompt is longer than its history");
    }
}

void Sampler::penalize(float *logits, const Sampling &p, int row, Scratch &scratch) {
    const int32_t *begin = p.history + p.history_starts[row], *end = p.history + p.history_starts[row + 1];
    if (begin == end) return;
    const int32_t *answer = begin + p.prompt_lengths[row];
    std::vector<int32_t> &counts = scratch.counts;
    const float repetition = p.repetition[row], frequency = p.frequency[row], presence = p.presence[row];
    if (repetition != 1.0f) {
        for (const int32_t *id = begin; id < end; ++id) {
            if (counts[*id]++) continue;
            float &x = logits[*id];
            if (x > 0)
                x = scaled(x, repetition);
            else if (x != kExcluded)
                x = std::max(x * repetition, -kLargest);
        }
        for (const int32_t *id = begin; id < end; ++id) counts[*id] = 0;
    }
    if (frequency == 0.0f && presence == 0.0f) return;
    for (const int32_t *id = answer; id < end; ++id) ++counts[*id];
    for (const int32_t *id = answer; id < end; ++id) {
        if (counts[*id] == 0) continue;
        if (frequency != 0.0f) logits[*id] -= frequency * float(counts[*id]);
        if (presence != 0.0f) logits[*id] -= presence;
        counts[*id] = 0;
    }
}

// The tokens that top_k keeps, by ascending id, with their odds. top_k and min_p commute: both keep a beginning of one order.
void Sampler::keep_candidates(const float *logits, float highest, int vocab, int top_k, double min_p, Scratch &scratch) {
    float border = kExcluded;
    int64_t equal = vocab;
    if (top_k > 0 && top_k < vocab) {
        scratch.ordered.assign(logits, logits + vocab);
        std::nth_element(scratch.ordered.begin(), scratch.ordered.begin() + (top_k - 1), scratch.ordered.end(),
                         std::greater<float>());
        border = scratch.ordered[top_k - 1];
        equal = top_k - std::count_if(logits, logits + vocab, [&](float x) { return x > border; });
    }
    scratch.kept.clear();
    for (int32_t id = 0; id < vocab; ++id) {
        const float x = logits[id];
        if (!(x >= border) || x == kExcluded || (x == border && equal-- <= 0)) continue;
        const double odds = std::exp(double(x - highest));
        if (odds >= min_p) scratch.kept.push_back({id, x, odds});
    }
}

void Sampler::keep_nucleus(double top_p, Scratch &scratch) {
    std::vector<Kept> &kept = scratch.kept, &heap = scratch.heap;
    double total = 0.0;
    for (const Kept &token : kept) total += token.odds;
    const double needed = top_p * total;
    // A token below its share of what may be left out cannot be in the set; half of the share leaves room for rounding.
    const double least = top_p < 1.0 - 1e-9 ? 0.5 * (1.0 - top_p) * total / double(kept.size()) : 0.0;
    const auto later = [](const Kept &a, const Kept &b) { return a.logit < b.logit || (a.logit == b.logit && a.id > b.id); };
    heap.clear();
    std::copy_if(kept.begin(), kept.end(), std::back_inserter(heap), [&](const Kept &token) { return token.odds >= least; });
    std::make_heap(heap.begin(), heap.end(), later);
    auto end = heap.end();
    Kept last = heap.front();
    for (double sum = 0.0; end != heap.begin();) {
        last = heap.front();
        std::pop_heap(heap.begin(), end--, later);
        if ((sum += last.odds) >= needed) break;
    }
    kept.erase(std::remove_if(kept.begin(), kept.end(), [&](const Kept &token) { return later(token, last); }), kept.end());
}

int32_t Sampler::sample_row(const float *logits, const Sampling &p, int row, Scratch &scratch) {
    const int32_t *banned = p.banned + p.banned_starts[row], *banned_end = p.banned + p.banned_starts[row + 1];
    const float temperature = p.temperature[row];
    if (plain(p, row)) return argmax(logits, p.vocab);
    scratch.logits.assign(logits, logits + p.vocab);
    float *x = scratch.logits.data();
    // a row with NaN or +inf yields no token, even where that token is banned afterwards or moved by a penalty
    for (int i = 0; i < p.vocab; ++i)
        if (!(x[i] < std::numeric_limits<float>::infinity())) return -1;
    for (; banned < banned_end; ++banned) x[*banned] = kExcluded;
    penalize(x, p, row, scratch);
    const int32_t best = argmax(x, p.vocab);
    if (best < 0 || !(temperature > 0)) return best;
    if (temperature != 1.0f)
        for (int i = 0; i < p.vocab; ++i) x[i] = scaled(x[i], temperature);
    keep_candidates(x, x[best], p.vocab, p.top_k[row], p.min_p[row], scratch);
    if (p.top_p[row] < 1.0) keep_nucleus(p.top_p[row], scratch);
    return draw(scratch.kept, uniform(p.seed[row], uint32_t(p.position[row]), uint32_t(p.index[row]), 0));
}

// Threads must not allocate: what can be needed is reserved before they begin.
void Sampler::reserve(int vocab, int threads) {
    scratch_.resize(threads);
    for (Scratch &space : scratch_) {
        space.counts.resize(vocab);
        space.logits.reserve(vocab);
        space.ordered.reserve(vocab);
        space.kept.reserve(vocab);
        space.heap.reserve(vocab);
    }
}

size_t Sampler::bytes() const {
    size_t bytes = 0;
    for (const Scratch &space : scratch_)
        bytes += (space.logits.capacity() + space.ordered.capacity() + space.counts.capacity()) * 4 +
                 (space.kept.capacity() + space.heap.capacity()) * sizeof(Kept);
    return bytes;
}

void Sampler::sample(const float *logits, int64_t stride, const Sampling &p, int32_t *ids, Pool &pool) {
    bool all_plain = true;
    for (int row = 0; row < p.rows; ++row) all_plain &= p.skip[row] || plain(p, row);
    if (!all_plain) reserve(p.vocab, pool.size());
    Scratch none;
    pool.run([&](int thread) {
        Scratch &scratch = all_plain ? none : scratch_[thread];
        for (int row = thread; row < p.rows; row += pool.size())
            ids[row] = p.skip[row] ? -1 : sample_row(logits + row * stride, p, row, scratch);
    });
}

}  // namespace nano
