"""Weight formats: one file each. A format says how numbers are stored (planes), and gives `pack` and `unpack`.

Planes are plain arrays, the same for every source; a file's own packing ends in its source.

| format | planes of an (N, K) matrix |
|---|---|
| f32, f16 | `values` (N, K) float32 / float16 |
| bf16 | `values` (N, K) uint16: the upper half of a float32 |
| q8 | `scales` (N, K/32) float16, `quants` (N, K) int8: w = scale · q |
| q4 | `scales` (N, K/group) float16, `quants` (N, K/2) uint8: w = scale · (q − 8) |
| q4 with a minimum | also `mins` (N, K/group) float16: w = scale · q + min |
| q4_k | `scales` and `mins` (N, K/256) float16, `sub_scales` and `sub_mins` (N, K/32) uint8 below 64, `quants` (N, K/2) uint8: |
| | w = (scale · sub_scale) · q − (min · sub_min) |
| q5_k | as q4_k, and `high` (N, K/8) uint8 |
| q6_k | `scales` (N, K/256) float16, `sub_scales` (N, K/16) int8, `quants` (N, K/2) and `high` (N, K/4) uint8: |
| | w = (scale · sub_scale) · (q − 32) |

In q4 byte j of each 32 columns holds column j in its low and column j + 16 in its high nibble. In
the others `quants` has the lower four bits of each number in the same order, and `high` those above (see `_super`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import registry
from ..errors import OptionError


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor: enough for plans, without reading a byte of it.

    Attributes:
        shape: (N,) or (N, K): outputs, inputs.
        group: columns that share a float16 scale; 0 for formats without scales.
        minimum: q4 with a minimum per group.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    group: int
    minimum: bool
    nbytes: int


@dataclass(frozen=True)
class Tensor:
    """One weight in memory, in its file's precision."""

    info: TensorInfo
    planes: dict[str, np.ndarray]

    def unpack(self) -> np.ndarray:
        """The values as float32, of `info.shape`: exactly what the file's format defines."""
        return registry.load("formats", self.info.format).unpack(self)


def pack(name: str, values: np.ndarray, format: str, **options) -> Tensor:
    """Round float32 `values` (N,) or (N, K) to `format`. Options: `group` (q4: 32, 64, 128), `minimum` (q4)."""
    return registry.load("formats", format).pack(name, np.asarray(values, np.float32), **options)


def describe(name: str, shape: tuple[int, ...], format: str, group: int = 0, minimum: bool = False) -> TensorInfo:
    """The info of a tensor that `format` stores, with its size. OptionError where the format cannot hold the shape."""
    module = registry.load("formats", format)
    if group not in (module.GROUPS or (0,)):
        raise OptionError(f"format {format} has no groups of {group}", f"{name} asks for them", f"Groups are {module.GROUPS}.")
    if group and shape[-1] % group:
        why = f"{name} has {shape[-1]} columns"
        raise OptionError(f"format {format} needs columns in whole groups of {group}", why, "Use f16 for it.")
    return TensorInfo(name, tuple(shape), format, group, minimum, module.nbytes(shape, group, minimum))


def reorder(tensor: Tensor, order: np.ndarray) -> Tensor:
    """The same tensor with row i taken from row `order[i]`; true for every format, as each row has planes of its own."""
    return Tensor(tensor.info, {name: plane[order] for name, plane in tensor.planes.items()})


def groups(array: np.ndarray, size: int) -> np.ndarray:
    """(..., K) as (..., K / size, size)."""
    return array.reshape(*array.shape[:-1], array.shape[-1] // size, size)


def scaled(quants: np.ndarray, scales: np.ndarray, mins: np.ndarray | None) -> np.ndarray:
    """What a format's `whole` gives -> (…, K) float32: scale · q, then + min where there is one, each rounded."""
    values = groups(quants, quants.shape[-1] // scales.shape[-1]) * scales[..., None]
    return (values if mins is None else values + mins[..., None]).reshape(quants.shape)


def half(name: str, scales: np.ndarray) -> np.ndarray:
    """(..., groups, 1) float32 scales or minima as (..., groups) float16. OptionError where one is not finite in it."""
    with np.errstate(over="ignore"):
        rounded = scales[..., 0].astype(np.float16)
    if not np.isfinite(rounded).all():
        why = f"{name} has values that are not finite, or too large for a float16 scale"
        raise OptionError("the values cannot be quantised", why, "Use f32 or bf16 for it.")
    return rounded
