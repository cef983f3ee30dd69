// From rows of logits to ids, as nano_vllm/sampling defines it stage by stage.
#pragma once

#include <cstdint>

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

// ids[i] for each row: the token drawn, or -1 where skipped or where no token has a finite logit (NaN and +inf in a row, too).
// logits: rows of `stride` floats; left as they are.
void sample(const float *logits, int64_t stride, const Sampling &parameters, int32_t *ids, Pool &pool);

}  // namespace nano
