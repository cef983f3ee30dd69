// Compiled once per instruction set: its table of matrix kernels.
#include "embed.h"
#include "linear.h"
#include "probe.h"
#include "quantize.h"
#include "spin.h"

namespace nano::NANO_ISA {

#define NANO_NAME_(isa) #isa
#define NANO_NAME(isa) NANO_NAME_(isa)

extern const MatrixKernels matrix_kernels;
const MatrixKernels matrix_kernels = {NANO_NAME(NANO_ISA), panel_for, quantize, quantize_rest, linear, embed, spin, probe};

}  // namespace nano::NANO_ISA
