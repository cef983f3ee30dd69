"""Eight bits a weight: groups of 32 with one float16 scale, w = scale · q. The numbers of ggml's Q8_0."""

from __future__ import annotations

import math

import numpy as np

from . import Tensor, describe, groups, half, scaled

GROUPS = (32,)


def nbytes(shape: tuple[int, ...], group: int, minimum: bool) -> int:
    return math.prod(shape) // group * (group + 2)


def pack(name: str, values: np.ndarray, group: int = 32) -> Tensor:
    """Scale absmax / 127; quotients are taken with the scale before it is rounded to float16, and rounded half away from 0.

    Raises:
        OptionError: columns not in whole groups, or values that a float16 scale cannot reach.
    """
    info = describe(name, values.shape, "q8", group)
    blocks = groups(values, group)  # (..., K / 32, 32) float32
    scales = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    planes = {"scales": half(name, scales)}
    scaled = blocks * inverse(scales)
    quants = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled).astype(np.int8)
    return Tensor(info, planes | {"quants": quants.reshape(values.shape)})


def inverse(scales: np.ndarray) -> np.ndarray:
    """1 / scale, and 0 where that is no finite number: such a scale is 0 in float16 anyway."""
    with np.errstate(divide="ignore", over="ignore"):
        inverted = np.float32(1) / scales
    return np.where(np.isfinite(inverted), inverted, np.float32(0))


def whole(tensor: Tensor) -> tuple[np.ndarray, np.ndarray, None]:
    """Quants (…, K) and scales (…, K / 32) as float32."""
    return tensor.planes["quants"].astype(np.float32), tensor.planes["scales"].astype(np.float32), None


def unpack(tensor: Tensor) -> np.ndarray:
    return scaled(*whole(tensor))
