"""Products of few rows with a matrix: bound by reading the matrix, which these kernels do once, in whole cache lines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._dot import dot

MAX_ROWS = 16  # above, a matrix product by PyTorch
PROGRAMS = 512  # that keep a large card's memory busy: about four for each of 132 multiprocessors
MAX_PARTS = 8


@triton.jit(do_not_specialize=["rows"])
def _few(
    x, weight, bias, out, rows, N: tl.constexpr, K: tl.constexpr, BIASED: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part, k, r = tl.program_id(1), tl.arange(0, TILE), tl.arange(0, ROWS)
    each: tl.constexpr = (K + PARTS * TILE - 1) // (PARTS * TILE) * TILE
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    line = weight + n.to(tl.int64)[:, None] * K
    for start in range(0, each, TILE):
        at = part * each + start + k
        w = tl.load(line + at[None, :], mask=(n < N)[:, None] & (at < K)[None, :], other=0.0)
        a = tl.load(x + r[:, None] * K + at[None, :], mask=(r < rows)[:, None] & (at < K)[None, :], other=0.0)
        acc += dot(a.to(w.dtype), tl.trans(w))
    if BIASED and part == 0:
        acc += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    to = out + (part * rows + r[:, None]) * N + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (n < N)[None, :])


def tiles(rows: int, n: int, k: int, splittable: bool) -> tuple[int, int, int]:
    """-> outputs of a program, columns of a tile, parts of the sum over columns."""
    tile = min(512 if rows == 1 else 128, triton.next_power_of_2(max(16, k)))
    columns, most = (8, 16) if rows == 1 else (16, 64)  # one row's sums are a tile's size each, in registers
    while columns < most and -(-n // (2 * columns)) >= PROGRAMS:
        columns *= 2
    parts = 1
    while splittable and parts < MAX_PARTS and -(-n // columns) * parts < PROGRAMS // 2 and 2 * parts * tile <= k:
        parts *= 2
    return columns, tile, parts


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out = x · weightᵀ + bias with float32 sums, which `out` may keep apart in parts.

    Args:
        x: (rows, K), 2 to MAX_ROWS rows (for one, see `one_row`); weight: (N, K); bias: (N,) float32.
        out: (parts, rows, N): the sum over its first axis is the product. `tiles` says how many parts pay.
    """
    rows, (n, k), parts = len(x), weight.shape, out.shape[0]
    columns, tile, _ = tiles(rows, n, k, parts > 1)
    grid = (triton.cdiv(n, columns), parts)
    b = weight if bias is None else bias
    _few[grid](x, weight, b, out, rows, n, k, bias is not None, columns, tile, parts, MAX_ROWS, num_warps=4, num_stages=4)
