"""Products of one row with a matrix, with what comes before and after them: the norm of the row, the gate of the result, the sum
with the residual.

Bound by reading the matrix, and the latency of everything else. A program holds a few lines of the matrix in registers, all of
them under way before it waits for the row; nothing is split over columns, so that no second kernel has to add anything up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import pdl
from .rows import activate

NUMBERS = 8192  # of the matrix that a program of 4 warps holds: in two-byte types, 32 registers of each thread
COLUMNS = 4096  # of the matrix at a time, at most
PROGRAMS = 256  # at least, where there are lines enough: about two for each of a large card's 132 multiprocessors
MANY = 2048  # programs, where reading the row as often costs more than reading it in pieces


@triton.jit
def _product(
    x, norm, weight, bias, out, eps, N: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr, ADD: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With ACTIVATION, lines i and i + N/2 of the matrix are neighbours in a program, and one number comes out of the two."""
    pdl.release(PDL)
    n, k = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.arange(0, TILE)
    seen = n < N
    if ACTIVATION != "":
        n = n // 2 + n % 2 * (N // 2)
    line = weight + n.to(tl.int64)[:, None] * K
    w = tl.load(line + k[None, :], mask=seen[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    pdl.wait(PDL)
    acc, squares = tl.zeros((LINES, TILE), tl.float32), tl.zeros((TILE,), tl.float32)
    for start in range(0, K, TILE):
        at, after = start + k, start + TILE + k
        ahead = w
        if K > TILE:
            mask = seen[:, None] & (after < K)[None, :]
            ahead = tl.load(line + after[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        a = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        if NORM:
            squares += a * a
            a *= tl.load(norm + at, mask=at < K, other=0.0)
        acc += a[None, :] * w.to(tl.float32)
        w = ahead
    y = tl.sum(acc, axis=1)
    if NORM:
        y /= tl.sqrt(tl.sum(squares, axis=0) / K + eps)
    if BIASED:
        y += tl.load(bias + n, mask=seen, other=0.0)
    if ACTIVATION != "":
        gate, up = tl.split(tl.reshape(y, (LINES // 2, 2)))
        at = tl.program_id(0) * (LINES // 2) + tl.arange(0, LINES // 2)
        tl.store(out + at, (activate(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=at < N // 2)
    else:
        if ADD:
            y += tl.load(out + n, mask=seen, other=0.0).to(tl.float32)
        tl.store(out + n, y.to(out.dtype.element_ty), mask=seen)


def tiles(n: int, k: int, itemsize: int) -> tuple[int, int]:
    """-> lines of the matrix of a program, and how many of their columns it holds at a time."""
    tile = min(COLUMNS, max(16, triton.next_power_of_2(k)))
    lines = max(2, min(16, NUMBERS * 2 // itemsize // tile))
    while lines > 2 and triton.cdiv(n, lines) < PROGRAMS:
        lines //= 2
    while lines < 8 and tile >= 512 and triton.cdiv(n, lines) >= MANY:
        lines, tile = 2 * lines, tile // 2
    return lines, tile


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, norm: torch.Tensor | None = None,
    eps: float = 0.0, activation: str = "", add: bool = False,
) -> None:  # fmt: skip
    """out = y, where y = rmsnorm(x) · weightᵀ + bias, in float32 until it is stored.

    Args:
        x: (1, K), any float type; weight: (N, K); bias: (N,) float32.
        out: (1, N), any float type; (1, N / 2) with `activation`.
        norm: (K,) float32, the weight of the norm; None is none. Its `eps`.
        activation: out = activation(first half of y) · second half.
        add: out += y.
    """
    n, k = weight.shape
    lines, tile = tiles(n, k, weight.element_size())
    nothing = weight  # something to point at
    _product[(triton.cdiv(n, lines),)](
        x, nothing if norm is None else norm, weight, nothing if bias is None else bias, out, eps, n, k, norm is not None,
        bias is not None, activation, add, lines, tile, num_warps=4, **pdl.options(x.device),
    )  # fmt: skip
