// Compiled once per instruction set: its table of matrix kernels.
#include "embed.h"
#include "linear.h"
#include "quantize.h"

namespace nano::NANO_ISA {

static void exp_array(const float *x, float *out, size_t n) {
    for (size_t i = 0; i < n; i += LANES) {
        const int left = n - i < (size_t)LANES ? (int)(n - i) : LANES;
        store_n(out + i, exp(load_n(x + i, left)), left);
    }
}

#define NANO_NAME_(isa) #isa
#define NANO_NAME(isa) NANO_NAME_(isa)

extern const MatrixKernels matrix_kernels;
const MatrixKernels matrix_kernels = {NANO_NAME(NANO_ISA), quantize, linear, embed, exp_array};

}  // namespace nano::NANO_ISA
