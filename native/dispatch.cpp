// Which of the compiled kernels this processor can run.
#include <cstring>
#include <vector>

#include "kernels.h"

#if defined(NANO_X86) && defined(_MSC_VER)
#include <intrin.h>
#endif
#ifdef NANO_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(NANO_ARM64) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(NANO_ARM64) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(NANO_ARM64) && defined(_WIN32)
#include <windows.h>
#endif

namespace nano {

namespace generic {
extern const Kernels kernels;
}
#ifdef NANO_X86
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#ifdef NANO_AMX
namespace amx {
extern const Kernels kernels;
}
#endif
#endif
#ifdef NANO_ARM64
namespace neon {
extern const Kernels kernels;
}
namespace neon_dotprod {
extern const Kernels kernels;
}
#endif

namespace {

#ifdef NANO_X86
#ifdef _MSC_VER
// The operating system must save the wide registers, too: XCR0.
bool has(bool wide) {
    int leaf[4];
    __cpuid(leaf, 1);
    const bool saves = (leaf[2] >> 27) & 1, fma = (leaf[2] >> 12) & 1, f16c = (leaf[2] >> 29) & 1;
    if (!saves || !fma || !f16c) return false;
    const unsigned long long state = _xgetbv(0), needed = wide ? 0xe6 : 0x6;
    __cpuidex(leaf, 7, 0);
    const bool avx2 = (leaf[1] >> 5) & 1;
    const unsigned f_dq = 1u << 16 | 1u << 17, bw_vl = 1u << 30 | 1u << 31;
    const bool avx512 = (unsigned(leaf[1]) & (f_dq | bw_vl)) == (f_dq | bw_vl) && (leaf[2] >> 11 & 1);
    return (state & needed) == needed && avx2 && (!wide || avx512);
}
bool has_avx2() { return has(false); }
bool has_avx512() { return has(true); }
#else
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
#endif
#endif

#ifdef NANO_AMX
// Linux saves the tile registers of a process's threads only once the process has asked for them.
bool asked_for_tiles() {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
bool has_amx() {
    unsigned a, b, c, d = 0;
    const bool tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && (d >> 25 & 1);
    static const bool asked = tiles && asked_for_tiles();
    return asked;
}
#endif

#ifdef NANO_ARM64
bool has_dotprod() {
#if defined(__APPLE__)
    int has = 0;
    size_t bytes = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &bytes, nullptr, 0) == 0 && has;
#elif defined(__linux__)
    return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#elif defined(_WIN32)
    return IsProcessorFeaturePresent(43);  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
#else
    return false;
#endif
}
#endif

}  // namespace

std::vector<const Kernels *> available_kernels() {
    std::vector<const Kernels *> found;
#ifdef NANO_X86
#ifdef NANO_AMX
    if (has_avx512() && has_amx()) found.push_back(&amx::kernels);
#endif
    if (has_avx512()) found.push_back(&avx512::kernels);
    if (has_avx2()) found.push_back(&avx2::kernels);
#endif
#ifdef NANO_ARM64
    if (has_dotprod()) found.push_back(&neon_dotprod::kernels);
    found.push_back(&neon::kernels);
#endif
    found.push_back(&generic::kernels);
    return found;
}

const Kernels *find_kernels(const char *name) {
    for (const Kernels *kernels : available_kernels())
        if (*name == 0 || std::strcmp(name, kernels->name) == 0) return kernels;
    return nullptr;
}

int64_t attend_units(const Step &step, int heads, int kv_heads, int tile) {
    int64_t units = 0;
    for (int s = 0; s < step.sequences; ++s) {
        const int64_t queries = int64_t(step.starts[s + 1] - step.starts[s]) * (heads / kv_heads);
        units += (queries + tile - 1) / tile * kv_heads;
    }
    return units;
}

}  // namespace nano
