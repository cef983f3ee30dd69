// The kernels of one instruction set: compiled once for each, with NANO_ISA its name and the compiler's flags for it.
#include "kernels.h"

#include "attention.h"
#include "elementwise.h"

#define NANO_NAME_(isa) #isa
#define NANO_NAME(isa) NANO_NAME_(isa)

namespace nano::NANO_ISA {

extern const Kernels kernels;
const Kernels kernels = {
    NANO_NAME(NANO_ISA),
    &matrix_kernels,
    normalize_rows,
    gate_rows,
    rotate_rows,
    attend,
    attend_splits,
    attend_merge,
    kTile,
    kSplit,
    sizeof(SplitResult),
};

}  // namespace nano::NANO_ISA
