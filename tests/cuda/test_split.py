"""Parts of a model: put together they are the whole, and ranks that run in turn in one process say what one alone says."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the backend is PyTorch's")
pytest.importorskip("triton", reason="Triton has no package for this system")

from nano_vllm.backends import cuda, reference  # noqa: E402
from nano_vllm.backends.cuda.parallel.split import Shards, obstacle, share  # noqa: E402
from nano_vllm.backends.cuda.session import Session  # noqa: E402
from nano_vllm.backends.cuda.kernels.packed import Packed  # noqa: E402
from nano_vllm.backends.cuda.weights import nbytes  # noqa: E402
from nano_vllm.errors import ModelFileError, OptionError  # noqa: E402
from nano_vllm.formats import pack  # noqa: E402
from nano_vllm.model.program import lower  # noqa: E402
from tests.backends import tiny  # noqa: E402

from . import DEVICE  # noqa: E402
from .test_session import VOCAB, ids, model, opened, weights  # noqa: E402


def parts(program, tensors, size):
    """Per rank: its share and what it reads, float32 by name."""
    shares = [share(program, rank, size) for rank in range(size)]
    return shares, [{name: tensor.unpack() for name, tensor in Shards(tensors, mine).items()} for mine in shares]


@pytest.mark.parametrize("size, heads, kv_heads, mlp", [(2, 4, 2, 40), (3, 9, 3, 33), (4, 8, 2, 36), (5, 5, 1, 35)])
def test_products_with_the_parts_are_parts_of_the_product(size, heads, kv_heads, mlp):
    """As the ranks put them together: side by side where lines are cut, summed where columns are. A vocabulary of 101 leaves
    the last rank fewer rows; with more ranks than heads of keys, each is on several."""
    program = lower(model(heads, kv_heads, hidden=21, layers=1, mlp=mlp))
    tensors = weights(program)
    whole = {name: tensor.unpack() for name, tensor in tensors.items()}
    shares, read = parts(program, tensors, size)
    at, rng = "layers.0.", np.random.default_rng(3)

    def product(w, name, x):
        return x @ w[name].T + w.get(f"{name}.bias", 0)

    x = rng.standard_normal((3, 21)).astype(np.float32)
    group, few = heads // kv_heads, -(-kv_heads // size)
    for name in ("attention.q", "mlp.gate", "mlp.up"):
        together = np.concatenate([product(w, at + name, x) for w in read], axis=1)
        np.testing.assert_allclose(together, product(whole, at + name, x), rtol=1e-5, atol=1e-5)
    for name in ("attention.k", "attention.v"):
        right = product(whole, at + name, x).reshape(3, kv_heads, -1)
        for rank, w in enumerate(read):
            first = rank * (heads // size) // group  # the head of keys that its first head of queries reads
            found = product(w, at + name, x).reshape(3, few, -1)
            np.testing.assert_allclose(found, right[:, first : first + few], rtol=1e-5, atol=1e-5)
    for name, width in (("attention.out", heads * 16), ("mlp.down", mlp)):
        inner = rng.standard_normal((3, width)).astype(np.float32)
        pieces = np.split(inner, size, axis=1)
        total = sum(product(w, at + name, piece) for w, piece in zip(read, pieces))
        np.testing.assert_allclose(total, product(whole, at + name, inner), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.concatenate([w["embedding"] for w in read])[:VOCAB], whole["embedding"])
    for mine, w in zip(shares, read):
        assert {name: values.shape for name, values in w.items()} == mine.program.parameters


@pytest.mark.parametrize("format, group, kept", [("q4", 32, True), ("q4", 128, False), ("q8", 32, True), ("q6_k", 256, False)])
def test_packed_columns_are_cut_between_groups_or_unpacked(format, group, kept):
    """128 columns are half of each matrix's 256; of groups of 128, a cut into four parts every other one."""
    program = lower(model(heads=16, kv_heads=4, hidden=256, mlp=256, layers=1, bias=False, qk_norm=False))
    how = {} if format in ("q8", "q6_k") else {"group": group}
    rng = np.random.default_rng(0)
    tensors = {n: pack(n, rng.standard_normal(s), *((format,) if len(s) == 2 else ("f32",)), **(how if len(s) == 2 else {}))
               for n, s in program.parameters.items()}  # fmt: skip
    for rank in range(4):
        mine = share(program, rank, 4)
        shards = Shards(tensors, mine)
        for name in ("layers.0.attention.out", "layers.0.mlp.down"):
            tensor = shards[name]
            np.testing.assert_array_equal(tensor.unpack(), tensors[name].unpack()[:, 64 * rank : 64 * (rank + 1)])
            assert tensor.info.format == (format if kept else "f32") and tensor.info == shards.infos[name]
        assert shards["layers.0.mlp.up"].info == shards.infos["layers.0.mlp.up"]
        assert shards.infos["layers.0.mlp.up"].format == format
    loaded = cuda.weights.DeviceWeights(mine.program, shards, torch.float32, torch.device(DEVICE))
    kept = [m.shape for m in loaded.matrices.values() if isinstance(m, Packed)]
    unpacked = 4 * max((rows * columns for rows, columns in kept), default=0)  # the space for one of them as numbers
    assert bool(kept) == (format != "q6_k") and loaded.nbytes + unpacked == nbytes(mine.program, torch.float32, shards.infos)


def test_what_cannot_be_divided_is_refused_with_the_sizes_that_can():
    program = lower(model(heads=6, kv_heads=2, mlp=36))
    assert [n for n in range(1, 13) if not obstacle(program, n)] == [1, 2, 6]
    with pytest.raises(OptionError, match=r"6 heads.*takes 1, 2, 6\."):
        share(program, 0, 4)
    with pytest.raises(OptionError, match="2 heads of keys"):
        share(program, 0, 3)
    with pytest.raises(OptionError, match="an MLP of 35"):
        share(lower(model(heads=6, kv_heads=2, mlp=35)), 0, 2)


def test_a_tensor_of_a_wrong_shape_is_not_cut():
    program = lower(model(layers=1))
    tensors = weights(program) | {"embedding": pack("embedding", np.zeros((VOCAB + 1, 48)), "f32")}
    with pytest.raises(ModelFileError, match="embedding"):
        Shards(tensors, share(program, 0, 2))["embedding"]


class Together:
    """Ranks as threads of this process, of which one runs at a time: Triton's interpreter is not made for more."""

    def __init__(self, size: int) -> None:
        self.size, self.turn, self.barrier, self.given = size, threading.Lock(), threading.Barrier(size, timeout=60), {}

    def exchange(self, rank: int, x):
        """What every rank gave."""
        self.given[rank] = x
        self.turn.release()
        self.barrier.wait()
        given = [self.given[r] for r in range(self.size)]
        self.barrier.wait()
        self.turn.acquire()
        return given


class Member:
    def __init__(self, together: Together, mine) -> None:
        self.together, self.rank, self.size, self.first = together, mine.rank, mine.size, mine.vocabulary.first

    def reduce(self, x) -> None:
        x.copy_(sum(self.together.exchange(self.rank, x.clone())))

    def gather(self, part, out) -> None:
        out.copy_(torch.stack(self.together.exchange(self.rank, part.clone())))


def ranks(spec, size, batches, format="f32"):
    """The results of every rank."""
    program, together, found = lower(spec), Together(size), [[] for _ in range(size)]
    plan = tiny.plan("cuda", "f32", dtype="f32", max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)

    def one(rank):
        with together.turn:
            mine = share(program, rank, size)
            shards = Shards(weights(program, format), mine)
            session = Session(mine.program, shards, plan, torch.device("cpu"), Member(together, mine))
            for batch in batches:
                found[rank].append(session.submit(batch).result())

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.skipif(DEVICE != "cpu", reason="ranks on one card are tests/cuda/test_parallel.py's")
@pytest.mark.parametrize(
    "size, format, spec",
    [
        (2, "f32", model(heads=6, kv_heads=2, window=11)),
        (3, "q8", dataclasses.replace(model(3, 3, head_size=32, hidden=64, mlp=96, layers=1), tied=False)),
        (4, "q4", model(4, 2, head_size=32, hidden=64, mlp=128, bias=False, layers=1)),  # each head of keys is on two ranks
    ],
    ids=["two", "three", "four"],
)
def test_ranks_say_what_the_reference_says(size, format, spec):
    """A prompt of many rows, one beside another's next token, and a single row; all ranks draw the same id."""
    prompt = ids(24)
    steps = [
        tiny.batch([(prompt[:22], 0, [3, 1])]),
        tiny.batch([(prompt[22:23], 22, [3, 1]), (ids(3, seed=2), 0, [5])]),
        tiny.batch([(prompt[23:], 23, [3, 1])], "last"),
        tiny.batch([(ids(1, seed=4), 24, [3, 1])], "last", want_logits=False),
    ]
    session = opened(spec, reference, format=format)
    right = [session.submit(step).result() for step in steps]
    for results in ranks(spec, size, steps, format):
        for ours, exact in zip(results[:3], right):
            np.testing.assert_allclose(ours.logits, exact.logits, atol=2e-4)
        np.testing.assert_array_equal(results[3].ids, right[3].ids)
