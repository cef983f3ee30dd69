"""Weights as IEEE half precision."""

from __future__ import annotations

import math

import numpy as np

from . import Tensor, describe

GROUPS = ()


def nbytes(shape: tuple[int, ...], group: int, minimum: bool) -> int:
    return 2 * math.prod(shape)


def pack(name: str, values: np.ndarray) -> Tensor:
    """Rounds to nearest, ties to even; beyond 65,504 it is infinity, as IEEE 754 has it."""
    with np.errstate(over="ignore"):
        return Tensor(describe(name, values.shape, "f16"), {"values": np.ascontiguousarray(values, np.float16)})


def unpack(tensor: Tensor) -> np.ndarray:
    return tensor.planes["values"].astype(np.float32)
