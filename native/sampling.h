// From rows of logits to ids, as nano_vllm/sampling defines it stage by stage.
#pragma once

#include <cstdint>
#include <vector>

#include "pool.h"

namespace nano {

// Parameters of the wanted rows as flat arrays; see sampling/pipeline.py for each.
struct Sampling {
    int rows, vocab;
    const float *temperature, *repetition, *frequency, *presence;
    const double *min_p, *top_p;
    const int32_t *top_k;
    const uint64_t *seed;
    const int32_t *index, *position;
    const int32_t *history, *history_starts, *prompt_lengths;
    const int32_t *banned, *banned_starts;
    const bool *skip;  // rows whose logits are wanted instead of an id
};

// Throws std::invalid_argument unless every id and range lies inside its array: `history` and `banned` ids there are in all.
void check(const Sampling &parameters, int64_t history, int64_t banned);

struct Kept {
    int32_t id;
    float logit;
    double odds;  // exp(logit − maximum)
};

// Draws ids, and keeps its work space from call to call.
class Sampler {
public:
    // ids[i] for each row: the token drawn, or -1 where skipped or where no token has a finite logit (NaN and +inf in a row,
    // too). logits: rows of `stride` floats; left as they are.
    void sample(const float *logits, int64_t stride, const Sampling &parameters, int32_t *ids, Pool &pool);

    size_t bytes() const;

private:
    // Work space of one thread.
    struct Scratch {
        std::vector<float> logits, ordered;
        std::vector<int32_t> counts;  // all zero between rows
        std::vector<Kept> kept, heap;
    };

    void reserve(int vocab, int threads);
    static int32_t sample_row(const float *logits, const Sampling &p, int row, Scratch &scratch);
    static void penalize(float *logits, const Sampling &p, int row, Scratch &scratch);
    static void keep_candidates(const float *logits, float highest, int vocab, int top_k, double min_p, Scratch &scratch);
    static void keep_nucleus(double top_p, Scratch &scratch);

    std::vector<Scratch> scratch_;
};

}  // namespace nano
