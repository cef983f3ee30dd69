"""Matrices that stay packed on the device, in the formats q8 and q4 (`formats/`): unpacked in registers up to some hundred rows,
above a piece at a time for a product by PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import pdl
from ._dot import dot
from .linear import MAX_PARTS, PROGRAMS
from .linear import MAX_ROWS as EXACT_ROWS

FORMATS = ("q4", "q8")
COLUMNS = 1024  # of a program that unpacks
MAX_ROWS = {"q4": 64, "q8": 64}  # that unpack in registers; above, a product by PyTorch with what was unpacked
MAX_PART_ROWS = 256  # rows times parts of a sum: what `parts` leaves is read again
ONE_OUTPUTS, ONE_GROUPS = 4, 128  # of a program for one row
ONE_PROGRAMS = 264  # two for each of a large card's 132 multiprocessors: each reads x once
OUTPUTS, BLOCKS, MAX_TILE_ROWS = 64, 4, 128  # of a program for several rows


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
def _words(quants, block, at, N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, WORDS: tl.constexpr):
    """The quants of OUTPUTS lines and the groups `at` of 32 columns, (OUTPUTS, GROUPS, WORDS) uint32."""
    n = block * OUTPUTS + tl.arange(0, OUTPUTS)
    seen = (n < N)[:, None, None] & (at < K // 32)[None, :, None]
    where = n.to(tl.int64)[:, None, None] * (K // 32 * WORDS) + (at[:, None] * WORDS + tl.arange(0, WORDS)[None, :])[None, :, :]
    return tl.load(quants + where, mask=seen, other=0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)


@triton.jit
def _column(x, at, i: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr):
    """float32 (1, GROUPS, WORDS): the number that meets byte i of each word."""
    where = at[None, :, None] * 32 + 4 * tl.arange(0, WORDS)[None, None, :] + i
    return tl.load(x + where, mask=(at < K // 32)[None, :, None], other=0.0).to(tl.float32)


@triton.jit
def _placed(q, FROM: tl.constexpr, BITS: tl.constexpr):
    """1 + v / 2^BITS as float32, v the BITS bits of `q` from FROM on: they become the highest of the fraction."""
    TO: tl.constexpr = 23 - BITS
    moved = q
    if FROM < TO:
        moved = q << (TO - FROM)
    elif FROM > TO:
        moved = q >> (FROM - TO)
    mask: tl.constexpr = ((1 << BITS) - 1) << TO
    return ((moved & mask) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _one(
    x, quants, scales, mins, bias, out, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    MINIMUM: tl.constexpr, BIASED: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row. A program keeps its part of x, GROUPS times 32 columns, in registers and goes through lines of the matrix, OUTPUTS
    at a time, the next ones under way. A whole number v becomes 1 + v / 2^bits by a shift and a logical operation; what this
    adds to the sum over a thread's columns is a multiple of the sum of x. A scale is applied once to such a sum."""
    pdl.release(PDL)
    BITS: tl.constexpr = 4 if FOUR else 8
    WORDS: tl.constexpr = BITS  # of 32 columns
    part = tl.program_id(1)
    at = part * GROUPS + tl.arange(0, GROUPS)  # of 32 columns
    block = tl.program_id(0)
    q = _words(quants, block, at, N, K, OUTPUTS, WORDS)
    pdl.wait(PDL)
    a0, a1, a2, a3 = (_column(x, at, 0, K, WORDS), _column(x, at, 1, K, WORDS), _column(x, at, 2, K, WORDS),
                      _column(x, at, 3, K, WORDS))  # fmt: skip
    total = a0 + a1 + a2 + a3
    if FOUR:
        b0, b1, b2, b3 = (_column(x, at, 16, K, WORDS), _column(x, at, 17, K, WORDS), _column(x, at, 18, K, WORDS),
                          _column(x, at, 19, K, WORDS))  # fmt: skip
        total += b0 + b1 + b2 + b3
    zero: tl.constexpr = 1.0 if MINIMUM else 1.5  # v / 2^bits of no weight: with a minimum none, else half
    for start in range(block, (N + OUTPUTS - 1) // OUTPUTS, PROGRAMS):
        ahead = _words(quants, start + PROGRAMS, at, N, K, OUTPUTS, WORDS)
        n = start * OUTPUTS + tl.arange(0, OUTPUTS)
        group = n.to(tl.int64)[:, None] * (K // GROUP) + (at // (GROUP // 32))[None, :]
        seen = (n < N)[:, None] & (at < K // 32)[None, :]
        scale = tl.load(scales + group, mask=seen, other=0.0).to(tl.float32)[:, :, None]
        if FOUR:
            sums = _placed(q, 0, 4) * a0 + _placed(q, 8, 4) * a1 + _placed(q, 16, 4) * a2 + _placed(q, 24, 4) * a3
            sums += _placed(q, 4, 4) * b0 + _placed(q, 12, 4) * b1 + _placed(q, 20, 4) * b2 + _placed(q, 28, 4) * b3
        else:
            u = q ^ 0x80808080  # from signed numbers to 128 more
            sums = _placed(u, 0, 8) * a0 + _placed(u, 8, 8) * a1 + _placed(u, 16, 8) * a2 + _placed(u, 24, 8) * a3
        acc = scale * ((sums - zero * total) * (2.0**BITS))
        if MINIMUM:
            acc += tl.load(mins + group, mask=seen, other=0.0).to(tl.float32)[:, :, None] * total
        y = tl.sum(tl.sum(acc, axis=2), axis=1)
        if BIASED and part == 0:
            y += tl.load(bias + n, mask=n < N, other=0.0)
        tl.store(out + part * N + n, y.to(out.dtype.element_ty), mask=n < N)
        q = ahead


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
    if rows == 1:
        return min(MAX_PARTS, triton.cdiv(k // 32, ONE_GROUPS))
    found, most = 1, min(MAX_PARTS, MAX_PART_ROWS // rows)
    programs = triton.cdiv(n, OUTPUTS) * triton.cdiv(rows, MAX_TILE_ROWS)
    while 2 * found <= most and found * programs < PROGRAMS // 2 and 2 * found * 256 <= k:
        found *= 2
    return found


def linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """As `linear.linear`: x (rows, K), 1 to `max_rows` rows; out (parts, rows, N)."""
    (rows, k), n, count = x.shape, weight.shape[0], out.shape[0]
    b = x if bias is None else bias
    how = (n, k, weight.group, weight.four_bits, weight.mins is not None, bias is not None)
    if rows == 1:
        groups, quants, *others = triton.next_power_of_2(triton.cdiv(k // 32, count)), *_planes(weight)
        programs = min(triton.cdiv(ONE_PROGRAMS, count), triton.cdiv(n, ONE_OUTPUTS))
        warps = min(16, max(4, groups // 32))  # a thread keeps the x of one group
        _one[(programs, count)](
            x, quants.view(torch.int32), *others, b, out, *how, ONE_OUTPUTS, groups, count, programs, num_warps=warps,
            **pdl.options(x.device),
        )  # fmt: skip
        return
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
