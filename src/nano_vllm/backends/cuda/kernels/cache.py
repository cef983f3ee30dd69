"""Keys and values of one layer on the device, and how the narrow types round them.

Both are the definition's (`backends/_rounding.py`). int8: per token and head, scale = max|x| / 127, q = x · (127 / max|x|) to
nearest even. fp8 is e4m3 in the same way, with 448, its largest number, for 127. A vector under 2^-50 counts as zero, with the
scale 0; one with a NaN or an infinity has the scale NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
ALIGNED = 256  # bytes: where a layer begins; of less Triton makes slower loads, and kernels anew
UNITS = {torch.int8: 127, torch.float8_e4m3fn: 448}  # of those with scales: what the largest number of a vector becomes


def has_fp8(device: torch.device) -> bool:
    """Whether it converts e4m3: cards do from compute capability 8.9 on, and Triton's interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@dataclass(frozen=True)
class KVCache:
    """A head's keys of a block lie side by side, as do their scales, so that one program's loads are of consecutive numbers.

    Attributes:
        keys, values: (blocks, kv_heads, block_size, size).
        key_scales, value_scales: (blocks, kv_heads, block_size) float32; None where the type has none.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None

    @classmethod
    def of(cls, blocks: int, block_size: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        return allocate(blocks, block_size, [(kv_heads, size)], dtype, device)[0]

    @property
    def units(self) -> int:
        """What the largest number of a vector becomes; 0 for a type without scales."""
        return UNITS.get(self.keys.dtype, 0)

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.planes, *self.scales) if x is not None)

    @property
    def planes(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values

    @property
    def scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.key_scales, self.value_scales


def allocate(
    blocks: int, block_size: int, layers: Iterable[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> list[KVCache]:
    """Caches of layers with (kv_heads, size), full of zeros, in one allocation: the device gives memory in pieces of 2 MiB, and a
    single rounding can be foreseen."""
    parts: list[tuple[torch.dtype, tuple[int, ...]]] = []
    for kv_heads, size in layers:
        lines = (2, blocks, kv_heads, block_size)
        parts.append((dtype, (*lines, size)))
        parts += [(torch.float32, lines)] if dtype in UNITS else []
    starts = [0]
    for kind, shape in parts:
        starts.append(-(-(starts[-1] + math.prod(shape) * kind.itemsize) // ALIGNED) * ALIGNED)
    space = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
    views = [
        space[start : start + math.prod(shape) * kind.itemsize].view(kind).view(shape)
        for start, (kind, shape) in zip(starts, parts)
    ]
    if dtype not in UNITS:
        return [KVCache(*numbers, None, None) for numbers in views]
    return [KVCache(*numbers, *scales) for numbers, scales in zip(views[::2], views[1::2])]


@triton.jit
def line(block, within, kv, KV: tl.constexpr, BLOCK: tl.constexpr):
    """Where of all lines, of `size` numbers and one scale, is that of a head at a place within a block."""
    return (block.to(tl.int64) * KV + kv) * BLOCK + within


@triton.jit
def rounded(a, b, UNITS: tl.constexpr, WHOLE: tl.constexpr):
    """Two halves (rows, n) of vectors -> both in units of a scale, rounded to whole numbers with WHOLE, else to e4m3's, but still
    float32; scales (rows,)."""
    most = tl.maximum(tl.max(_magnitude(a), axis=1), tl.max(_magnitude(b), axis=1))
    wrong, zero = most == float("inf"), most < 8.881784197001252e-16  # 2^-50
    inverse = tl.where(wrong | zero, 0.0, tl.div_rn(tl.full(most.shape, UNITS, tl.float32), tl.where(zero, 1.0, most)))
    scale = tl.where(wrong, float("nan"), tl.where(zero, 0.0, tl.div_rn(most, tl.full(most.shape, UNITS, tl.float32))))
    a, b = tl.where(wrong[:, None], 0.0, a) * inverse[:, None], tl.where(wrong[:, None], 0.0, b) * inverse[:, None]
    return _nearest(a, WHOLE), _nearest(b, WHOLE), scale


@triton.jit
def _nearest(x, WHOLE: tl.constexpr):
    """To nearest even, by adding a number whose last digit is worth the step: 1, or of e4m3's numbers an eighth of their power of
    two, 2^-6 at least. Triton's interpreter converts to e4m3 otherwise, but keeps what is one of its numbers."""
    if WHOLE:
        large = 12582912.0  # 1.5 · 2^23
    else:
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        large = tl.maximum(power, 0.015625) * 1572864.0  # 1.5 · 2^20
    return (x + large) - large


@triton.jit
def _magnitude(x):
    """|x|; infinity for a NaN, which a maximum would drop."""
    return tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf"))
