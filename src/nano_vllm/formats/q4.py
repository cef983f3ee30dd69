"""Four bits a weight: groups of 32, 64 or 128 with a float16 scale, and with a float16 minimum where asked.

With groups of 32 these are the numbers of ggml's Q4_0 (w = scale · (q − 8)) and Q4_1 (w = scale · q + min).
"""

from __future__ import annotations

import math

import numpy as np

from . import Tensor, describe, groups, half, scaled
from .q8 import inverse

GROUPS = (32, 64, 128)


def nbytes(shape: tuple[int, ...], group: int, minimum: bool) -> int:
    return math.prod(shape) // group * (group // 2 + (4 if minimum else 2))


def pack(name: str, values: np.ndarray, group: int = 32, minimum: bool = False) -> Tensor:
    """Without a minimum the value farthest from 0 becomes −8 exactly (so a scale may be negative); with one, the group's
    range is cut in 15 steps. Quotients are taken with the scale before it is rounded to float16.

    Raises:
        OptionError: columns not in whole groups, or values that a float16 scale cannot reach.
    """
    info = describe(name, values.shape, "q4", group, minimum)
    blocks = groups(values, group)  # (..., K / group, group) float32
    if minimum:
        low = blocks.min(axis=-1, keepdims=True)
        planes = {"mins": half(name, low)}
        scales = (blocks.max(axis=-1, keepdims=True) - low) / np.float32(15)
        planes["scales"] = half(name, scales)
        quants = np.trunc((blocks - low) * inverse(scales) + np.float32(0.5))
    else:
        farthest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1, keepdims=True), axis=-1)
        scales = farthest / np.float32(-8)
        planes = {"scales": half(name, scales)}
        quants = np.trunc(blocks * inverse(scales) + np.float32(8.5))
    pairs = quants.clip(0, 15).astype(np.uint8).reshape(*values.shape[:-1], -1, 2, 16)
    planes["quants"] = (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).reshape(*values.shape[:-1], -1)
    return Tensor(info, planes)


def whole(tensor: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Quants (…, K), from −8 without a minimum, scales (…, K / group) and minima, as float32."""
    info, planes = tensor.info, tensor.planes
    packed = groups(planes["quants"], 16)
    quants = np.stack((packed & 15, packed >> 4), axis=-2).reshape(info.shape).astype(np.float32)
    scales = planes["scales"].astype(np.float32)
    return (quants, scales, planes["mins"].astype(np.float32)) if info.minimum else (quants - np.float32(8), scales, None)


def unpack(tensor: Tensor) -> np.ndarray:
    return scaled(*whole(tensor))
