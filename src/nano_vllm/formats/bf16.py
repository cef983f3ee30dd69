"""Weights as bfloat16: the upper half of a float32, kept as uint16 because NumPy has no such type."""

from __future__ import annotations

import math

import numpy as np

from . import Tensor, describe

GROUPS = ()


def nbytes(shape: tuple[int, ...], group: int, minimum: bool) -> int:
    return 2 * math.prod(shape)


def pack(name: str, values: np.ndarray) -> Tensor:
    """Rounds to nearest, ties to even. NaN stays NaN (made quiet: a payload in the lower half alone would become infinity)."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    # the largest finite pattern plus the rounding carry fits 32 bits, only a NaN could wrap
    rounded = np.where(nan, bits | 0x400000, bits + (0x7FFF + ((bits >> 16) & 1)))
    return Tensor(describe(name, values.shape, "bf16"), {"values": (rounded >> 16).astype(np.uint16)})


def unpack(tensor: Tensor) -> np.ndarray:
    return (tensor.planes["values"].astype(np.uint32) << 16).view(np.float32)
