"""Matrix products of tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
PTX = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)  # its instructions can be named


@triton.jit
def dot(a, b):
    """a · b with float32 sums; float32 operands are not rounded to tf32.

    Triton's interpreter keeps bfloat16 as bits, which NumPy would multiply as whole numbers, and sums float16 in float16.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def to(x, KIND: tl.constexpr):
    """x of whole or floating-point numbers in the type KIND. Interpreted, a conversion from int8 to bfloat16 goes wrong."""
    if INTERPRETED:
        x = x.to(tl.float32)
    return x.to(KIND)
