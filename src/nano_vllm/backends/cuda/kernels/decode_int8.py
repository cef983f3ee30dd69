"""Attention of sequences with one row each over a cache in int8: `attention.decode` for few heads to a key.

A matrix unit would want the numbers in another type and order: converting them takes longer than reading them. Here they stay in
the registers that they were loaded into. q is rounded, too, to whole numbers of 15 bits in two planes (nearer than bfloat16 is),
so that scores are sums of whole numbers, four products to an instruction; values are weighted in float32.

Each of a program's TILE softmaxes takes every TILE-th key, so that a thread keeps its sums to itself; they are merged at the end.
A tile is never of two blocks: where it lies is one number for all threads.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl

from . import pdl
from ._dot import INTERPRETED, PTX
from .cache import KVCache, line

MAX_GROUP = 4  # heads to a key: with more, the arithmetic takes longer than reading
WARPS = 2
PROGRAMS = 16 if INTERPRETED.value else 1024  # that fill a large card: eight for each of 132 multiprocessors, nearly
UNITS = tl.constexpr(16256)  # of the largest number of q: 127 · 128
SIGNS = tl.constexpr(-2139062144)  # 0x80808080


@triton.jit
def _byte(word, BYTE: tl.constexpr):
    """The signed byte BYTE of each word."""
    return (word << (24 - 8 * BYTE)) >> 24


@triton.jit
def _products(a, b, c):
    """c + the products of a's signed bytes with b's."""
    if PTX:
        c = tl.inline_asm_elementwise("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, is_pure=True, pack=1)
    else:
        for i in tl.static_range(4):
            c += _byte(a, i) * _byte(b, i)
    return c


@triton.jit
def _placed(word, one, BYTE: tl.constexpr):
    """1 + v / 2^15 as float32, v the byte BYTE of each word: one instruction, where a conversion takes many times as long. `one`
    is 1.0 in bits, not as a constant: the instruction has room for one only."""
    if PTX:
        how: tl.constexpr = ("0x7604", "0x7614", "0x7624", "0x7634")[BYTE]
        bits = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, " + how + ";", "=r,r,r", [word, word * 0 + one], tl.int32, is_pure=True, pack=1
        )
    else:
        bits = (((word >> (8 * BYTE)) & 0xFF) << 8) | one
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _fours(words):
    """(…, 4 n) -> four of (…, n): the numbers at 0, 1, 2 and 3 of each four, which a thread has loaded together."""
    pairs = tl.reshape(words, (words.shape[0], words.shape[1], words.shape[2] // 4, 2, 2))
    even, odd = tl.split(pairs)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _query(q, scale, GROUP: tl.constexpr, LANES: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr):
    """The planes of q, (LANES, 1, WORDS) words of four numbers, and the unit (LANES, 1, 1) of their whole numbers."""
    g, w = tl.arange(0, LANES)[:, None, None], tl.arange(0, WORDS)[None, None, :]
    at, mask = q + g * SIZE + 4 * w, (g < GROUP) & (w < SIZE // 4)
    most = tl.zeros((LANES, 1, WORDS), tl.float32)
    for i in tl.static_range(4):
        most = tl.maximum(most, tl.abs(tl.load(at + i, mask=mask, other=0.0).to(tl.float32)))
    most = tl.max(most, axis=2, keep_dims=True)
    to_units = tl.where(most > 0, UNITS / tl.where(most > 0, most, 1.0), 0.0)
    high, low = tl.zeros((LANES, 1, WORDS), tl.int32), tl.zeros((LANES, 1, WORDS), tl.int32)
    for i in tl.static_range(4):
        x = tl.load(at + i, mask=mask, other=0.0).to(tl.float32) * to_units
        whole = ((x + 12582912.0) - 12582912.0).to(tl.int32)  # to nearest even
        upper = (whole + 64) >> 7
        high |= (upper & 0xFF) << (8 * i)
        low |= ((whole - upper * 128) & 0xFF) << (8 * i)
    return high, low, most * (scale / UNITS)


@triton.jit
def _words(numbers, at, seen, TILE: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr):
    """(1, TILE, WORDS): lines of the cache from `at` on."""
    i, w = tl.arange(0, TILE)[None, :, None], tl.arange(0, WORDS)[None, None, :]
    return tl.load(numbers + at * (SIZE // 4) + (i * (SIZE // 4) + w), mask=seen & (w < SIZE // 4), other=0)


@triton.jit
def _scales(key_scales, value_scales, at, seen):
    """(1, TILE, 1) of keys and of values."""
    return tl.load(key_scales + at, mask=seen, other=0.0), tl.load(value_scales + at, mask=seen, other=0.0)


@triton.jit
def _scores(high, low, k, scale, unit, seen):
    """(LANES, TILE, 1). scale: of the keys, unit: of the heads' q."""
    zero = tl.zeros((high[0].shape[0], k.shape[1], k.shape[2] // 4), tl.int32)
    k, upper = _fours(k), zero
    for n in tl.static_range(4):
        upper = _products(k[n] + zero, high[n] + zero, upper)
    lower = upper * 128
    for n in tl.static_range(4):
        lower = _products(k[n] + zero, low[n] + zero, lower)
    return tl.where(seen, tl.sum(lower, axis=2, keep_dims=True).to(tl.float32) * scale * unit, -1.0e30)


@triton.jit
def _decode(
    qkv, keys, values, key_scales, value_scales, out, sums, table, stride, rows, sequences, positions, scale,
    QKV: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
    SIZE: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
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
    start = low // TILE * TILE
    each = tl.cdiv(tl.cdiv(length - start, SPLITS), 2 * TILE) * (2 * TILE)
    start += split * each
    end = tl.minimum(start + each, length)
    one = 0x3F800000 | (length >> 31)  # no constant: see `_placed`
    i = tl.arange(0, TILE)[None, :, None]
    a_block = tl.load(table + start // BLOCK, mask=start < end, other=0)
    b_block = tl.load(table + (start + TILE) // BLOCK, mask=start + TILE < end, other=0)
    a_at, b_at = line(a_block, start % BLOCK, kv, KV, BLOCK), line(b_block, (start + TILE) % BLOCK, kv, KV, BLOCK)
    a_block = tl.load(table + (start + 2 * TILE) // BLOCK, mask=start + 2 * TILE < end, other=0)
    b_block = tl.load(table + (start + 3 * TILE) // BLOCK, mask=start + 3 * TILE < end, other=0)
    a_seen, b_seen = start + i < end, start + TILE + i < end
    pdl.wait(PDL)
    high, low_plane, unit = _query(qkv + row * QKV + kv * GROUP * SIZE, scale, GROUP, LANES, SIZE, WORDS)
    high, low_plane = _fours(high), _fours(low_plane)
    a_k, b_k = _words(keys, a_at, a_seen, TILE, SIZE, WORDS), _words(keys, b_at, b_seen, TILE, SIZE, WORDS)
    a_v, b_v = _words(values, a_at, a_seen, TILE, SIZE, WORDS), _words(values, b_at, b_seen, TILE, SIZE, WORDS)
    a_scale, a_weight = _scales(key_scales, value_scales, a_at + i, a_seen)
    b_scale, b_weight = _scales(key_scales, value_scales, b_at + i, b_seen)
    m = tl.full((LANES, TILE, 1), -1.0e30, tl.float32)
    mass = tl.zeros((LANES, TILE, 1), tl.float32)
    weights = tl.zeros((LANES, TILE, 1), tl.float32)
    acc0, acc1 = tl.zeros((LANES, TILE, WORDS), tl.float32), tl.zeros((LANES, TILE, WORDS), tl.float32)
    acc2, acc3 = acc0, acc1
    for first in range(start, end, 2 * TILE):  # two tiles, while the next two are under way, and where those after them are
        a_counts, b_counts = a_seen, b_seen
        if WINDOW:
            a_counts, b_counts = a_seen & (first + i >= low), b_seen & (first + TILE + i >= low)
        after = first + 2 * TILE
        a_at, b_at = line(a_block, after % BLOCK, kv, KV, BLOCK), line(b_block, (after + TILE) % BLOCK, kv, KV, BLOCK)
        a_block = tl.load(table + (after + 2 * TILE) // BLOCK, mask=after + 2 * TILE < end, other=0)
        b_block = tl.load(table + (after + 3 * TILE) // BLOCK, mask=after + 3 * TILE < end, other=0)
        a_seen, b_seen = after + i < end, after + TILE + i < end
        a_next, b_next = _words(keys, a_at, a_seen, TILE, SIZE, WORDS), _words(keys, b_at, b_seen, TILE, SIZE, WORDS)
        a_next_scale, a_next_weight = _scales(key_scales, value_scales, a_at + i, a_seen)
        b_next_scale, b_next_weight = _scales(key_scales, value_scales, b_at + i, b_seen)
        a = _scores(high, low_plane, a_k, a_scale, unit, a_counts)
        b = _scores(high, low_plane, b_k, b_scale, unit, b_counts)
        highest = tl.maximum(m, tl.maximum(a, b))
        share = tl.exp2(m - highest)
        a, b = tl.where(a_counts, tl.exp2(a - highest), 0.0), tl.where(b_counts, tl.exp2(b - highest), 0.0)
        mass = mass * share + (a + b)
        a, b, m = a * a_weight, b * b_weight, highest
        weights = weights * share + (a + b)
        u, v = a_v ^ SIGNS, b_v ^ SIGNS
        acc0 = acc0 * share + a * _placed(u, one, 0) + b * _placed(v, one, 0)
        acc1 = acc1 * share + a * _placed(u, one, 1) + b * _placed(v, one, 1)
        acc2 = acc2 * share + a * _placed(u, one, 2) + b * _placed(v, one, 2)
        acc3 = acc3 * share + a * _placed(u, one, 3) + b * _placed(v, one, 3)
        a_k, b_k = a_next, b_next
        a_scale, b_scale, a_weight, b_weight = a_next_scale, b_next_scale, a_next_weight, b_next_weight
        a_v, b_v = _words(values, a_at, a_seen, TILE, SIZE, WORDS), _words(values, b_at, b_seen, TILE, SIZE, WORDS)
    highest = tl.max(m, axis=1, keep_dims=True)
    share = tl.exp2(m - highest)
    mass = tl.sum(mass * share, axis=1, keep_dims=True)
    zero = tl.sum(weights * share, axis=1, keep_dims=True) * (32768.0 + 128.0)  # what `_placed` and SIGNS have added
    g, w = tl.arange(0, LANES)[:, None, None], tl.arange(0, WORDS)[None, None, :]
    inside, head = (g < GROUP) & (w < SIZE // 4), kv * GROUP + g
    part = (item.to(tl.int64) * KV * GROUP + head) * SPLITS + split
    for n in tl.static_range(4):
        acc = acc0 if n == 0 else acc1 if n == 1 else acc2 if n == 2 else acc3
        total = tl.sum(acc * share, axis=1, keep_dims=True) * 32768.0 - zero
        if SPLITS == 1:
            tl.store(out + row * OUT + head * SIZE + 4 * w + n, (total / mass).to(out.dtype.element_ty), mask=inside)
        else:
            tl.store(out + part * SIZE + 4 * w + n, total, mask=inside)
    if SPLITS > 1:
        tl.store(sums + 2 * part, highest, mask=g < GROUP)
        tl.store(sums + 2 * part + 1, mass, mask=g < GROUP)


def takes(q: torch.dtype, cache: KVCache, group: int) -> bool:
    """Where q is of two bytes: the rounding of float32 would show."""
    return q.itemsize == 2 and cache.keys.dtype == torch.int8 and cache.keys.shape[-1] % 4 == 0 and group <= MAX_GROUP


def tile(words: int, block_size: int) -> tuple[int, int]:
    """Keys of a program at a time, and its warps: each thread loads four words, and a tile is part of a block."""
    most = max(1, WARPS * 128 // words)
    keys = gcd(most, block_size)
    return keys, max(1, WARPS * keys // most)
