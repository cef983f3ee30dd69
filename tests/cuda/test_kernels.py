"""Each Triton kernel against the reference backend's function, on odd sizes: on the card, or interpreted on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the backend is PyTorch's")
pytest.importorskip("triton", reason="Triton has no package for this system")

from nano_vllm.backends import reference  # noqa: E402
from nano_vllm.backends._rounding import CACHE_TYPES, cache_of  # noqa: E402
from nano_vllm.backends.cuda.kernels import attend_row, attention, linear, one_row, prefill, rotate, rows, tiled  # noqa: E402
from nano_vllm.backends.cuda.kernels import cache as caches  # noqa: E402
from nano_vllm.backends.cuda.kernels.cache import KVCache  # noqa: E402
from nano_vllm.model.spec import Rope  # noqa: E402

from . import DEVICE  # noqa: E402

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
WITH_SCALES = ["int8", "fp8"] if caches.has_fp8(torch.device(DEVICE)) else ["int8"]  # caches
# Of a result relative to the exact one, by norm: roundings of the type and float32 sums.
BOUNDS = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}


def random(*shape, seed=0, type="f32") -> torch.Tensor:
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))
    return values.to(TYPES[type]).to(DEVICE)


def array(x: torch.Tensor) -> np.ndarray:
    return x.float().cpu().numpy()


def poisoned(*shape, type="f32") -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=TYPES[type], device=DEVICE)


def ints(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)


def close(ours: torch.Tensor, right: np.ndarray, type: str) -> None:
    ours = array(ours)
    assert np.isfinite(ours).all() and np.linalg.norm(ours - right) <= BOUNDS[type] * np.linalg.norm(right)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("width", [7, 96, 1025])
def test_embed(type, width):
    table, out = random(11, width, type=type), poisoned(4, width)
    rows.embed(table, ints([3, 0, 10, 5]), ints([-1, -1, 1, 0]), ints([-1, 7]), out)
    np.testing.assert_array_equal(array(out), array(table)[[3, 0, 7, 0]])


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize("count, width", [(1, 33), (7, 96), (2, 1025)])
def test_normalize(type, parts, count, width):
    x, weight, more = random(count, width), random(width, seed=1), random(parts or 1, count, width, seed=2, type=type)
    total = array(x) + (array(more).sum(0) if parts else 0)
    out = poisoned(count, width, type=type)
    rows.normalize(x, more if parts else None, weight, 1e-5, out)
    close(x, total, "f32")
    close(out, reference.normalize(total, array(weight), 1e-5), type)


def test_add():
    x, parts = random(5, 1030), random(2, 5, 1030, seed=1, type="bf16")
    right = array(x) + array(parts).sum(0)
    rows.add(x, parts)
    close(x, right, "f32")


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("activation", rows.ACTIVATIONS)
@pytest.mark.parametrize("count, size", [(1, 1), (3, 33), (2, 1100)])
def test_gate(type, activation, count, size):
    src, out = 4 * random(count, 2 * size, type=type), poisoned(count, size, type=type)
    rows.gate(src, size, activation, out)
    close(out, reference.gate(array(src), size, activation), type)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("count, n, k", [(2, 1, 17), (2, 33, 96), (7, 19, 300), (16, 35, 33)])
def test_linear(type, biased, count, n, k):
    x, weight, bias = random(count, k, type=type), random(n, k, seed=1, type=type), random(n, seed=2)
    right = reference.linear(array(x), array(weight), array(bias) if biased else None)
    for splittable in (False, True):
        parts = linear.tiles(count, n, k, splittable)[2]
        out = poisoned(parts, count, n, type=type if parts == 1 else "f32")
        linear.linear(x, weight, bias if biased else None, out)
        close(out.float().sum(0), right, type)


@pytest.mark.parametrize("type", ["bf16", "f16"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "count, n, k, parts",
    [(17, 1024, 512, 4), (64, 1024, 3072, 4), (65, 1024, 256, 4), (100, 2048, 128, 2), (200, 1024, 128, 2)],
)
def test_tiles_in_parts(type, biased, count, n, k, parts):
    x, weight, bias = random(count, k, type=type), random(n, k, seed=1, type=type), random(n, seed=2) if biased else None
    assert tiled.parts(count, n, k, x.dtype, torch.device("cpu")) == parts
    out = poisoned(parts, count, n)
    tiled.linear(x, weight, bias, out)
    close(out.sum(0), reference.linear(array(x), array(weight), None if bias is None else array(bias)), type)


@pytest.mark.parametrize(
    "count, n, k", [(257, 1024, 3072), (64, 1000, 1024), (64, 2560, 4096), (64, 1024, 1000), (128, 4096, 4096), (32, 8192, 4096)]
)
def test_other_products_are_left_to_pytorch(count, n, k):
    assert tiled.parts(count, n, k, torch.bfloat16, torch.device("cpu")) == 0
    assert tiled.parts(64, 1024, 1024, torch.float32, torch.device("cpu")) == 0


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("n, k", [(1, 17), (37, 1100), (66, 96), (20, 4100)])
def test_product_of_one_row(type, biased, n, k):
    x, weight, bias = random(1, k, type=type), random(n, k, seed=1, type=type), random(n, seed=2) if biased else None
    right = reference.linear(array(x), array(weight), array(bias) if biased else None)
    out = poisoned(1, n, type=type)
    one_row.product(x, weight, bias, out)
    close(out, right, type)
    total = random(1, n, seed=3)
    right += array(total)
    one_row.product(x, weight, bias, total, add=True)
    close(total, right, type)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("activation", ["", *rows.ACTIVATIONS])
@pytest.mark.parametrize("n, k", [(2, 17), (42, 300), (14, 4100)])
def test_product_with_its_norm_and_gate(type, activation, n, k):
    x, norm, weight, bias = random(1, k), random(k, seed=1), 0.1 * random(n, k, seed=2, type=type), random(n, seed=3)
    right = reference.linear(reference.normalize(array(x), array(norm), 1e-2), array(weight), array(bias))
    if activation:
        right = reference.gate(right, n // 2, activation)
    out = poisoned(*right.shape, type=type)
    one_row.product(x, weight, bias, out, norm, 1e-2, activation)
    close(out, right, type)


@pytest.mark.parametrize("type, cache", [("f32", "f32"), ("bf16", "bf16"), ("f32", "f16")])
@pytest.mark.parametrize(
    "heads, kv_heads, size, normed", [(4, 2, 16, True), (9, 3, 6, False), (1, 1, 80, True), (14, 2, 64, False)]
)
def test_rotate(type, cache, heads, kv_heads, size, normed):
    count, width = 5, (heads + 2 * kv_heads) * size
    qkv = random(count, width, type=type)
    q_norm, k_norm = random(size, seed=1), random(size, seed=2)
    rope = Rope(tuple(10000.0 ** (-2 * i / size) for i in range(size // 2)), 1.25)
    cosine, sine = reference.turns(np.arange(64), rope)
    positions, slots = np.array([0, 1, 63, 7, 8]), np.array([5, 3, 19, -1, 0])
    q, k, v = np.split(array(qkv).reshape(count, -1, size), [heads, heads + kv_heads], axis=1)
    if normed:
        q, k = reference.normalize(q, array(q_norm), 1e-6), reference.normalize(k, array(k_norm), 1e-6)
    q, k = (reference.rotate(x, cosine[positions], sine[positions]) for x in (q, k))
    kept = KVCache(*random(2, 5, kv_heads, 4, size, type=cache), None, None)
    right_k, right_v = array(kept.keys), array(kept.values)
    where = slots[slots >= 0] // 4, slice(None), slots[slots >= 0] % 4
    right_k[where], right_v[where] = k[slots >= 0], v[slots >= 0]
    turns = tuple(torch.from_numpy(x).to(DEVICE) for x in (cosine, sine))
    norms = (q_norm, k_norm) if normed else None
    before = qkv.clone()
    rotate.rotate(qkv, ints(slots), ints(positions), turns, norms, 1e-6, kept, heads, keep=normed)
    close(qkv[:, : heads * size], q.reshape(count, -1), type)
    if normed:
        close(qkv[:, heads * size : -kv_heads * size], k.reshape(count, -1), type)
    same = -kv_heads * size if normed else heads * size
    assert torch.equal(qkv[:, same:], before[:, same:])
    close(kept.keys, right_k, cache)
    close(kept.values, right_v, cache)


def plain(kept: KVCache, slots) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values (slots, kv_heads, size) with their scales."""
    at = places(kept, slots)
    return tuple(
        array(numbers[at]) * (1 if scales is None else array(scales[at])[..., None])
        for numbers, scales in zip(kept.planes, kept.scales)
    )


def places(kept: KVCache, slots) -> tuple:
    """The index of slots in the cache's arrays, for (slots, kv_heads, …)."""
    blocks, within = np.divmod(np.asarray(slots), kept.keys.shape[2])
    return torch.from_numpy(blocks).to(DEVICE), slice(None), torch.from_numpy(within).to(DEVICE)


def store(kept: KVCache, name: str, slots: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """What the reference makes of k and v (slots, kv_heads, size), put where the device has it."""
    made, at = cache_of(name, 1, len(k), *k.shape[1:]), np.arange(len(k))
    made.write(0, at, k, v)
    at = places(kept, slots)
    for numbers, scales, plane in zip(kept.planes, kept.scales, (made.keys, made.values)):
        if scales is None:
            numbers[at] = torch.from_numpy(made.decode(plane[0])).to(DEVICE, numbers.dtype)
        else:
            numbers[at] = torch.from_numpy(plane[0][0]).to(DEVICE).view(numbers.dtype)
            scales[at] = torch.from_numpy(plane[1][0].copy()).to(DEVICE)


@pytest.mark.parametrize("cache", WITH_SCALES)
def test_the_cache_rounds_as_the_definition_does(cache):
    """At position 0, where nothing is turned: ties, zeros, vectors too small to count, and ones that are not finite."""
    count, kv_heads, size = 40, 3, 34
    qkv = random(count, (1 + 2 * kv_heads) * size)
    qkv *= torch.from_numpy(np.logspace(-10, 4, count, dtype=np.float32)).to(DEVICE)[:, None]
    lines = qkv.view(count, 1 + 2 * kv_heads, size)
    ties = torch.arange(size, device=DEVICE) + 0.5  # of int8, and of e4m3 from 16 to 31.5
    lines[0, 1:] = torch.where(ties == size - 0.5, caches.UNITS[caches.TYPES[cache]], ties)
    lines[1], lines[2], lines[3, :, 0] = 0, 2.0**-52 * lines[5] / lines[5].abs().max(), -1e-9
    kept, none = KVCache.of(count // 4, 4, kv_heads, size, caches.TYPES[cache], DEVICE), torch.zeros(1, size // 2, device=DEVICE)
    k, v = np.split(array(lines)[:, 1:], 2, axis=1)
    rotate.rotate(qkv, ints(range(count)), ints([0] * count), (none + 1, none), None, 0.0, kept, 1)
    right = KVCache.of(count // 4, 4, kv_heads, size, caches.TYPES[cache], DEVICE)
    store(right, cache, np.arange(count), k, v)
    for ours, exact in zip((*kept.planes, *kept.scales), (*right.planes, *right.scales)):
        np.testing.assert_array_equal(array(ours), array(exact))
    lines[7, 1, 3], lines[8, 4, 5] = float("inf"), float("nan")
    rotate.rotate(qkv, ints(range(count)), ints([0] * count), (none + 1, none), None, 0.0, kept, 1)
    lost = [~np.isfinite(x).all(axis=-1) for x in plain(kept, np.arange(count))]
    assert lost[0].nonzero() == ([7], [0]) and lost[1].nonzero() == ([8], [0])


@pytest.mark.parametrize("cache", WITH_SCALES)
def test_rotate_scales(cache):
    """The scales of turned keys lie where attention looks for them, and no other is written."""
    heads, kv_heads, size, slots, positions = 4, 2, 40, np.array([5, 3, 19, -1, 0]), np.array([0, 1, 63, 7, 8])
    qkv, weight = random(5, (heads + 2 * kv_heads) * size, type="bf16"), random(size, seed=1)
    rope = Rope(tuple(10000.0 ** (-2 * i / size) for i in range(size // 2)), 1.0)
    cosine, sine = reference.turns(np.arange(64), rope)
    _, k, v = np.split(array(qkv).reshape(5, -1, size), [heads, heads + kv_heads], axis=1)
    k = reference.rotate(reference.normalize(k, array(weight), 1e-6), cosine[positions], sine[positions])
    kept = KVCache.of(5, 4, kv_heads, size, caches.TYPES[cache], DEVICE)
    turns = tuple(torch.from_numpy(x).to(DEVICE) for x in (cosine, sine))
    rotate.rotate(qkv, ints(slots), ints(positions), turns, (weight, weight), 1e-6, kept, heads)
    for ours, exact in zip(plain(kept, slots[slots >= 0]), (k, v)):
        exact = exact[slots >= 0]
        step = {"int8": 1 / 127, "fp8": 1 / 14}[cache]  # between neighbours, of the vector's largest number at most
        assert (np.abs(ours - exact) <= (0.5 * step + 1e-5) * np.abs(exact).max(axis=-1, keepdims=True)).all()
    for scales in kept.scales:
        assert (np.flatnonzero(array(scales).all(axis=1)) == np.unique(slots[slots >= 0])).all()


class Paged:
    """A cache full of NaN, but for the slots of some sequences of given lengths, whose blocks are in no order."""

    def __init__(self, lengths, kv_heads, size, cache, block=16):
        self.block, blocks = block, [-(-n // block) for n in lengths]
        order = np.random.default_rng(3).permutation(sum(blocks))
        self.table = np.full((len(lengths), max(blocks)), -1, np.int32)
        self.cache = KVCache.of(sum(blocks) + 1, block, kv_heads, size, caches.TYPES[cache], DEVICE)
        for numbers in self.cache.planes if cache in CACHE_TYPES else self.cache.scales:
            numbers.fill_(float("nan"))
        self.rows, first = [], 0
        for s, (n, count) in enumerate(zip(lengths, blocks)):
            self.table[s, :count] = order[first : first + count]
            first += count
            at = np.arange(n)
            slots = self.table[s, at // block].astype(np.int64) * block + at % block
            store(self.cache, cache, slots, *(array(random(n, kv_heads, size, seed=10 * s + j)) for j in (1, 2)))
            self.rows.append(tuple(x.transpose(1, 0, 2) for x in plain(self.cache, slots)))

    def attend(self, q: np.ndarray, s: int, position: int, scale: float, window) -> np.ndarray:
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        return reference.attend(q, self.rows[s][0][:, seen], self.rows[s][1][:, seen], scale)


SCALED = [("f32", "int8", 9), ("bf16", "int8", None), ("bf16", "fp8", 9), ("f16", "fp8", None)]  # type, cache, window
SCALED = [case for case in SCALED if case[1] in WITH_SCALES]
HEADS = [(4, 2, 16), (9, 3, 6), (8, 1, 40), (2, 2, 130)]


@pytest.mark.parametrize("type, cache, window", [("f32", "f32", 9), ("bf16", "bf16", None), ("bf16", "f16", None), *SCALED])
@pytest.mark.parametrize("heads, kv_heads, size", HEADS)
def test_decode(type, cache, window, heads, kv_heads, size):
    lengths = (1, 45, 16, 70)
    paged, scale = Paged(lengths, kv_heads, size, cache), 1.3 * size**-0.5
    q, out = random(5, heads * size + 3, type=type), poisoned(5, heads * size, type=type)
    at = [4, 0, 1, 2]  # row 3 belongs to another kernel
    positions = np.zeros(5, int)
    positions[at] = np.array(lengths) - 1
    space = torch.empty(attention.scratch(8, heads, kv_heads, size), device=DEVICE)
    attention.decode(
        q, paged.cache, out, ints(paged.table), ints([paged.table.shape[1]]), ints([*at, -1]), ints([0, 1, 2, 3, 0]),
        ints(positions), space, scale, window, heads,
    )  # fmt: skip
    assert torch.isnan(out[3]).all()
    right = [paged.attend(array(q)[r, :-3].reshape(heads, size), s, lengths[s] - 1, scale, window) for s, r in enumerate(at)]
    close(out[at], np.stack(right).reshape(4, -1), type)


@pytest.mark.parametrize("splits", [1, None])
@pytest.mark.parametrize("type, cache, window", [("f32", "f32", 9), ("bf16", "bf16", None), ("f16", "f32", None)])
@pytest.mark.parametrize(
    "heads, kv_heads, size, normed", [(4, 2, 16, True), (9, 3, 6, False), (8, 1, 40, True), (2, 2, 130, False)]
)
def test_attend_row(monkeypatch, type, cache, window, heads, kv_heads, size, normed, splits):
    """Sequences whose next row makes its own key and value: the first token of one, and more keys than a tile of others."""
    if splits:
        monkeypatch.setattr(attend_row, "splits", lambda items, kv_heads: splits)
    lengths, scale = (1, 45, 65, 180), 1.3 * size**-0.5
    paged = Paged(lengths, kv_heads, size, cache)
    qkv = random(5, (heads + 2 * kv_heads) * size + 3, type=type)
    q_norm, k_norm, at = random(size, seed=1), random(size, seed=2), [4, 0, 1, 2]  # row 3 is nobody's
    rope = Rope(tuple(10000.0 ** (-2 * i / size) for i in range(size // 2)), 1.25)
    cosine, sine = reference.turns(np.arange(200), rope)
    positions, slots = np.zeros(5, int), np.full(5, -1)
    positions[at] = np.array(lengths) - 1
    slots[at] = [paged.table[s, p // 16] * 16 + p % 16 for s, p in enumerate(positions[at])]
    q, k, v = np.split(array(qkv)[:, :-3].reshape(5, -1, size), [heads, heads + kv_heads], axis=1)
    if normed:
        q, k = reference.normalize(q, array(q_norm), 1e-6), reference.normalize(k, array(k_norm), 1e-6)
    q, k = (reference.rotate(x, cosine[positions], sine[positions]) for x in (q, k))
    for s, r in enumerate(at):  # the paged keys are NaN where the new ones will be
        paged.rows[s][0][:, -1], paged.rows[s][1][:, -1] = k[r], v[r]
        for kept in paged.cache.planes:
            kept[slots[r] // 16, :, slots[r] % 16] = float("nan")
    right = [paged.attend(q[r], s, lengths[s] - 1, scale, window) for s, r in enumerate(at)]
    arrived = torch.zeros(attend_row.MAX_ROWS * kv_heads, dtype=torch.int32, device=DEVICE)
    space = torch.full((attention.scratch(8, heads, kv_heads, size),), float("nan"), device=DEVICE)
    turns, before = tuple(torch.from_numpy(x).to(DEVICE) for x in (cosine, sine)), qkv.clone()
    for _ in range(2):  # the second time finds what the first has left
        out = poisoned(5, heads * size, type=type)
        attend_row.attend(
            qkv, ints(slots), ints(positions), turns, (q_norm, k_norm) if normed else None, 1e-6, paged.cache, out,
            ints(paged.table), ints([paged.table.shape[1]]), ints([*at, -1]), ints([0, 1, 2, 3, 0]), space, arrived, scale,
            window, heads,
        )  # fmt: skip
        close(out[at], np.stack(right).reshape(4, -1), "bf16" if type == "bf16" else "f16" if type == "f16" else "f32")
        assert torch.isnan(out[3]).all() and not arrived.any() and torch.equal(qkv, before)
        for kept, new in zip(paged.cache.planes, (k, v)):
            close(kept[places(paged.cache, slots[at])], new[at], cache if cache != "f32" else type)


def test_decode_without_splits(monkeypatch):
    monkeypatch.setattr(attention, "PROGRAMS", 1)
    test_decode("bf16", "bf16", None, 4, 2, 16)
    test_decode("f32", "f32", 9, 9, 3, 6)


def prefilled(parts, heads, kv_heads, size, type, cache, window):
    """Attention of several rows of each of some sequences, given as (first position, rows). -> ours, and a function that says
    what is right for a row. A row of nobody's is NaN, as are the slots of keys that are read from the step's own rows."""
    paged, scale = Paged([first + n for first, n in parts], kv_heads, size, cache), 1.3 * size**-0.5
    total, (_, tokens) = sum(n for _, n in parts), prefill.tile_rows(heads // kv_heads, TYPES[type], caches.TYPES[cache])
    qkv, out = poisoned(total + 1, (heads + 2 * kv_heads) * size, type=type), poisoned(total, heads * size, type=type)
    q = random(total, heads * size, type=type)
    qkv[:total, : heads * size] = q
    tiles, positions, of = [], [], []
    for s, (first, n) in enumerate(parts):
        tiles += [(len(of) + t, min(tokens, n - t), s, first) for t in range(0, n, tokens)]
        at = np.arange(first, first + n)
        if prefill.reads_own(TYPES[type], caches.TYPES[cache]):
            own = np.concatenate([x[:, at].transpose(1, 0, 2).reshape(n, -1) for x in paged.rows[s]], axis=1)
            qkv[len(of) : len(of) + n, heads * size :] = torch.from_numpy(own).to(DEVICE)
            slots = places(paged.cache, paged.table[s, at // 16] * 16 + at % 16)
            paged.cache.keys[slots] = paged.cache.values[slots] = float("nan")
        positions += at.tolist()
        of += [s] * n
    tiles = [ints(column) for column in np.array([*tiles, (0, 0, 0, 0)]).T]  # the last one is nothing
    prefill.prefill(
        qkv, paged.cache, out, ints(paged.table), ints([paged.table.shape[1]]), *tiles, ints(positions), scale, window, heads
    )
    return out, lambda r: paged.attend(array(q[r]).reshape(heads, size), of[r], positions[r], scale, window).reshape(-1)


@pytest.mark.parametrize(
    "type, cache, window",
    [("f32", "f32", 9), ("f32", "f32", None), ("bf16", "bf16", None), ("bf16", "bf16", 9), ("f32", "f16", 9), *SCALED],
)
@pytest.mark.parametrize("heads, kv_heads, size", HEADS)
def test_prefill(type, cache, window, heads, kv_heads, size):
    parts = [(0, 45), (50, 20), (3, 2), (64, 70)]  # a whole prompt, chunks of others, a short one
    out, right = prefilled(parts, heads, kv_heads, size, type, cache, window)
    close(out, np.stack([right(r) for r in range(len(out))]), type)
