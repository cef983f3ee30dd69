"""Five bits a weight: ggml's Q5_K. Super-blocks of 256 columns, w = d · scale · q − dmin · minimum with a scale and a minimum of
six bits per 32 columns, d and dmin in float16."""

from __future__ import annotations

import math

import numpy as np

from . import Tensor, describe, scaled
from ._super import SUPER, pack_with_minimum, whole_with_minimum

GROUPS = (SUPER,)
HIGH_BITS = 1  # of a quant, above its nibble


def nbytes(shape: tuple[int, ...], group: int, minimum: bool) -> int:
    return math.prod(shape) // group * (group * (4 + HIGH_BITS) // 8 + 16 + 4)


def pack(name: str, values: np.ndarray) -> Tensor:
    """Raises OptionError: columns not in whole super-blocks, or values that a float16 scale cannot reach."""
    return Tensor(describe(name, values.shape, "q5_k", SUPER), pack_with_minimum(name, values, HIGH_BITS))


def whole(tensor: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return whole_with_minimum(tensor.planes, HIGH_BITS)


def unpack(tensor: Tensor) -> np.ndarray:
    return scaled(*whole(tensor))
