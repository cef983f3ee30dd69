"""Attention of steps with few rows, each a sequence's next: `rotate`, `attention.decode` and its merge in one kernel.

Each program rotates the q of its heads itself; the first of a head's programs also makes the new key and value, which it needs
from registers alone, and stores them. The program of a head that ends last merges what all have left. How many programs a head's
keys are divided among follows from their number as it is when the kernel runs: under a graph, too, a short sequence is read by
few programs, so that there is little to merge.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import pdl
from ._dot import dot
from .attention import LOG2E, LOWEST, _kind, _lines, splits
from .cache import KVCache
from .cache import line as cache_line

MAX_ROWS = 16


@triton.jit
def _load(keys, values, table, start, end, kv, BLOCK: tl.constexpr, KV: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
          TILE: tl.constexpr):  # fmt: skip
    """Keys and values (TILE, PADDED) from position `start`; zeros from `end` on."""
    position, d = start + tl.arange(0, TILE), tl.arange(0, PADDED)
    seen = position < end
    at = _lines(table, position, seen, kv, KV, BLOCK)[:, None] * SIZE + d[None, :]
    mask = seen[:, None] & (d < SIZE)[None, :]
    return tl.load(keys + at, mask=mask, other=0.0), tl.load(values + at, mask=mask, other=0.0)


@triton.jit
def _fold(q, m, mass, acc, k, v, left, scale, TILE: tl.constexpr):
    """Adds a tile of keys, of which `left` count, to the running softmax."""
    scores = tl.where((tl.arange(0, TILE) < left)[None, :], dot(q, tl.trans(k.to(q.dtype))) * scale, LOWEST)
    highest = tl.maximum(m, tl.max(scores, axis=1))
    p, share = tl.exp2(scores - highest[:, None]), tl.exp2(m - highest)
    return highest, mass * share + tl.sum(p, axis=1), acc * share[:, None] + dot(p.to(q.dtype), v.to(q.dtype))


@triton.jit
def _turned(line, mask, norm, cosine, sine, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr):
    """Heads (rows, PADDED) at the pointers `line` (rows,), normed and rotated. Each number's partner in the rotation is loaded
    with it."""
    d = tl.arange(0, PADDED)
    other = tl.where(d < SIZE // 2, d + SIZE // 2, d - SIZE // 2)
    x = tl.load(line[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(line[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        root = tl.sqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None]
        x = x / root * tl.load(norm + d, mask=d < SIZE, other=0.0)[None, :]
        y = y / root * tl.load(norm + other, mask=d < SIZE, other=0.0)[None, :]
    return x * cosine[None, :] + y * tl.where(d < SIZE // 2, -sine, sine)[None, :]


@triton.jit
def _attend(
    qkv, slots, positions, cosines, sines, q_norm, k_norm, keys, values, out, parts, sums, arrived, table, stride, rows,
    sequences, eps, scale, STRIDE: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.release(PDL)
    item, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + item).to(tl.int64)
    position = tl.load(positions + tl.maximum(row, 0))  # of the new key
    table += tl.load(sequences + item).to(tl.int64) * tl.load(stride)
    low = 0
    if WINDOW:
        low = tl.maximum(position + 1 - WINDOW, 0)
    each = tl.maximum(tl.cdiv(tl.cdiv(position - low, SPLITS), TILE), 1) * TILE
    used = tl.maximum(tl.cdiv(position - low, each), 1)
    if (row < 0) | (split >= used):
        pdl.wait(PDL)
        return
    start = low + split * each
    end = tl.minimum(start + each, position)
    d = tl.arange(0, PADDED)
    angle = position.to(tl.int64) * (SIZE // 2) + d % (SIZE // 2)
    cosine, sine = tl.load(cosines + angle), tl.load(sines + angle)
    k, v = _load(keys, values, table, start, end, kv, BLOCK, KV, SIZE, PADDED, TILE)
    pdl.wait(PDL)
    g = tl.arange(0, ROWS)
    inside = (g < GROUP)[:, None] & (d < SIZE)[None, :]
    head, line = kv * GROUP + g, qkv + row * STRIDE
    q = _turned(line + head * SIZE, inside, q_norm, cosine, sine, eps, SIZE, PADDED, NORM).to(qkv.dtype.element_ty).to(KIND)
    m, mass = tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PADDED), tl.float32)
    if split == 0:
        one, wide = tl.zeros((1,), tl.int32), (d < SIZE)[None, :]
        new = _turned(line + (KV * GROUP + kv + one) * SIZE, wide, k_norm, cosine, sine, eps, SIZE, PADDED, NORM)
        new_k = new.to(keys.dtype.element_ty)
        new_v = tl.load(line + (KV * (GROUP + 1) + kv) * SIZE + d[None, :], mask=wide, other=0.0).to(values.dtype.element_ty)
        slot = tl.load(slots + row).to(tl.int64)
        at = cache_line(slot // BLOCK, slot % BLOCK, kv, KV, BLOCK) * SIZE + d[None, :]
        tl.store(keys + at, new_k, mask=wide & (slot >= 0))
        tl.store(values + at, new_v, mask=wide & (slot >= 0))
        m = tl.sum(q.to(tl.float32) * new_k.to(KIND).to(tl.float32), axis=1) * scale
        mass = tl.full((ROWS,), 1.0, tl.float32)
        acc += new_v.to(tl.float32)
    m, mass, acc = _fold(q, m, mass, acc, k, v, end - start, scale, TILE)
    for first in range(start + TILE, end, TILE):
        k, v = _load(keys, values, table, first, end, kv, BLOCK, KV, SIZE, PADDED, TILE)
        m, mass, acc = _fold(q, m, mass, acc, k, v, end - first, scale, TILE)
    to = out + row * OUT + head * SIZE
    if used == 1:
        tl.store(to[:, None] + d[None, :], (acc / mass[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        part = ((item.to(tl.int64) * KV + kv) * GROUP + g) * SPLITS + split
        tl.store(parts + part[:, None] * SIZE + d[None, :], acc, mask=inside)
        tl.store(sums + 2 * part, m, mask=g < GROUP)
        tl.store(sums + 2 * part + 1, mass, mask=g < GROUP)
        tl.debug_barrier()  # all threads have stored before one of them says so
        counter = arrived + item * KV + kv
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(counter, 0)
            for i in tl.static_range(GROUP):
                merged = _merged(parts, sums, (item.to(tl.int64) * KV + kv) * GROUP + i, used, SIZE, PADDED, SPLITS)
                lane = out + row * OUT + (kv * GROUP + i) * SIZE + d
                tl.store(lane, merged.to(out.dtype.element_ty), mask=d < SIZE)


@triton.jit
def _merged(parts, sums, head, used, SIZE: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr):
    """One head's result (PADDED,) from its parts; read past the first cache, which other programs' stores do not reach."""
    s, d = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    part, seen = head * SPLITS + s, s < used
    m = tl.load(sums + 2 * part, mask=seen, other=LOWEST, cache_modifier=".cg")
    mass = tl.load(sums + 2 * part + 1, mask=seen, other=0.0, cache_modifier=".cg")
    share = tl.exp2(m - tl.max(m, axis=0))
    at, inside = part[:, None] * SIZE + d[None, :], seen[:, None] & (d < SIZE)[None, :]
    acc = tl.load(parts + at, mask=inside, other=0.0, cache_modifier=".cg")
    return tl.sum(acc * share[:, None], axis=0) / tl.sum(mass * share, axis=0)


def attend(
    qkv: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None, eps: float, cache: KVCache, out: torch.Tensor,
    table: torch.Tensor, stride: torch.Tensor, rows: torch.Tensor, sequences: torch.Tensor, space: torch.Tensor,
    arrived: torch.Tensor, scale: float, window: int | None, heads: int,
) -> None:  # fmt: skip
    """As `rotate.rotate`, then `attention.decode`, whose arguments these are, of at most MAX_ROWS rows of different sequences. Of
    qkv nothing is changed; rows that are not named are not stored in the cache, whose type is one without scales.

    Args:
        arrived: int32, at least MAX_ROWS · kv_heads zeros; zeros again when the kernel has ended.
    """
    _, kv_heads, block_size, size = cache.keys.shape
    items, group, padded = len(rows), heads // kv_heads, max(16, triton.next_power_of_2(size))
    count, kind = splits(items, kv_heads), _kind(qkv.dtype, cache.keys.dtype)
    q_norm, k_norm = norms or (turns[0], turns[0])
    tile = 32 if kind == tl.float32 or padded > 128 else 64
    _attend[(items, kv_heads, count)](
        qkv, slots, positions, *turns, q_norm, k_norm, *cache.planes, out, space, space[items * heads * count * size :], arrived,
        table, stride, rows, sequences, eps, scale * LOG2E, qkv.stride(0), out.stride(0), block_size, kv_heads, group,
        max(16, triton.next_power_of_2(group)), size, padded, tile, window or 0, count, norms is not None, kind, num_warps=4,
        **pdl.options(qkv.device),
    )  # fmt: skip
