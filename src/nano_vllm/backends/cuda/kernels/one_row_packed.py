"""Products of one row with a packed matrix, with what comes before and after them, as in `one_row`.

Bound by reading the matrix as long as a weight costs no more than two instructions: one that leaves its bits alone in a register
and one that multiplies them. A register whose upper eight bits are zero is, as a float32, its whole number times 2^-149 (a
denormal number, which the card multiplies as fast as others), wherever in it the bits are: the power of two goes into x, once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import pdl
from .packed import Packed
from .rows import activate

STAGES = {4: 6, 8: 4}  # by bits of a weight: blocks of lines of the matrix under way, at most
WAITING = 80 * 1024  # bytes of them, at most: below the shared memory that consumer cards have
UNITS = 4  # at most, of the columns of x; a thread keeps a group of 32 of each
PROGRAMS = 264  # of a matrix with enough lines: two for each of a large card's 132 multiprocessors; each reads x once
UP: tl.constexpr = tl.constexpr(75)  # x is multiplied by 2^75: numbers below 2^52 stay finite
DOWN: tl.constexpr = tl.constexpr(2.0**74)  # back from v · 2^-149 · x · 2^75


@triton.jit
def _words(quants, n, unit, N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr):
    """The quants of the lines n and a unit's groups of 32 columns, (OUTPUTS, GROUPS, WORDS) uint32."""
    at = unit * (GROUPS * WORDS) + tl.arange(0, GROUPS * WORDS)
    where = n.to(tl.int64)[:, None] * (K // 32 * WORDS) + at[None, :]
    seen = (n < N)[:, None] & (at < K // 32 * WORDS)[None, :]
    q = tl.load(quants + where, mask=seen, other=0, eviction_policy="evict_first")
    return tl.reshape(q, (n.shape[0], GROUPS, WORDS)).to(tl.uint32, bitcast=True)


@triton.jit
def _of_groups(plane, n, unit, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Scales or minima of the lines n for a unit's groups of 32 columns, float32 (OUTPUTS, GROUPS)."""
    EACH: tl.constexpr = GROUP // 32
    at = unit * (GROUPS // EACH) + tl.arange(0, GROUPS // EACH)
    where = n.to(tl.int64)[:, None] * (K // GROUP) + at[None, :]
    values = tl.load(plane + where, mask=(n < N)[:, None] & (at < K // GROUP)[None, :], other=0.0).to(tl.float32)
    if EACH > 1:
        values = tl.reshape(tl.broadcast_to(values[:, :, None], (n.shape[0], GROUPS // EACH, EACH)), (n.shape[0], GROUPS))
    return values


@triton.jit
def _columns(x, norm, at, FIRST: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, NORM: tl.constexpr):
    """-> the numbers that meet byte 0, 1, 2, 3 of each word, float32 (GROUPS, WORDS), and the sum of their squares before the
    norm's weight multiplied them. FIRST: the first column of a group."""
    w, i = tl.arange(0, WORDS)[None, :, None], tl.arange(0, 4)[None, None, :]
    where, seen = at[:, None, None] * 32 + FIRST + 4 * w + i, (at < K // 32)[:, None, None]
    a, squares = tl.load(x + where, mask=seen, other=0.0).to(tl.float32), 0.0
    if NORM:
        squares = tl.sum(tl.sum(tl.sum(a * a, axis=2), axis=1), axis=0)
        a *= tl.load(norm + where, mask=seen, other=0.0)
    even, odd = tl.split(tl.reshape(a, (at.shape[0], WORDS, 2, 2)))
    a0, a2 = tl.split(even)
    a1, a3 = tl.split(odd)
    return a0, a1, a2, a3, squares


@triton.jit
def _row(x, norm, at, K: tl.constexpr, FOUR: tl.constexpr, ZERO: tl.constexpr, NORM: tl.constexpr):
    """The columns `at` times 32 of x -> what `_sums` multiplies, with its first term; the sum over each group; of squares."""
    WORDS: tl.constexpr = 4 if FOUR else 8
    a0, a1, a2, a3, squares = _columns(x, norm, at, 0, K, WORDS, NORM)
    total = a0 + a1 + a2 + a3
    low = ((a0 * 2.0**UP)[None, :, :], (a1 * 2.0 ** (UP - 8))[None, :, :], (a2 * 2.0 ** (UP - 16))[None, :, :],
           (a3 * 2.0**UP)[None, :, :])  # fmt: skip
    high = low
    if FOUR:
        b0, b1, b2, b3, more = _columns(x, norm, at, 16, K, WORDS, NORM)
        total += b0 + b1 + b2 + b3
        squares += more
        high = ((b0 * 2.0 ** (UP - 4))[None, :, :], (b1 * 2.0 ** (UP - 12))[None, :, :], (b2 * 2.0 ** (UP - 20))[None, :, :],
                ((b3 - 16 * a3) * 2.0**UP)[None, :, :])  # fmt: skip
    total *= 1 / DOWN
    return low, high, (-ZERO * total)[None, :, :], tl.sum(total, axis=1)[None, :], squares


@triton.jit
def _alone(q, MASK: tl.constexpr):
    return (q & MASK).to(tl.float32, bitcast=True)


@triton.jit
def _shifted(q, BY: tl.constexpr):
    return (q >> BY).to(tl.float32, bitcast=True)


@triton.jit
def _sums(q, low, high, first, FOUR: tl.constexpr):
    """first + the sum over a word's columns of weight times x. The last byte of q4 is multiplied whole, as its lower half should
    be, and x of its upper half has made up for that."""
    if FOUR:
        sums = first + _alone(q, 0xF) * low[0] + _alone(q, 0xF00) * low[1] + _alone(q, 0xF0000) * low[2]
        sums = sums + _alone(q, 0xF0) * high[0] + _alone(q, 0xF000) * high[1] + _alone(q, 0xF00000) * high[2]
        return sums + _shifted(q, 24) * low[3] + _shifted(q, 28) * high[3]
    u = q ^ 0x80808080  # from signed numbers to 128 more
    return first + _alone(u, 0xFF) * low[0] + _alone(u, 0xFF00) * low[1] + _alone(u, 0xFF0000) * low[2] + _shifted(u, 24) * low[3]


@triton.jit
def _product(
    x, norm, quants, scales, mins, bias, out, eps, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    MINIMUM: tl.constexpr, NORM: tl.constexpr, BIASED: tl.constexpr, ACTIVATION: tl.constexpr, ADD: tl.constexpr,
    OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program keeps x, UNITS times GROUPS times 32 columns, in registers and goes through lines of the matrix, OUTPUTS at a
    time, the next ones under way. With ACTIVATION, lines i and i + N/2 are neighbours, and one number comes out of the two."""
    pdl.wait(PDL)
    pdl.release(PDL)  # not before: programs of kernels that wait, several deep, would lie unevenly over the card
    WORDS: tl.constexpr = 4 if FOUR else 8  # of 32 columns
    ZERO: tl.constexpr = 0.0 if MINIMUM else 8.0 if FOUR else 128.0  # the whole number of no weight
    lows, highs, firsts, groups, squares = (), (), (), (), 0.0
    for unit in tl.static_range(UNITS):
        low, high, first, group, more = _row(x, norm, unit * GROUPS + tl.arange(0, GROUPS), K, FOUR, ZERO, NORM)
        lows, highs, firsts, groups = lows + (low,), highs + (high,), firsts + (first,), groups + (group,)
        squares += more
    factor = DOWN
    if NORM:
        factor = DOWN / tl.sqrt(squares / K + eps)
    for block in tl.range(tl.program_id(0), (N + OUTPUTS - 1) // OUTPUTS, tl.num_programs(0), num_stages=STAGES):
        n = block * OUTPUTS + tl.arange(0, OUTPUTS)
        if ACTIVATION != "":
            n = tl.where(n < N, n // 2 + n % 2 * (N // 2), N)
        acc = tl.zeros((OUTPUTS, GROUPS), tl.float32)
        for unit in tl.static_range(UNITS):
            q = _words(quants, n, unit, N, K, GROUPS, WORDS)
            sums = tl.sum(_sums(q, lows[unit], highs[unit], firsts[unit], FOUR), axis=2)
            acc += sums * _of_groups(scales, n, unit, N, K, GROUP, GROUPS)
            if MINIMUM:
                acc += groups[unit] * _of_groups(mins, n, unit, N, K, GROUP, GROUPS)
        y = tl.sum(acc, axis=1) * factor
        if BIASED:
            y += tl.load(bias + n, mask=n < N, other=0.0)
        if ACTIVATION != "":
            gate, up = tl.split(tl.reshape(y, (OUTPUTS // 2, 2)))
            to = block * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
            tl.store(out + to, (activate(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=to < N // 2)
        else:
            if ADD:
                y += tl.load(out + n, mask=n < N, other=0.0).to(tl.float32)
            tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)


def tiles(k: int, group: int, bits: int) -> tuple[int, int, int, int, int]:
    """-> lines of the matrix at a time, groups of 32 columns of a unit, units, stages, warps of a program."""
    found = ((count, triton.next_power_of_2(triton.cdiv(k // 32, count))) for count in range(1, UNITS + 1))
    count, groups = min(found, key=lambda unit: unit[0] * unit[1])  # as few in vain as can be
    warps, line = min(16, max(4, groups // 32)), groups * count * 4 * bits
    outputs = 4 if 4 * groups * 32 // group >= 64 * warps else 8  # so that two scales at least are copied by a thread at once
    while outputs > 2 and 3 * outputs * line > WAITING:
        outputs //= 2
    return outputs, groups, count, max(2, min(STAGES[bits], 1 + WAITING // (outputs * line))), warps


def product(
    x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, out: torch.Tensor, norm: torch.Tensor | None = None,
    eps: float = 0.0, activation: str = "", add: bool = False,
) -> None:  # fmt: skip
    """As `one_row.product`; what is added to is float32."""
    n, k = weight.shape
    outputs, groups, units, stages, warps = tiles(k, weight.group, 4 if weight.four_bits else 8)
    nothing = x  # something to point at
    _product[(min(PROGRAMS, triton.cdiv(n, outputs)),)](
        x, nothing if norm is None else norm, weight.quants.view(torch.int32), weight.scales,
        weight.scales if weight.mins is None else weight.mins, nothing if bias is None else bias, out, eps, n, k, weight.group,
        weight.four_bits, weight.mins is not None, norm is not None, bias is not None, activation, add, outputs, groups, units,
        stages, num_warps=warps, **pdl.options(x.device),
    )  # fmt: skip
