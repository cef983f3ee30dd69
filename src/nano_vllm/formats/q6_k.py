"""Six bits a weight: ggml's Q6_K. Super-blocks of 256 columns, w = d · scale · (q − 32) with an int8 scale per 16 columns and d
in float16."""

from __future__ import annotations

import math

import numpy as np

from . import Tensor, describe, groups, scaled
from ._super import SUPER, share, spread, unweave, weave
from .q8 import inverse

GROUPS = (SUPER,)
HIGH_BITS = 2  # of a quant, above its nibble


def nbytes(shape: tuple[int, ...], group: int, minimum: bool) -> int:
    return math.prod(shape) // group * (group * 6 // 8 + 16 + 2)


def pack(name: str, values: np.ndarray) -> Tensor:
    """The value farthest from 0 becomes −32 or nearly so, hence scales of both signs; quotients are taken with the scale as it
    is stored.

    Raises:
        OptionError: columns not in whole super-blocks, or values that a float16 scale cannot reach.
    """
    info = describe(name, values.shape, "q6_k", SUPER)
    blocks = groups(values, 16)
    farthest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1, keepdims=True), axis=-1)
    wide, whole = share(name, farthest / np.float32(-32), SUPER // 16, -128)
    planes = {"scales": wide, "sub_scales": whole.astype(np.int8)}
    quants = np.rint(blocks * inverse(spread(planes, "scales")[..., None])).clip(-32, 31) + np.float32(32)
    return Tensor(info, planes | weave(quants.astype(np.uint8).reshape(values.shape), HIGH_BITS))


def whole(tensor: Tensor) -> tuple[np.ndarray, np.ndarray, None]:
    """Quants (…, K) from −32 and scales (…, K / 16) as float32."""
    quants = unweave(tensor.planes, HIGH_BITS).astype(np.float32) - np.float32(32)
    return quants, spread(tensor.planes, "scales"), None


def unpack(tensor: Tensor) -> np.ndarray:
    return scaled(*whole(tensor))
