"""Attention over the paged cache. Sequences with one row in the step take `decode`, split over keys; others tiles of queries
(prefill.py). Both handle grouped heads (the heads of a kv head share its keys in one tile) and sliding windows.

Softmax is taken in base 2 with a running maximum (Milakov & Gimelshein 2018). Scores and sums are float32; products are of the
cache's type where q has it too, of q's where the cache has scales, and of float32 otherwise. What a row must not see is not
loaded, or has weight 0 and is the sequence's own. The scale of a key multiplies its scores, that of a value its weight: the
numbers need no more than a conversion.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import decode_int8, pdl
from ._dot import INTERPRETED, dot, to
from .cache import UNITS, KVCache, line

LOWEST = tl.constexpr(-1.0e30)
LOG2E = 1.4426950408889634
# Programs that fill a large card: two for each of 132 multiprocessors. Interpreted, they run one after the other.
PROGRAMS = 16 if INTERPRETED.value else 264
MAX_SPLITS = 32


@triton.jit
def _lines(table, position, seen, kv, KV: tl.constexpr, BLOCK: tl.constexpr):
    """Lines of positions in the cache, through the sequence's row of the block table."""
    return line(tl.load(table + position // BLOCK, mask=seen, other=0), position % BLOCK, kv, KV, BLOCK)


@triton.jit
def _tile(
    q, m, mass, acc, keys, values, key_scales, value_scales, table, start, end, low, last, kv, scale,
    BLOCK: tl.constexpr, KV: tl.constexpr, SCALED: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One tile of keys from `start`. With WHOLE, every row sees all of them. Else keys from `end` on are not loaded, nor those
    under `low`; with CAUSAL each row sees keys up to its own `last`, (rows,), within WINDOW. `scale` is positive."""
    position = start + tl.arange(0, TILE)
    d = tl.arange(0, PADDED)
    seen = (position < end) & (position >= low)
    if WHOLE:
        seen = tl.full((TILE,), True, tl.int1)
    at_scale = _lines(table, position, seen, kv, KV, BLOCK)
    at = at_scale[:, None] * SIZE + d[None, :]
    mask = seen[:, None] & (d < SIZE)[None, :]
    k = to(tl.load(keys + at, mask=mask, other=0.0), q.dtype)
    scores = dot(q, tl.trans(k))
    if SCALED:
        scores = scores * tl.load(key_scales + at_scale, mask=seen, other=0.0)[None, :]
    if not WHOLE:
        visible = seen[None, :]
        if CAUSAL:
            visible = visible & (position[None, :] <= last[:, None])
            if WINDOW:
                visible = visible & (position[None, :] > last[:, None] - WINDOW)
        scores = tl.where(visible, scores, LOWEST)
    m, p, share = softmax(scores, m, scale)
    if not WHOLE:  # of a row that has seen nothing yet, the rounding of LOWEST · scale would be left
        p = tl.where(visible, p, 0.0)
    mass = mass * share + tl.sum(p, axis=1)
    v = to(tl.load(values + at, mask=mask, other=0.0), q.dtype)
    if SCALED:
        v_scale = tl.load(value_scales + at_scale, mask=seen, other=0.0)
        if q.dtype == tl.float16:  # which small weights would leave
            v = (v * v_scale[:, None]).to(q.dtype)
        else:
            p = p * v_scale[None, :]
    acc = acc * share[:, None] + dot(p.to(q.dtype), v)
    return m, mass, acc


@triton.jit
def softmax(scores, m, scale):
    """-> the new maximum of each row, the weights under it, and what sums under the old one are worth."""
    highest = tl.maximum(m, tl.max(scores, axis=1) * scale)
    return highest, tl.exp2(scores * scale - highest[:, None]), tl.exp2(m - highest)  # one multiply-add a weight


@triton.jit
def _decode(
    qkv, keys, values, key_scales, value_scales, out, sums, table, stride, rows, sequences, positions, scale,
    QKV: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, KV: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.release(PDL)
    kv, item, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + item).to(tl.int64)
    if row < 0:
        pdl.wait(PDL)
        return
    table += tl.load(sequences + item).to(tl.int64) * tl.load(stride)
    length = tl.load(positions + row) + 1
    low = 0
    if WINDOW:
        low = tl.maximum(length - WINDOW, 0)
    each = tl.cdiv(tl.cdiv(length - low, SPLITS), TILE) * TILE
    start = low + split * each
    end = tl.minimum(start + each, length)
    g, d = tl.arange(0, ROWS), tl.arange(0, PADDED)
    inside = (g < GROUP)[:, None] & (d < SIZE)[None, :]
    head = kv * GROUP + g
    pdl.wait(PDL)
    q = tl.load(qkv + row * QKV + head[:, None] * SIZE + d[None, :], mask=inside, other=0.0).to(KIND)
    m = tl.full((ROWS,), LOWEST, tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PADDED), tl.float32)
    for first in range(start, end, TILE):
        m, mass, acc = _tile(
            q, m, mass, acc, keys, values, key_scales, value_scales, table, first, end, 0, m, kv, scale,
            BLOCK, KV, SCALED, SIZE, PADDED, TILE, 0, False, False,
        )  # fmt: skip
    if SPLITS == 1:
        at = row * OUT + head[:, None] * SIZE + d[None, :]
        tl.store(out + at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        part = ((item.to(tl.int64) * KV + kv) * GROUP + g) * SPLITS + split
        tl.store(out + part[:, None] * SIZE + d[None, :], acc, mask=inside)
        tl.store(sums + 2 * part, m, mask=g < GROUP)
        tl.store(sums + 2 * part + 1, mass, mask=g < GROUP)


@triton.jit
def _merge(
    parts, sums, out, rows, OUT: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.release(PDL)
    item, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + item).to(tl.int64)
    pdl.wait(PDL)
    if row < 0:
        return
    s, d = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    part = (item.to(tl.int64) * HEADS + head) * SPLITS + s
    m, mass = tl.load(sums + 2 * part), tl.load(sums + 2 * part + 1)
    share = tl.exp2(m - tl.max(m, axis=0))
    acc = tl.load(parts + part[:, None] * SIZE + d[None, :], mask=(d < SIZE)[None, :], other=0.0)
    merged = tl.sum(acc * share[:, None], axis=0) / tl.sum(mass * share, axis=0)
    tl.store(out + row * OUT + head * SIZE + d, merged.to(out.dtype.element_ty), mask=d < SIZE)


def splits(items: int, kv_heads: int, programs: int = PROGRAMS) -> int:
    """Into how many ranges of keys each of `items` sequences is split, so that the programs fill a card."""
    return min(MAX_SPLITS, triton.next_power_of_2(max(1, -(-programs // max(1, items * kv_heads)))))


def scratch(max_items: int, heads: int, kv_heads: int, size: int) -> int:
    """float32 numbers that `decode` needs beside its output, for up to `max_items` sequences."""
    most = max(PROGRAMS, decode_int8.PROGRAMS)
    return max(n * heads * splits(n, kv_heads, most) * (size + 2) for n in range(1, max_items + 1))


def exact(q: torch.dtype, cache: torch.dtype) -> bool:
    """Whether products are in float32."""
    return q == torch.float32 or (q != cache and cache not in UNITS)


def _kind(q: torch.dtype, cache: torch.dtype):
    return tl.float32 if exact(q, cache) else {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[q]


def decode(
    qkv: torch.Tensor, cache: KVCache, out: torch.Tensor, table: torch.Tensor, stride: torch.Tensor,
    rows: torch.Tensor, sequences: torch.Tensor, positions: torch.Tensor, space: torch.Tensor,
    scale: float, window: int | None, heads: int,
) -> None:  # fmt: skip
    """Attention of sequences with one row each.

    Args:
        qkv: (all rows, at least heads · size), q first.
        out: (all rows, heads · size); only the rows named are written.
        table: int32 block ids, the row of a sequence `stride` (one int32 on the device) entries after the one before.
        rows, sequences: (items,) int32; an item with the row -1 is nothing.
        positions: (all rows,) int32.
        space: float32, at least `scratch` numbers.
    """
    _, kv_heads, block_size, size = cache.keys.shape
    scales = cache.scales if cache.units else cache.planes  # something to point at
    items, group, padded = len(rows), heads // kv_heads, max(16, triton.next_power_of_2(size))
    whole, early = decode_int8.takes(qkv.dtype, cache, group), pdl.options(qkv.device)
    count = splits(items, kv_heads, decode_int8.PROGRAMS if whole else PROGRAMS)
    parts, sums = (space, space[items * heads * count * size :]) if count > 1 else (out, space)
    paged = parts, sums, table, stride, rows, sequences, positions, scale * LOG2E
    sizes = qkv.stride(0), out.stride(0), block_size, kv_heads
    if whole:
        lanes, words = triton.next_power_of_2(group), triton.next_power_of_2(size // 4)
        tile, warps = decode_int8.tile(words, block_size)
        decode_int8._decode[(kv_heads, items, count)](
            qkv, *(plane.view(torch.int32) for plane in cache.planes), *scales, *paged, *sizes, group, lanes, size, words, tile,
            window or 0, count, num_warps=warps, **early,
        )  # fmt: skip
    else:
        kind, lanes = _kind(qkv.dtype, cache.keys.dtype), max(16, triton.next_power_of_2(group))
        tile, warps = (16, 2) if kind == tl.float32 or padded > 128 else (64, 4)
        _decode[(kv_heads, items, count)](
            qkv, *cache.planes, *scales, *paged, *sizes, cache.units > 0, group, lanes, size, padded, tile, window or 0, count,
            kind, num_warps=warps, num_stages=3, **early,
        )  # fmt: skip
    if count > 1:
        _merge[(items, heads)](parts, sums, out, rows, out.stride(0), heads, size, padded, count, num_warps=2, **early)
