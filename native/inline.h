// Inlining as a matter of correctness: of an inline function that is not inlined the linker keeps one copy, maybe the one that
// was compiled for AVX-512. Whatever several instruction sets' sources share is NANO_INLINE.
#pragma once

#define NANO_INLINE inline __attribute__((always_inline))
