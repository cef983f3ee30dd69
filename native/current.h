// The step under way, as the ops see it.
#pragma once

#include <vector>

#include "session.h"

namespace nano {

struct Session::Current {
    Step step;
    const int32_t *tokens, *wanted;
    int wanted_rows;
    int rows;                            // that ops run on: all, or the wanted ones after Select
    const std::vector<int32_t> *firsts;  // those of them at position 0
    int longest = 0;                     // context in the step
    std::vector<Copy> *copies;
};

}  // namespace nano
