"""Matrices that stay packed on the device, in the formats q8 and q4 (`formats/`): unpacked in registers up to some hundred rows,
above a piece at a time for a product by PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._dot import dot
from .linear import MAX_PARTS, PROGRAMS
from .linear import MAX_ROWS as EXACT_ROWS

FORMATS = ("q4", "q8")
COLUMNS = 1024  # of a program that unpacks
MAX_ROWS = {"q4": 64, "q8": 64}  # that unpack in registers; above, a product by PyTorch with what was unpacked
MAX_PART_ROWS = 256  # rows times parts of a sum: what `parts` leaves is read again
OUTPUTS, BLOCKS, MAX_TILE_ROWS = 64, 4, 128  # of a program that unpacks in registers


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
def _several(
    x, quants, scales, mins, bias, out, rows, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    MINIMUM: tl.constexpr, BIASED: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """BLOCKS times 32 columns at a time. The sums are kept transposed: the weights, unpacked in registers, are then the operand
    that the matrix unit takes from there, and few rows waste none of it. The halves of q4's bytes are products of their own, so
    a byte is loaded once and no nibble moves to another thread."""
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    BYTES: tl.constexpr = 16 if FOUR else 32  # of 32 columns
    part, b, j, c = tl.program_id(2), tl.arange(0, BLOCKS), tl.arange(0, BYTES), tl.arange(0, BLOCKS * BYTES)
    each: tl.constexpr = (K // 32 + PARTS * BLOCKS - 1) // (PARTS * BLOCKS) * BLOCKS
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    line = n.to(tl.int64)
    for start in range(0, each, BLOCKS):
        first = part * each + start
        at = first + b
        seen = (n < N)[:, None] & (at < K // 32)[None, :]
        where = line[:, None, None] * (K // 32 * BYTES) + (at[:, None] * BYTES + j[None, :])[None, :, :]
        q = tl.load(quants + where, mask=seen[:, :, None], other=0)
        group = line[:, None] * (K // GROUP) + (at // (GROUP // 32))[None, :]
        # Four scales of groups of 32 are copied asynchronously; of larger groups, a line of the cache serves many rounds.
        scale = tl.load(scales + group, mask=seen, other=0.0).to(tl.float32)[:, :, None]
        column = (first + c // BYTES) * 32 + c % BYTES
        have = (r < rows)[:, None] & (first + c // BYTES < K // 32)[None, :]
        source = x + r[:, None] * K + column[None, :]
        least = 0.0
        if MINIMUM:
            least = tl.load(mins + group, mask=seen, other=0.0).to(tl.float32)[:, :, None]
        if FOUR:
            zero: tl.constexpr = 0.0 if MINIMUM else 8.0
            w = ((_float(q & 15) - zero) * scale + least).to(x.dtype.element_ty)
            acc += dot(tl.reshape(w, (OUTPUTS, BLOCKS * BYTES)), tl.trans(tl.load(source, mask=have, other=0.0)))
            w = ((_float(q >> 4) - zero) * scale + least).to(x.dtype.element_ty)
            acc += dot(tl.reshape(w, (OUTPUTS, BLOCKS * BYTES)), tl.trans(tl.load(source + 16, mask=have, other=0.0)))
        else:
            w = (q.to(tl.float32) * scale + least).to(x.dtype.element_ty)
            acc += dot(tl.reshape(w, (OUTPUTS, BLOCKS * BYTES)), tl.trans(tl.load(source, mask=have, other=0.0)))
    y = tl.trans(acc)
    if BIASED and part == 0:
        y += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    to = out + (part * rows + r[:, None]).to(tl.int64) * N + n[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["first", "lines"])
def _unpack(
    quants, scales, mins, tokens, sources, last_ids, out, first, lines, K: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    MINIMUM: tl.constexpr, GATHER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    row = first + line
    if GATHER:
        source = tl.load(sources + line)
        row = tl.load(tokens + line)
        if source >= 0:
            row = tl.maximum(tl.load(last_ids + source), 0)
        row -= first
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    seen = column < K
    at = row.to(tl.int64) + tl.zeros((COLUMNS,), tl.int64)
    values = _values(quants, scales, mins, at, column, seen & (row >= 0) & (row < lines), K, GROUP, FOUR, MINIMUM)
    tl.store(out + line.to(tl.int64) * K + column, values.to(out.dtype.element_ty), mask=seen)


def _planes(weight: Packed) -> tuple[torch.Tensor, ...]:
    return weight.quants, weight.scales, weight.scales if weight.mins is None else weight.mins


def max_rows(weight: Packed, dtype: torch.dtype) -> int:
    """Rows of `dtype` that `linear` takes: few of float32, which matrix units do not multiply exactly."""
    if dtype == torch.float32:
        return EXACT_ROWS
    return MAX_ROWS["q4" if weight.four_bits else "q8"]


def parts(rows: int, n: int, k: int) -> int:
    """How many parts of the sum over columns pay, of a product whose `out` may keep them apart; see `linear`."""
    found, most = 1, min(MAX_PARTS, MAX_PART_ROWS // rows)
    programs = triton.cdiv(n, OUTPUTS) * triton.cdiv(rows, MAX_TILE_ROWS)
    while 2 * found <= most and found * programs < PROGRAMS // 2 and 2 * found * 256 <= k:
        found *= 2
    return found


def linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """As `linear.linear`: x (rows, K), 1 to `max_rows` rows; out (parts, rows, N). For one row see `one_row_packed`."""
    (rows, k), n, count = x.shape, weight.shape[0], out.shape[0]
    b = x if bias is None else bias
    how = (n, k, weight.group, weight.four_bits, weight.mins is not None, bias is not None)
    tile = min(MAX_TILE_ROWS, max(16, triton.next_power_of_2(rows)))
    stages = 4 if tile < MAX_TILE_ROWS else 2  # below the 99 KiB of shared memory that consumer cards have
    grid = (triton.cdiv(rows, tile), triton.cdiv(n, OUTPUTS), count)
    _several[grid](x, *_planes(weight), b, out, rows, *how, OUTPUTS, BLOCKS, count, tile, num_warps=4, num_stages=stages)


def unpack(weight: Packed, first: int, out: torch.Tensor) -> None:
    """out (n, K) = rows `first` to `first` + n of the matrix."""
    k = weight.shape[1]
    how = (weight.shape[0], k, weight.group, weight.four_bits, weight.mins is not None, False, COLUMNS)
    scales = weight.scales  # stands for the arguments that are not read
    _unpack[(len(out), triton.cdiv(k, COLUMNS))](*_planes(weight), scales, scales, scales, out, first, *how, num_warps=4)


def embed(
    table: Packed, tokens: torch.Tensor, sources: torch.Tensor, last_ids: torch.Tensor, out: torch.Tensor, first: int = 0
) -> None:
    """As `rows.embed`."""
    lines, k = table.shape
    how = (first, lines, k, table.group, table.four_bits, table.mins is not None, True, COLUMNS)
    _unpack[(len(out), triton.cdiv(k, COLUMNS))](*_planes(table), tokens, sources, last_ids, out, *how, num_warps=4)
