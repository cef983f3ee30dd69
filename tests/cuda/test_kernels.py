"""Each Triton kernel against the reference backend's function, on odd sizes: on the card, or interpreted on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the backend is PyTorch's")
pytest.importorskip("triton", reason="Triton has no package for this system")

from nano_vllm.backends import reference  # noqa: E402
from nano_vllm.backends.cuda.kernels import attend_row, attention, linear, one_row, rotate, rows  # noqa: E402
from nano_vllm.model.spec import Rope  # noqa: E402

from . import DEVICE  # noqa: E402

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
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
    keys, values = random(20, kv_heads, size, type=cache), random(20, kv_heads, size, type=cache, seed=8)
    right_k, right_v = array(keys), array(values)
    right_k[slots[slots >= 0]], right_v[slots[slots >= 0]] = k[slots >= 0], v[slots >= 0]
    turns = tuple(torch.from_numpy(x).to(DEVICE) for x in (cosine, sine))
    norms = (q_norm, k_norm) if normed else None
    rotate.rotate(qkv, ints(slots), ints(positions), turns, norms, 1e-6, keys, values, heads)
    close(qkv[:, : heads * size], q.reshape(count, -1), type)
    close(keys, right_k, cache)
    close(values, right_v, cache)


class Paged:
    """A cache full of NaN, but for the slots of some sequences of given lengths, whose blocks are in no order."""

    def __init__(self, lengths, kv_heads, size, cache, block=16):
        self.block, blocks = block, [-(-n // block) for n in lengths]
        order = np.random.default_rng(3).permutation(sum(blocks))
        self.table = np.full((len(lengths), max(blocks)), -1, np.int32)
        self.keys, self.values = (poisoned((sum(blocks) + 1) * block, kv_heads, size, type=cache) for _ in range(2))
        self.rows, first = [], 0
        for s, (n, count) in enumerate(zip(lengths, blocks)):
            self.table[s, :count] = order[first : first + count]
            first += count
            at = np.arange(n)
            slots = torch.from_numpy(self.table[s, at // block].astype(np.int64) * block + at % block).to(DEVICE)
            k, v = (random(n, kv_heads, size, seed=10 * s + j, type=cache) for j in (1, 2))
            self.keys[slots], self.values[slots] = k, v
            self.rows.append((array(k).transpose(1, 0, 2), array(v).transpose(1, 0, 2)))

    def attend(self, q: np.ndarray, s: int, position: int, scale: float, window) -> np.ndarray:
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        return reference.attend(q, self.rows[s][0][:, seen], self.rows[s][1][:, seen], scale)


HEADS = [(4, 2, 16), (9, 3, 6), (8, 1, 40), (2, 2, 130)]


@pytest.mark.parametrize("type, cache, window", [("f32", "f32", 9), ("bf16", "bf16", None), ("bf16", "f16", None)])
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
        q, paged.keys, paged.values, out, ints(paged.table), ints([paged.table.shape[1]]), ints([*at, -1]), ints([0, 1, 2, 3, 0]),
        ints(positions), space, scale, window, heads, 16,
    )  # fmt: skip
    assert torch.isnan(out[3]).all()
    right = [paged.attend(array(q)[r, :-3].reshape(heads, size), s, lengths[s] - 1, scale, window) for s, r in enumerate(at)]
    close(out[at], np.stack(right).reshape(4, -1), type if type != "f32" else cache if cache == "f32" else "f32")


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
        paged.keys[slots[r]] = paged.values[slots[r]] = float("nan")
    right = [paged.attend(q[r], s, lengths[s] - 1, scale, window) for s, r in enumerate(at)]
    arrived = torch.zeros(attend_row.MAX_ROWS * kv_heads, dtype=torch.int32, device=DEVICE)
    space = torch.full((attention.scratch(8, heads, kv_heads, size),), float("nan"), device=DEVICE)
    turns, before = tuple(torch.from_numpy(x).to(DEVICE) for x in (cosine, sine)), qkv.clone()
    for _ in range(2):  # the second time finds what the first has left
        out = poisoned(5, heads * size, type=type)
        attend_row.attend(
            qkv, ints(slots), ints(positions), turns, (q_norm, k_norm) if normed else None, 1e-6, paged.keys, paged.values, out,
            ints(paged.table), ints([paged.table.shape[1]]), ints([*at, -1]), ints([0, 1, 2, 3, 0]), space, arrived, scale,
            window, heads, 16,
        )  # fmt: skip
        close(out[at], np.stack(right).reshape(4, -1), "bf16" if type == "bf16" else "f16" if type == "f16" else "f32")
        assert torch.isnan(out[3]).all() and not arrived.any() and torch.equal(qkv, before)
        for kept, new in ((paged.keys, k), (paged.values, v)):
            close(kept[torch.from_numpy(slots[at]).to(DEVICE)], new[at], cache if cache != "f32" else type)


def test_decode_without_splits(monkeypatch):
    monkeypatch.setattr(attention, "PROGRAMS", 1)
    test_decode("bf16", "bf16", None, 4, 2, 16)
    test_decode("f32", "f32", 9, 9, 3, 6)


@pytest.mark.parametrize("type, cache, window", [("f32", "f32", 9), ("bf16", "bf16", None), ("f32", "f16", 9)])
@pytest.mark.parametrize("heads, kv_heads, size", HEADS)
def test_prefill(type, cache, window, heads, kv_heads, size):
    # (sequence, first position, rows): a whole prompt, a chunk of one, a short one
    parts = [(0, 0, 45), (1, 50, 20), (2, 3, 2)]
    paged, scale = Paged([first + n for _, first, n in parts], kv_heads, size, cache), 1.3 * size**-0.5
    total = sum(n for *_, n in parts)
    q, out = random(total, heads * size + 3, type=type), poisoned(total, heads * size, type=type)
    _, tokens = attention.tile_rows(size, heads // kv_heads, "f32" == type or type != cache)
    starts, counts, sequences, positions, row = [], [], [], [], 0
    for s, first, n in parts:
        for t in range(0, n, tokens):
            starts, counts, sequences = [*starts, row + t], [*counts, min(tokens, n - t)], [*sequences, s]
        positions += range(first, first + n)
        row += n
    attention.prefill(
        q, paged.keys, paged.values, out, ints(paged.table), ints([paged.table.shape[1]]), ints([*starts, 0]), ints([*counts, 0]),
        ints([*sequences, 0]), ints(positions), scale, window, heads, 16,
    )  # fmt: skip
    of = np.repeat([s for s, *_ in parts], [n for *_, n in parts])
    right = [paged.attend(array(q)[r, :-3].reshape(heads, size), of[r], p, scale, window) for r, p in enumerate(positions)]
    close(out, np.stack(right).reshape(total, -1), type)
