"""Products of some dozens of rows with a narrow matrix, whose sums are left in parts for the norm that follows.

PyTorch's product of such a shape has few tiles, and most of the card waits: here the sum over columns is split so that the tiles
fill it once. Wider matrices, and more rows, are left to PyTorch: measured beside it, nothing was gained there.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from . import pdl
from ._dot import dot

MAX_OUTPUTS = 2**18  # rows times lines of the matrix
MAX_PARTS = 4
MAX_PART_ROWS = 512  # rows times parts
ROWS = 64  # of a tile


@triton.jit(do_not_specialize=["rows"])
def _tiled(
    x, weight, bias, out, rows, N: tl.constexpr, K: tl.constexpr, BIASED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    LINES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.release(PDL)
    part = tl.program_id(2)
    n, r = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k, seen = tl.arange(0, TILE), (r < rows)[:, None]
    acc = tl.zeros((ROWS, LINES), tl.float32)
    pdl.wait(PDL)
    for start in range(part * (K // PARTS), (part + 1) * (K // PARTS), TILE):
        a = tl.load(x + r[:, None] * K + (start + k)[None, :], mask=seen, other=0.0)
        w = tl.load(weight + n.to(tl.int64)[:, None] * K + (start + k)[None, :])
        acc += dot(a, tl.trans(w))
    if BIASED and part == 0:
        acc += tl.load(bias + n)[None, :]
    tl.store(out + (part * rows + r).to(tl.int64)[:, None] * N + n[None, :], acc, mask=seen)


def _sizes(rows: int, n: int) -> tuple[int, int]:
    """-> lines of the matrix and columns of a tile."""
    return (32, 128) if rows <= ROWS and n <= 1024 else (64, 64)


@lru_cache
def _fills(device: torch.device) -> int:
    """Programs that are one for each of its multiprocessors; 0 where nothing has been measured."""
    if device.type != "cuda":
        return 132
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major == 9 else 0


def parts(rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> int:
    """Parts of the sum over columns, or 0 where the product is better left to PyTorch."""
    lines, tile = _sizes(rows, n)
    tiles, most = triton.cdiv(rows, ROWS) * (n // lines), _fills(device)
    found = MAX_PARTS
    while found > 1 and (found * tiles > most or k % (found * tile)):
        found //= 2
    fits = rows * n <= MAX_OUTPUTS and found * rows <= MAX_PART_ROWS and dtype.itemsize == 2 and n % lines == 0
    return found if fits and found > 1 and 3 * found * tiles >= 2 * most else 0


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """As `linear.linear`; out (parts, rows, N) float32, as many parts as `parts` says."""
    rows, (n, k), count = len(x), weight.shape, out.shape[0]
    lines, tile = _sizes(rows, n)
    grid = (n // lines, triton.cdiv(rows, ROWS), count)
    _tiled[grid](
        x, weight, weight if bias is None else bias, out, rows, n, k, bias is not None, count, ROWS, lines, tile, num_warps=4,
        num_stages=4 if tile == 128 else 8, **pdl.options(x.device),
    )  # fmt: skip
