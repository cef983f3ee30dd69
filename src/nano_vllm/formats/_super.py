"""What the formats with super-blocks share: 256 columns with float16 scales, in groups of 16 or 32 with scales of few bits.

Quants are split over two planes: `quants`, the lower four bits as in q4, and `high`, the bits above them. Of `high`, each 32
columns have four bytes per bit; byte j of four holds, from its lowest bit on, the columns j, 4 + j, 8 + j, … that they reach.
"""

from __future__ import annotations

import numpy as np

from . import groups, half
from .q8 import inverse

SUPER = 256  # columns of a super-block


def weave(quants: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    """(…, K) uint8 below 2^(4 + bits) -> the planes `quants` and, with bits, `high`."""
    flat = (*quants.shape[:-1], -1)
    pairs = groups(quants & 15, 32).reshape(*flat, 2, 16)
    planes = {"quants": (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(flat)}
    if bits:
        each = 8 // bits  # columns whose bits share a byte
        columns = (quants >> 4).reshape(*flat, each, 4) << (bits * np.arange(each, dtype=np.uint8))[:, None]
        planes["high"] = np.bitwise_or.reduce(columns, axis=-2).reshape(flat)
    return planes


def unweave(planes: dict[str, np.ndarray], bits: int) -> np.ndarray:
    """The planes `quants` and `high` -> (…, K) uint8."""
    low = groups(planes["quants"], 16)
    flat = (*planes["quants"].shape[:-1], -1)
    quants = np.stack((low & 15, low >> 4), axis=-2).reshape(flat)
    if bits:
        each = 8 // bits
        high = groups(planes["high"], 4)[..., None, :] >> (bits * np.arange(each, dtype=np.uint8))[:, None]
        quants = quants | ((high & ((1 << bits) - 1)) << 4).reshape(flat)
    return quants


def spread(planes: dict[str, np.ndarray], part: str) -> np.ndarray:
    """float32 (…, K / group): what a group's columns are multiplied with, d · scale; or with "mins" its minimum. Exact."""
    small = planes[f"sub_{part}"].astype(np.float32)
    wide = planes[part][..., None].astype(np.float32)
    return (wide * groups(small, small.shape[-1] // wide.shape[-2])).reshape(small.shape)


def share(name: str, small: np.ndarray, count: int, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales of groups (…, K / group, 1) float32, `count` of them to a super-block -> float16 (…, K / 256), and whole numbers
    (…, K / group) up to `top` that times these are nearest to them. With a negative top, the largest is exactly that."""
    by_super = groups(small[..., 0], count)
    largest = np.take_along_axis(by_super, np.abs(by_super).argmax(axis=-1, keepdims=True), axis=-1)
    wide = half(name, largest / np.float32(top))
    whole = np.rint(by_super * inverse(wide[..., None].astype(np.float32)))
    return wide, whole.clip(min(top, 0), abs(top) - (top < 0)).reshape(small.shape[:-1])


def pack_with_minimum(name: str, values: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    """w = d · scale · q − dmin · minimum per 32 columns, q of 4 + `bits` bits: each group's range, with 0 in it, cut into steps,
    and quotients taken with scale and minimum as they are stored."""
    blocks, most = groups(values, 32), (16 << bits) - 1
    low = np.minimum(blocks.min(axis=-1, keepdims=True), 0)
    scales = (np.maximum(blocks.max(axis=-1, keepdims=True), 0) - low) / np.float32(most)
    planes: dict[str, np.ndarray] = {}
    for part, small in (("scales", scales), ("mins", -low)):
        planes[part], whole = share(name, small, SUPER // 32, 63)
        planes[f"sub_{part}"] = whole.astype(np.uint8)
    steps, mins = (spread(planes, part)[..., None] for part in ("scales", "mins"))
    quants = np.rint((blocks + mins) * inverse(steps)).clip(0, most)
    return planes | weave(quants.astype(np.uint8).reshape(values.shape), bits)


def whole_with_minimum(planes: dict[str, np.ndarray], bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quants (…, K), scales and, less than 0, minima (…, K / 32), float32."""
    return unweave(planes, bits).astype(np.float32), spread(planes, "scales"), -spread(planes, "mins")
