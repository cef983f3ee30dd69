// The ops of a model as plain structs: what `model/program.py` lowers to, with names replaced by indices.
// Weights, vectors, buffers, ropes and caches are indices into the session's lists; -1 is none.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "kernels.h"

namespace nano {

struct Embed {
    int weight, dst;
};

struct Normalize {
    int weight;
    float eps;
    int src, dst;
};

struct Linear {
    std::vector<int> weights, biases;  // parallel
    int src, dst;
    bool accumulate;
    int prologue = -1;  // the Normalize or Gate before it whose rows it makes itself, as it rounds them; found by `seal`
};

struct Rotate {
    int buffer, heads, kv_heads, head_size, rope, q_norm, k_norm;
    float eps;
    int cache;
};

struct Attend {
    int src, dst, heads, kv_heads, head_size;
    float scale;
    int window;  // 0: all keys
    int cache;
};

struct Gate {
    Activation activation;
    int size, src, dst;
};

struct Select {
    int src, dst;
};

using Op = std::variant<Embed, Normalize, Linear, Rotate, Attend, Gate, Select>;

}  // namespace nano
