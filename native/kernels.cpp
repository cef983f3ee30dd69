// The kernels of one instruction set: compiled once for each, with NANO_ISA its name and the compiler's flags for it.
#include "kernels.h"

#include "attention.h"
#include "elementwise.h"

#define NANO_NAME_(isa) #isa
#define NANO_NAME(isa) NANO_NAME_(isa)

namespace nano::NANO_ISA {

extern const Kernels kernels;
// clang-format off
const Kernels kernels = {
    .name = NANO_NAME(NANO_ISA),
    .matrix = &matrix_kernels,
    .normalize = normalize_rows,
    .gate = gate_rows,
    .rotate = rotate_rows,
    .attend = attend,
    .rotate_and_attend = rotate_and_attend,
    .attend_splits = attend_splits,
    .attend_merge = attend_merge,
    .attend_tile = kTile,
    .attend_split = kSplit,
    .attend_partial_bytes = sizeof(SplitResult),
};
// clang-format on

}  // namespace nano::NANO_ISA
