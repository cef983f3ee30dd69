"""Matrices that stay packed on the device, in the formats q8 and q4 (`formats/`): unpacked in registers where few rows meet
them, else a piece at a time for a product by PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._dot import dot
from .linear import MAX_ROWS, tiles

FORMATS = ("q4", "q8")
COLUMNS = 1024  # of a program that unpacks


@dataclass(frozen=True)
class Packed:
    """An (N, K) matrix.

    Attributes:
        quants: (N, K) int8, or (N, K / 2) uint8 of q4.
        scales: (N, K / group) float16; mins: the same, or None.
    """

    shape: tuple[int, int]
    quants: torch.Tensor
    scales: torch.Tensor
    mins: torch.Tensor | None

    @property
    def four_bits(self) -> bool:
        return self.quants.dtype == torch.uint8

    @property
    def group(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.quants, self.scales, self.mins) if t is not None)


@triton.jit
def _float(q):
    """Whole numbers 0 to 255 -> float32, without the slow conversion: as the last bits of 2^23."""
    return (q.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _one(
    x, quants, scales, mins, bias, out, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    MINIMUM: tl.constexpr, BIASED: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One row, GROUPS times 32 columns at a time: a scale is applied once to the sum of a thread's columns."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part, g, j = tl.program_id(1), tl.arange(0, GROUPS), tl.arange(0, 16)
    each: tl.constexpr = (K // 32 + PARTS * GROUPS - 1) // (PARTS * GROUPS) * GROUPS
    acc = tl.zeros((OUTPUTS, GROUPS, 16), tl.float32)
    rows = n.to(tl.int64)
    for start in range(0, each, GROUPS):
        at = part * each + start + g  # of 32 columns
        inside = at < K // 32
        seen = (n < N)[:, None] & inside[None, :]
        scale = tl.load(scales + rows[:, None] * (K // GROUP) + (at * 32 // GROUP)[None, :], mask=seen, other=0.0)
        column = at[:, None] * 32 + j[None, :]
        a = tl.load(x + column, mask=inside[:, None], other=0.0).to(tl.float32)[None, :, :]
        b = tl.load(x + column + 16, mask=inside[:, None], other=0.0).to(tl.float32)[None, :, :]
        if FOUR:
            where = rows[:, None, None] * (K // 2) + (at[:, None] * 16 + j[None, :])[None, :, :]
            q = tl.load(quants + where, mask=seen[:, :, None], other=0)
            low, high = _float(q & 15), _float(q >> 4)
            if not MINIMUM:
                low, high = low - 8.0, high - 8.0
        else:
            where = rows[:, None, None] * K + column[None, :, :]
            low = tl.load(quants + where, mask=seen[:, :, None], other=0).to(tl.float32)
            high = tl.load(quants + where + 16, mask=seen[:, :, None], other=0).to(tl.float32)
        acc += scale.to(tl.float32)[:, :, None] * (low * a + high * b)
        if MINIMUM:
            least = tl.load(mins + rows[:, None] * (K // GROUP) + (at * 32 // GROUP)[None, :], mask=seen, other=0.0)
            acc += least.to(tl.float32)[:, :, None] * (a + b)
    y = tl.sum(tl.sum(acc, axis=2), axis=1)
    if BIASED and part == 0:
        y += tl.load(bias + n, mask=n < N, other=0.0)
    tl.store(out + part * N + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _values(
    quants, scales, mins, row, column, seen, K: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr, MINIMUM: tl.constexpr
):
    """float32 numbers at rows and columns, tensors of one shape."""
    if FOUR:
        byte = tl.load(quants + row * (K // 2) + column // 32 * 16 + column % 16, mask=seen, other=0)
        q = _float((byte >> ((column % 32) // 16 * 4).to(tl.uint8)) & 15)
        if not MINIMUM:
            q -= 8.0
    else:
        q = tl.load(quants + row * K + column, mask=seen, other=0).to(tl.float32)
    at = row * (K // GROUP) + column // GROUP
    values = q * tl.load(scales + at, mask=seen, other=0.0).to(tl.float32)
    if MINIMUM:
        values += tl.load(mins + at, mask=seen, other=0.0).to(tl.float32)
    return values


@triton.jit(do_not_specialize=["rows"])
def _few(
    x, quants, scales, mins, bias, out, rows, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    MINIMUM: tl.constexpr, BIASED: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part, k, r = tl.program_id(1), tl.arange(0, TILE), tl.arange(0, ROWS)
    each: tl.constexpr = (K + PARTS * TILE - 1) // (PARTS * TILE) * TILE
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    line = n.to(tl.int64)[:, None] + tl.zeros((OUTPUTS, TILE), tl.int64)
    for start in range(0, each, TILE):
        at = part * each + start + k
        seen = (n < N)[:, None] & (at < K)[None, :]
        column = at[None, :] + tl.zeros((OUTPUTS, TILE), tl.int32)
        w = _values(quants, scales, mins, line, column, seen, K, GROUP, FOUR, MINIMUM)
        a = tl.load(x + r[:, None] * K + at[None, :], mask=(r < rows)[:, None] & (at < K)[None, :], other=0.0)
        acc += dot(a, tl.trans(w.to(x.dtype.element_ty)))
    if BIASED and part == 0:
        acc += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    to = out + (part * rows + r[:, None]) * N + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["first"])
def _unpack(
    quants, scales, mins, tokens, sources, last_ids, out, first, K: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    MINIMUM: tl.constexpr, GATHER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    row = first + line
    if GATHER:
        source = tl.load(sources + line)
        row = tl.load(tokens + line)
        if source >= 0:
            row = tl.maximum(tl.load(last_ids + source), 0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    seen = column < K
    at = row.to(tl.int64) + tl.zeros((COLUMNS,), tl.int64)
    values = _values(quants, scales, mins, at, column, seen, K, GROUP, FOUR, MINIMUM)
    tl.store(out + line.to(tl.int64) * K + column, values.to(out.dtype.element_ty), mask=seen)


def _planes(weight: Packed) -> tuple[torch.Tensor, ...]:
    return weight.quants, weight.scales, weight.scales if weight.mins is None else weight.mins


def linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """As `linear.linear`: x (rows, K), 1 to MAX_ROWS rows; out (parts, rows, N)."""
    (rows, k), n, parts = x.shape, weight.shape[0], out.shape[0]
    outputs, tile, _ = tiles(rows, n, k, parts > 1)
    grid, b = (triton.cdiv(n, outputs), parts), x if bias is None else bias
    how = (n, k, weight.group, weight.four_bits, weight.mins is not None, bias is not None, outputs)
    if rows == 1:
        # up to 4 loads of 16 bytes under way in a thread, and as many sums in registers as their columns
        groups = min(512 // outputs, triton.next_power_of_2(triton.cdiv(k // 32, parts)))
        _one[grid](x, *_planes(weight), b, out, *how, groups, parts, num_warps=4)
    else:
        _few[grid](x, *_planes(weight), b, out, rows, *how, tile, parts, MAX_ROWS, num_warps=4, num_stages=4)


def unpack(weight: Packed, first: int, out: torch.Tensor) -> None:
    """out (n, K) = rows `first` to `first` + n of the matrix."""
    k = weight.shape[1]
    how = (k, weight.group, weight.four_bits, weight.mins is not None, False, COLUMNS)
    scales = weight.scales  # stands for the arguments that are not read
    _unpack[(len(out), triton.cdiv(k, COLUMNS))](*_planes(weight), scales, scales, scales, out, first, *how, num_warps=4)


def embed(table: Packed, tokens: torch.Tensor, sources: torch.Tensor, last_ids: torch.Tensor, out: torch.Tensor) -> None:
    """As `rows.embed`."""
    k = table.shape[1]
    how = (k, table.group, table.four_bits, table.mins is not None, True, COLUMNS)
    _unpack[(len(out), triton.cdiv(k, COLUMNS))](*_planes(table), tokens, sources, last_ids, out, 0, *how, num_warps=4)
