// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).
#pragma once

#include <array>
#include <cstdint>

namespace nano {

inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * counter[0];
        const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
        counter = {uint32_t(b >> 32) ^ counter[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ counter[3] ^ key1, uint32_t(a)};
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    return counter;
}

// A number strictly between 0 and 1 from the upper 53 bits of the first two words; the one pattern that rounds to 1 gives the
// number below.
inline double uniform(uint64_t seed, uint32_t position, uint32_t index, uint32_t purpose) {
    const auto words = philox({position, index, purpose, 0}, uint32_t(seed), uint32_t(seed >> 32));
    const uint64_t bits = (uint64_t{words[0]} << 32 | words[1]) >> 11;
    const double u = (double(bits) + 0.5) * 0x1p-53;
    return u < 1.0 ? u : 1.0 - 0x1p-53;
}

}  // namespace nano
