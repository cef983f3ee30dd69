"""Small random models by hand, sessions over them, and attention by definition in float64."""

from __future__ import annotations

import numpy as np

from nano_vllm import _native
from nano_vllm.backends import cpu
from nano_vllm.backends._rounding import WholeCache
from nano_vllm.formats import pack
from nano_vllm.model.program import Attend, Rotate, lower
from nano_vllm.model.spec import MLP, Attention, Layer, Model, Norm, Rope
from tests.backends import tiny

ISAS = _native.instruction_sets()
VOCAB = 101


def model(
    heads=4, kv_heads=2, head_size=16, hidden=64, window=None, bias=True, qk_norm=True, layers=1, mlp=96, activation="silu"
) -> Model:
    frequencies = tuple(float(np.float32(10000.0 ** (-2 * i / head_size))) for i in range(head_size // 2))
    norm = Norm(1e-6) if qk_norm else None
    # sharp scores: an error in one key or one position shows
    attention = Attention(heads, kv_heads, head_size, Rope(frequencies, 1.25), 2 * head_size**-0.5, window, bias, bias, norm)
    layer = Layer(Norm(1e-5), attention, Norm(1e-5), MLP(mlp, activation, bias))
    return Model("test", VOCAB, hidden, (layer,) * layers, Norm(1e-5), 4096, True)


def weights(program, format="f32", seed=0, **options):
    """Random weights. `format`: of all matrices, or part of a name -> format of the matrices with it; "" is of the others."""
    rng = np.random.default_rng(seed)
    packed = {}
    for name, shape in program.parameters.items():
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 2:
            chosen = format if isinstance(format, str) else next(f for part, f in format.items() if part in name)
            packed[name] = pack(name, values * np.float32(1.5 / shape[1] ** 0.5), chosen, **options)
        else:
            packed[name] = pack(name, 1 + 0.3 * values if "norm" in name else 0.4 * values, "f32")
    return packed


def session(spec: Model, format="f32", isa="", threads=2, kv="f16", block_size=16, tokens=2048, max_rows=1024, **options):
    """A session whose cache is full of NaN: what no step wrote must not matter."""
    program = lower(spec)
    plan = tiny.plan(
        "cpu",
        kv,
        num_blocks=-(-tokens // block_size) + 3,
        block_size=block_size,
        isa=isa,
        threads=threads,
        max_num_batched_tokens=max_rows,
    )
    opened = cpu.open(program, weights(program, format, **options), plan)
    opened.native.fill_cache(0xFF)
    return opened


def blocks(session, length: int, first: int = 0) -> list[int]:
    """Block ids for a sequence, in no order, from the pool's part that begins at `first`."""
    count = -(-length // session.plan.block_size)
    return [first + (i * 5 + 2) % count if count % 5 else first + count - 1 - i for i in range(count)]


def step(session, parts, wanted="all"):
    """One traced step of (ids, first position, block ids)."""
    return session.trace(tiny.batch(parts, wanted))


def logits(session, parts, wanted="all") -> np.ndarray:
    return session.submit(tiny.batch(parts, wanted)).result().logits


def ids(length: int, seed: int = 1) -> np.ndarray:
    return tiny.tokens(VOCAB, length, seed)


def through(x: np.ndarray, kv: str) -> np.ndarray:
    """float32 rounded to the cache's type, as float64; bf16 to nearest even."""
    if kv == "f16":
        return x.astype(np.float16).astype(np.float64)
    if kv == "bf16":
        bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def attend(rows: np.ndarray, op: Attend, kv: str) -> np.ndarray:
    """rows (n, (heads + 2 kv_heads) · head_size) of one sequence from position 0 -> (n, heads · head_size) float64."""
    parts = rows.reshape(len(rows), -1, op.head_size)
    q, k, v = np.split(parts, [op.heads, op.heads + op.kv_heads], axis=1)
    group = op.heads // op.kv_heads
    k, v = (np.repeat(through(x, kv), group, axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q.astype(np.float64), k) * np.float64(np.float32(op.scale))
    i, j = np.arange(len(rows))[:, None], np.arange(len(rows))[None]
    seen = (j <= i) & (i - j < (op.window or len(rows)))
    shares = np.where(seen, np.exp(scores - np.where(seen, scores, -np.inf).max(-1, keepdims=True)), 0)
    return np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), v).reshape(len(rows), -1)


def attend_whole(rows: np.ndarray, op: Attend, kv: str) -> np.ndarray:
    """The same over a cache of whole numbers, as the reference backend defines it, in float32."""
    q, k, v = np.split(rows.reshape(len(rows), -1, op.head_size), [op.heads, op.heads + op.kv_heads], axis=1)
    cache, slots = WholeCache(1, len(rows), op.kv_heads, op.head_size, kv), np.arange(len(rows))
    cache.write(np.zeros_like(slots), slots, k, v)
    keys, values = cache.read(np.zeros_like(slots), slots)
    out = []
    for end in range(1, len(rows) + 1):
        first = max(0, end - op.window) if op.window else 0
        seen = slice(first, end)
        out.append(cache.attend(q[end - 1], keys.of(seen), values.of(seen), op.scale, first).ravel())
    return np.array(out)


def ops_of(session, kind):
    return [op for op in session.program.ops if isinstance(op, kind)]


def rotated(session, op: Rotate, rows: np.ndarray, positions: np.ndarray, packed) -> np.ndarray:
    """What Rotate leaves of `rows`, in float64 but for the angle, which is a float32 product."""
    parts = rows.astype(np.float64).reshape(len(rows), -1, op.head_size)
    q, k, v = np.split(parts, [op.heads, op.heads + op.kv_heads], axis=1)
    if op.q_norm:
        q, k = (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + op.eps) * packed[w].unpack().astype(np.float64)
            for x, w in ((q, op.q_norm), (k, op.k_norm))
        )
    rope = session.program.ropes[op.rope]
    angle = (positions.astype(np.float32)[:, None] * np.float32(rope.frequencies)).astype(np.float64)[:, None]
    cosine, sine = np.cos(angle) * rope.scale, np.sin(angle) * rope.scale

    def turn(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)

    return np.concatenate([turn(q), turn(k), v], axis=1).reshape(rows.shape)
