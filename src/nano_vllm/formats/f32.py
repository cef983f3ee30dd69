"""Weights as float32."""

from __future__ import annotations

import math

import numpy as np

from . import Tensor, describe

GROUPS = ()


def nbytes(shape: tuple[int, ...], group: int, minimum: bool) -> int:
    return 4 * math.prod(shape)


def pack(name: str, values: np.ndarray) -> Tensor:
    return Tensor(describe(name, values.shape, "f32"), {"values": np.ascontiguousarray(values)})


def unpack(tensor: Tensor) -> np.ndarray:
    return tensor.planes["values"]
