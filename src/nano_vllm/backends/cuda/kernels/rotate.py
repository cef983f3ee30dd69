"""Norm of q and k heads, rotation, and the cache write: one pass over the q, k and v of each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import pdl
from ._dot import INTERPRETED
from .cache import KVCache, rounded
from .cache import line as cache_line

LINES = 256 if INTERPRETED else 8  # heads of a program; interpreted, programs run one after the other


@triton.jit(do_not_specialize=["count"])
def _rotate(
    qkv, slots, positions, cosines, sines, q_norm, k_norm, keys, values, key_scales, value_scales, eps, count,
    STRIDE: tl.constexpr, Q: tl.constexpr, KV: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    PADDED: tl.constexpr, NORM: tl.constexpr, LINES: tl.constexpr, UNITS: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.release(PDL)
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    row, head = (line // (Q + 2 * KV)).to(tl.int64), line % (Q + 2 * KV)
    slot = tl.load(slots + row, mask=row < count, other=-1).to(tl.int64)  # -1 in rows that pad a graph
    position = tl.load(positions + row, mask=row < count, other=0).to(tl.int64)
    d = tl.arange(0, PADDED)
    seen = (row < count)[:, None] & (d < HALF)[None, :]
    at = (row * STRIDE + head * SIZE)[:, None] + d[None, :]
    pdl.wait(PDL)
    a = tl.load(qkv + at, mask=seen, other=0.0).to(tl.float32)
    b = tl.load(qkv + at + HALF, mask=seen, other=0.0).to(tl.float32)
    is_q, is_v = (head < Q)[:, None], (head >= Q + KV)[:, None]
    x, y = a, b
    if NORM:
        mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / SIZE
        root = tl.sqrt(mean + eps)[:, None]
        inside = d < HALF
        first_q = tl.load(q_norm + d, mask=inside, other=0.0)[None, :]
        first_k = tl.load(k_norm + d, mask=inside, other=0.0)[None, :]
        second_q = tl.load(q_norm + HALF + d, mask=inside, other=0.0)[None, :]
        second_k = tl.load(k_norm + HALF + d, mask=inside, other=0.0)[None, :]
        x = a / root * tl.where(is_q, first_q, first_k)
        y = b / root * tl.where(is_q, second_q, second_k)
    cosine = tl.load(cosines + position[:, None] * HALF + d[None, :], mask=seen, other=0.0)
    sine = tl.load(sines + position[:, None] * HALF + d[None, :], mask=seen, other=0.0)
    first = tl.where(is_v, a, x * cosine - y * sine)
    second = tl.where(is_v, b, y * cosine + x * sine)
    in_place = seen & (head < (Q + KV if KEEP else Q))[:, None]
    tl.store(qkv + at, first.to(qkv.dtype.element_ty), mask=in_place)
    tl.store(qkv + at + HALF, second.to(qkv.dtype.element_ty), mask=in_place)
    kind = keys.dtype.element_ty
    kept = (slot >= 0) & (row < count)
    at = cache_line(slot // BLOCK, slot % BLOCK, tl.maximum(head - Q, 0) % KV, KV, BLOCK)
    if UNITS:
        first, second, scale = rounded(first, second, UNITS, kind == tl.int8)
        tl.store(key_scales + at, scale, mask=kept & (head >= Q) & (head < Q + KV))
        tl.store(value_scales + at, scale, mask=kept & (head >= Q + KV))
    of_k = seen & (kept & (head >= Q) & (head < Q + KV))[:, None]
    to = at[:, None] * SIZE + d[None, :]
    tl.store(keys + to, first.to(kind), mask=of_k)
    tl.store(keys + to + HALF, second.to(kind), mask=of_k)
    of_v = seen & kept[:, None] & is_v
    tl.store(values + to, first.to(kind), mask=of_v)
    tl.store(values + to + HALF, second.to(kind), mask=of_v)


def rotate(
    qkv: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None, eps: float, cache: KVCache, heads: int, keep: bool = False,
) -> None:  # fmt: skip
    """q is normed and rotated in place, and with `keep` k; k, likewise, and v go to the cache, rounded to its type, with their
    scales.

    Args:
        qkv: (rows, at least (heads + 2 kv_heads) · size); slots, positions: (rows,) int32. A row with the slot -1 writes nothing.
        turns: cosine and sine (positions, size / 2) float32.
        norms: weights of q and k, (size,) float32.
    """
    _, kv_heads, block_size, size = cache.keys.shape
    scales = cache.scales if cache.units else cache.planes  # something to point at
    q_norm, k_norm = norms or (turns[0], turns[0])
    grid = (triton.cdiv(len(qkv) * (heads + 2 * kv_heads), LINES),)
    _rotate[grid](
        qkv, slots, positions, *turns, q_norm, k_norm, *cache.planes, *scales, eps, len(qkv),
        qkv.stride(0), heads, kv_heads, block_size, size, size // 2, triton.next_power_of_2(size // 2), norms is not None, LINES,
        cache.units, keep, num_warps=2, **pdl.options(qkv.device),
    )  # fmt: skip
