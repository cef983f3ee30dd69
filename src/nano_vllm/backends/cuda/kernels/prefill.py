"""Attention of sequences with several rows in a step, in tiles of queries.

Where the cache has the type of q, keys and values of the step itself are read beside q, in consecutive rows, and only those of
earlier steps through the block table. They are the same numbers. A cache that rounds them is read for all of them, so that an
answer does not depend on the chunks that a prompt came in.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ._dot import dot
from .attention import LOG2E, LOWEST, _kind, _tile, exact, softmax
from .cache import KVCache

LARGE = 227 * 1024  # bytes of shared memory


@triton.jit
def _own(
    q, m, mass, acc, rows, qkv, origin, start, end, low, last, key, value, scale,
    QKV: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, WHOLE: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """As `_tile`, of keys in the step's own rows: that of position p is row `origin` + p, keys from the column `key` on, values
    from `value` on. With TMA, `rows` is a descriptor of tiles of qkv, which whole ones are loaded through."""
    position = start + tl.arange(0, TILE)
    seen = (position < end) & (position >= low)
    if WHOLE and TMA:
        k = rows.load([(origin + start).to(tl.int32), key])
        v = rows.load([(origin + start).to(tl.int32), value])
    else:
        d = tl.arange(0, PADDED)
        at = (origin + position)[:, None] * QKV + d[None, :]
        mask = (d < SIZE)[None, :]
        if not WHOLE:
            mask = mask & seen[:, None]
        k = tl.load(qkv + key + at, mask=mask, other=0.0)
        v = tl.load(qkv + value + at, mask=mask, other=0.0)
    scores = dot(q, tl.trans(k))
    if not WHOLE:
        visible = seen[None, :] & (position[None, :] <= last[:, None])
        if WINDOW:
            visible = visible & (position[None, :] > last[:, None] - WINDOW)
        scores = tl.where(visible, scores, LOWEST)
    m, p, share = softmax(scores, m, scale)
    if not WHOLE:
        p = tl.where(visible, p, 0.0)
    mass = mass * share + tl.sum(p, axis=1)
    acc = acc * share[:, None] + dot(p.to(q.dtype), v)
    return m, mass, acc


@triton.jit
def _prefill(
    qkv, own, keys, values, key_scales, value_scales, out, table, stride, rows, counts, sequences, begins, positions, scale,
    QKV: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, KV: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    KIND: tl.constexpr, OWN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    item, kv = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + item)
    if count == 0:
        return
    first = tl.load(rows + item).to(tl.int64)
    table += tl.load(sequences + item).to(tl.int64) * tl.load(stride)
    position = tl.load(positions + first)
    i, d = tl.arange(0, ROWS), tl.arange(0, PADDED)
    token, lane = i // LANES, i % LANES  # a lane is a head of the group
    head = kv * GROUP + lane
    inside = ((token < count) & (lane < GROUP))[:, None] & (d < SIZE)[None, :]
    row = first + token
    q = tl.load(qkv + row[:, None] * QKV + head[:, None] * SIZE + d[None, :], mask=inside, other=0.0).to(KIND)
    last = position + token
    end = position + count
    m = tl.full((ROWS,), LOWEST, tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PADDED), tl.float32)
    # what some rows do not see is one tile or two: in a pipeline, its products would keep those of the loops beside it waiting
    STAGES: tl.constexpr = 1 if OWN and WINDOW == 0 else None
    low, older = 0, end
    whole = (position + 1) // TILE * TILE  # keys under it are seen by every row
    if OWN:  # keys from `begin` on are in the step's own rows
        begin = tl.load(begins + item)
        older, whole = begin, begin // TILE * TILE
    if WINDOW:
        low = tl.maximum(position + 1 - WINDOW, 0)
        whole = low // TILE * TILE
    for start in range(0, whole if WINDOW == 0 else 0, TILE):
        m, mass, acc = _tile(
            q, m, mass, acc, keys, values, key_scales, value_scales, table, start, end, 0, last, kv, scale,
            BLOCK, KV, SCALED, SIZE, PADDED, TILE, 0, False, True,
        )  # fmt: skip
    for start in tl.range(whole, older, TILE, num_stages=STAGES):
        m, mass, acc = _tile(
            q, m, mass, acc, keys, values, key_scales, value_scales, table, start, older, low, last, kv, scale,
            BLOCK, KV, SCALED, SIZE, PADDED, TILE, WINDOW, True, False,
        )  # fmt: skip
    if OWN:
        key, value = (KV * GROUP + kv) * SIZE, (KV * GROUP + KV + kv) * SIZE
        origin = first - position
        whole = begin + (position + 1 - begin) // TILE * TILE
        if WINDOW:
            whole = begin + tl.maximum(low - begin, 0) // TILE * TILE
        for start in range(begin, whole if WINDOW == 0 else begin, TILE):
            m, mass, acc = _own(
                q, m, mass, acc, own, qkv, origin, start, end, 0, last, key, value, scale,
                QKV, SIZE, PADDED, TILE, 0, True, TMA,
            )  # fmt: skip
        for start in tl.range(whole, end, TILE, num_stages=STAGES):
            m, mass, acc = _own(
                q, m, mass, acc, own, qkv, origin, start, end, low, last, key, value, scale,
                QKV, SIZE, PADDED, TILE, WINDOW, False, TMA,
            )  # fmt: skip
    at = row[:, None] * OUT + head[:, None] * SIZE + d[None, :]
    tl.store(out + at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=inside)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


@lru_cache
def _has_tma(device: torch.device) -> bool:
    """Whether the card loads tiles of a matrix by a descriptor of it."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def reads_own(q: torch.dtype, cache: torch.dtype) -> bool:
    """Whether keys and values of the step's own rows are read beside q, where `rotate` must then leave them."""
    return q == cache


def tile_rows(group: int, q: torch.dtype, cache: torch.dtype) -> tuple[int, int]:
    """-> rows (query · head) of a tile, and how many tokens they are."""
    rows = 32 if exact(q, cache) else 64
    lanes = triton.next_power_of_2(group)
    return max(rows, lanes), max(1, rows // lanes)


def _tiles(qkv: torch.Tensor, cache: KVCache) -> tuple[int, int]:
    """-> keys of a tile, stages of the pipeline: two programs share a large card's multiprocessor, one's products beside the
    other's softmax."""
    if exact(qkv.dtype, cache.keys.dtype):
        return 16, 2
    if cache.keys.shape[3] > 128:
        return 32, 2
    deep = reads_own(qkv.dtype, cache.keys.dtype) and shared_memory(qkv.device) >= LARGE
    return 64, 3 if deep else 2


def prefill(
    qkv: torch.Tensor, cache: KVCache, out: torch.Tensor, table: torch.Tensor, stride: torch.Tensor,
    rows: torch.Tensor, counts: torch.Tensor, sequences: torch.Tensor, begins: torch.Tensor, positions: torch.Tensor,
    scale: float, window: int | None, heads: int,
) -> None:  # fmt: skip
    """Attention of tiles of consecutive rows of a sequence, at most `tile_rows` tokens each.

    Args as of `decode`, but
        qkv: (all rows, at least (heads + 2 kv_heads) · size): q, and where `reads_own`, k and v after it.
        rows, counts, sequences, begins: (items,) int32, a tile's first row, its number of rows (0: nothing), its sequence, and
            the position of that sequence's first row in the step.
    """
    _, kv_heads, block_size, size = cache.keys.shape
    scales = cache.scales if cache.units else cache.planes  # something to point at
    group, padded, kind = heads // kv_heads, max(16, triton.next_power_of_2(size)), _kind(qkv.dtype, cache.keys.dtype)
    own = reads_own(qkv.dtype, cache.keys.dtype)
    m, _ = tile_rows(group, qkv.dtype, cache.keys.dtype)
    keys, stages = _tiles(qkv, cache)
    tma = own and qkv.itemsize == 2 and padded == size and qkv.stride(0) % 8 == 0 and _has_tma(qkv.device)
    described = TensorDescriptor.from_tensor(qkv, [keys, size]) if tma else qkv
    _prefill[(len(rows), kv_heads)](
        qkv, described, *cache.planes, *scales, out, table, stride, rows, counts, sequences, begins, positions, scale * LOG2E,
        qkv.stride(0), out.stride(0), block_size, kv_heads, cache.units > 0, group, triton.next_power_of_2(group), m, size,
        padded, keys, window or 0, kind, own, tma, num_warps=4, num_stages=stages,
    )  # fmt: skip
