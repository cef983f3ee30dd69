"""The CUDA session against the reference backend, and the engine on it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the backend is PyTorch's")
pytest.importorskip("triton", reason="Triton has no package for this system")

from nano_vllm import registry  # noqa: E402
from nano_vllm.backends import cuda, reference  # noqa: E402
from nano_vllm.backends.cuda.graphs import Shapes, is_decode  # noqa: E402
from nano_vllm.engine.engine import Engine  # noqa: E402
from nano_vllm.errors import BatchError, EngineClosed, ModelFileError, OptionError, UnsupportedModel  # noqa: E402
from nano_vllm.formats import pack  # noqa: E402
from nano_vllm.model.program import lower  # noqa: E402
from nano_vllm.model.spec import MLP, Attention, Layer, Model, Norm, Rope  # noqa: E402
from nano_vllm.sampling.params import SamplingParams  # noqa: E402
from tests.backends import tiny  # noqa: E402

from . import DEVICE  # noqa: E402
from .test_kernels import WITH_SCALES  # noqa: E402

VOCAB = 101
# Root mean square of the logits' error over that of the logits: bfloat16 has 8 bits, float16 11, and three layers add some.
BOUNDS = {"f32": 1e-5, "f16": 4e-3, "bf16": 3e-2}


def model(heads=4, kv_heads=2, head_size=16, hidden=48, window=None, bias=True, qk_norm=True, layers=2, mlp=40) -> Model:
    frequencies = tuple(float(np.float32(10000.0 ** (-2 * i / head_size))) for i in range(head_size // 2))
    norm = Norm(1e-6) if qk_norm else None
    attention = Attention(heads, kv_heads, head_size, Rope(frequencies, 1.25), 2 * head_size**-0.5, window, bias, bias, norm)
    layer = Layer(Norm(1e-5), attention, Norm(1e-5), MLP(mlp, "silu", bias))
    return Model("test", VOCAB, hidden, (layer,) * layers, Norm(1e-5), 4096, True)


def weights(program, format="f32", seed=0):
    rng, packed = np.random.default_rng(seed), {}
    for name, shape in program.parameters.items():
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 2:
            packed[name] = pack(name, values * np.float32(1.5 / shape[1] ** 0.5), format)
        else:
            packed[name] = pack(name, 1 + 0.3 * values if "norm" in name else 0.4 * values, "f32")
    return packed


def opened(spec=None, backend=cuda, dtype="f32", format="f32", **changed):
    program = lower(spec or model())
    name = backend.__name__.rpartition(".")[2]
    changed = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128} | changed
    kv = changed.pop("kv", dtype if backend is cuda else "f32")
    return backend.open(program, weights(program, format), tiny.plan(name, kv, dtype=dtype, **changed))


def ids(length, seed=1):
    return tiny.tokens(VOCAB, length, seed)


def logits(session, parts, wanted="all"):
    return session.submit(tiny.batch(parts, wanted)).result().logits.copy()


@pytest.mark.parametrize("dtype", ["f32", "bf16", pytest.param("f16", marks=pytest.mark.skipif(DEVICE == "cpu", reason="slow"))])
def test_chunks_and_mixed_steps_are_within_the_types_rounding_of_the_reference(dtype):
    """A prompt in pieces beside another that decodes, against each computed at once by the reference."""
    spec = model(heads=6, kv_heads=2, window=11)
    session, right = opened(spec, dtype=dtype), opened(spec, reference)
    a, b = ids(37), ids(20, seed=2)
    first = logits(session, [(a[:17], 0, [4, 9]), (b[:18], 0, [1, 0])])
    second = logits(session, [(a[17:36], 17, [4, 9, 2]), (b[18:19], 18, [1, 0])])
    third = logits(session, [(a[36:], 36, [4, 9, 2]), (b[19:], 19, [1, 0])])
    ours = np.concatenate([first[:17], second[:19], third[:1], first[17:], second[19:], third[1:]])
    exact = np.concatenate([logits(right, [(a, 0, [0, 1, 2])]), logits(right, [(b, 0, [3, 4])])])
    assert np.sqrt(np.mean((ours - exact) ** 2)) <= BOUNDS[dtype] * np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize("kv", WITH_SCALES)
def test_caches_with_scales_are_the_definitions(kv):
    """Nearer to the reference with the same cache than that is to float32. What is near a tie may fall to either side, and in
    int8 the reference also rounds queries and weights, to 16 bits."""
    spec = model(heads=6, kv_heads=2, window=11)
    parts = [(ids(37), 0, [4, 9, 2])], [(np.append(ids(37), 5)[37:], 37, [4, 9, 2]), (ids(20, seed=2), 0, [1, 0])]

    def of(backend, kv):
        session = opened(spec, backend, kv=kv)
        return np.concatenate([logits(session, part) for part in parts])

    ours, right, exact = of(cuda, kv), of(reference, kv), of(reference, "f32")
    size, lost = np.sqrt(np.mean(exact**2)), np.sqrt(np.mean((right - exact) ** 2))
    assert np.sqrt(np.mean((ours - right) ** 2)) < 0.1 * lost and lost < {"int8": 0.02, "fp8": 0.1}[kv] * size


@pytest.mark.parametrize("format", ["q4", "q8"])
@pytest.mark.parametrize("rows", [9, 20], ids=["in registers", "beforehand"])
def test_quantised_weights_are_their_formats(format, rows):
    spec = model(hidden=64, mlp=64, layers=1, bias=False, qk_norm=False)
    part = [(ids(rows), 0, [3, 1])]
    ours, right = (logits(opened(spec, backend, format=format), part) for backend in (cuda, reference))
    np.testing.assert_allclose(ours, right, atol=1e-4)


def test_wanted_rows_are_those_rows():
    session, table = opened(), [5, 1]
    every = logits(session, [(ids(20), 0, table)])
    batch = tiny.batch([(ids(20), 0, table)])
    some = np.array([0, 3, 4, 19], np.int32)
    picked = dataclasses.replace(batch, wanted=some, sampling=tiny.greedy(4), want_logits=np.array([True, False, True, False]))
    result = session.submit(picked).result()
    np.testing.assert_allclose(result.logits, every[[0, 4]], atol=1e-5)
    np.testing.assert_array_equal(result.ids, [-1, every[3].argmax(), -1, every[19].argmax()])
    none = dataclasses.replace(batch, wanted=some[:0], sampling=tiny.greedy(0), want_logits=np.zeros(0, bool))
    result = session.submit(none).result()
    assert result.logits is None and len(result.ids) == 0


def test_a_step_runs_ahead_and_takes_its_ids_on_the_device():
    session, table = opened(model(layers=1)), [5, 1]
    assert session.max_outstanding == 1
    tickets = [session.submit(tiny.batch([(ids(20), 0, table)], "last", want_logits=False))]
    for position in range(20, 23):
        batch = dataclasses.replace(tiny.batch([(np.array([0]), position, table)], "last", False), sources=np.zeros(1, np.int32))
        tickets.append(session.submit(batch))
        tickets[-2].result()
    drawn = [int(ticket.result().ids[0]) for ticket in tickets]
    session = opened(model(layers=1))
    for n, right in enumerate(drawn):
        prompt = np.append(ids(20), drawn[:n])
        assert logits(session, [(prompt, 0, table)], "last")[0].argmax() == right


def test_more_wanted_rows_than_sequences_draw():
    """As perplexity asks for them, in pieces of what the sampler holds."""
    session = opened(max_num_seqs=4)
    batch = tiny.batch([(ids(21), 0, [5, 1])], want_logits=False)
    right = logits(session, [(ids(21), 0, [5, 1])])
    np.testing.assert_array_equal(session.submit(batch).result().ids, right.argmax(axis=1))


@pytest.mark.parametrize(
    "fault",
    [
        dict(tokens=np.full(20, VOCAB, np.int32)),
        dict(positions=np.arange(20, dtype=np.int32)[::-1]),
        dict(block_tables=(np.array([[0, -1]], np.int32),)),
        dict(block_tables=(np.array([[0, 10_000]], np.int32),)),
        dict(block_tables=(np.arange(2000, dtype=np.int32)[None] % 32,)),
        dict(starts=np.array([0, 21], np.int32)),
        dict(wanted=np.array([20], np.int32)),
        dict(sources=np.full(20, 5, np.int32)),
    ],
    ids=str,
)
def test_a_wrong_step_is_refused(fault):
    session = opened(model(layers=1))
    batch = tiny.batch([(ids(20), 0, [1, 0])], "last")
    with pytest.raises(BatchError):
        session.submit(dataclasses.replace(batch, **fault))
    assert np.isfinite(session.submit(batch).result().logits).all()  # and does no harm


def test_more_than_the_plan_allows_is_refused():
    session = opened(model(layers=1), max_num_batched_tokens=16, max_num_seqs=1, max_model_len=20)
    for parts in ([(ids(17), 0, [0, 1])], [(ids(2), 0, [0]), (ids(2), 0, [1])], [(ids(2), 19, [0, 1])]):
        with pytest.raises(BatchError, match="is the most"):
            session.submit(tiny.batch(parts))


def test_what_cannot_be_opened_is_refused():
    program = lower(model(layers=1))
    packed = weights(program)
    with pytest.raises(ModelFileError, match="final_norm"):
        cuda.open(program, {n: t for n, t in packed.items() if n != "final_norm"}, tiny.plan("cuda"))
    with pytest.raises(OptionError, match="int16"):
        cuda.open(program, packed, tiny.plan("cuda", "int16"))
    odd = lower(model(head_size=258, layers=1))
    with pytest.raises(UnsupportedModel, match="258"):
        cuda.open(odd, weights(odd), tiny.plan("cuda"))


def test_a_closed_session_says_so():
    session = opened(model(layers=1))
    session.close()
    session.close()
    with pytest.raises(EngineClosed):
        session.submit(tiny.batch([(ids(2), 0, [0])]))


def run(session, requests) -> list[list[int]]:
    engine, answers = Engine(session, VOCAB), [[] for _ in requests]
    for answer, (prompt, params) in zip(answers, requests):
        engine.submit(engine.make_request(prompt, params, lambda update, to=answer: to.extend(update.ids)))
    while engine.busy:
        engine.step()
    engine.check()
    return answers


def test_the_engine_answers_as_on_the_reference():
    """Prompts in chunks, prefix hits, preemption, and every stage, one step ahead."""
    shared = ids(33).tolist()
    requests = [
        (shared, SamplingParams(temperature=0, max_tokens=5)),
        (shared[:32] + ids(3, 5).tolist(), SamplingParams(temperature=1.5, seed=1, max_tokens=4)),
        (ids(5, 6).tolist(), SamplingParams(temperature=2.0, seed=2, top_k=5, top_p=0.9, max_tokens=3)),
        (ids(2, 7).tolist(), SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.5, presence_penalty=0.3, max_tokens=3)),
        (
            ids(17, 8).tolist(),
            SamplingParams(temperature=0.8, seed=4, min_p=0.1, min_tokens=2, stop_token_ids=(7,), max_tokens=4),
        ),
    ]
    plan = dict(num_blocks=7, max_num_seqs=4, max_num_batched_tokens=24)
    spec = model(layers=1)
    assert run(opened(spec, **plan), requests) == run(opened(spec, reference, **plan), requests)


class Padded:
    """Stands in for `Graphs`: what a graph would hold is launched instead, on the inputs that it would find."""

    def __init__(self, session):
        self.shapes, self.session, self.seen = Shapes(session.plan.max_num_batched_tokens, 16), session, []

    def replay(self, shape) -> bool:
        self.seen.append(shape)
        if len(self.seen) % 3:  # a shape without a graph is launched padded, too
            self.session.record(shape)
        return len(self.seen) % 3 > 0

    def idle(self, waiting) -> None:
        assert is_decode(self.seen[-1]) or is_decode(self.seen[-2])  # one step runs ahead


def test_padding_changes_no_answer():
    """Decode steps of 11 and more rows, and mixed ones, are padded as for graphs."""
    requests = [
        (ids(2 + i % 3, seed=i).tolist(), SamplingParams(temperature=1.2 * (i % 2), seed=i, max_tokens=2 + i % 2))
        for i in range(11)
    ]
    plan = dict(num_blocks=12, max_num_seqs=16, max_num_batched_tokens=32)
    spec = model(layers=1, hidden=16, mlp=16)
    session = opened(spec, **plan)
    session.graphs = Padded(session)
    assert run(session, requests) == run(opened(spec, reference, **plan), requests)
    seen = session.graphs.seen
    assert any(shape.tiles for shape in seen) and any(shape.rows == 12 for shape in seen if is_decode(shape))


def test_probe_and_names():
    from nano_vllm.loading import choose_backend
    from nano_vllm.options import options

    assert "cuda" in registry.names("backends")
    assert choose_backend(options(backend="cuda", dtype="bf16", enforce_eager=True))[0] == "cuda"
    with pytest.raises(OptionError, match="threads.*would be ignored"):
        choose_backend(options(backend="cuda", threads=1))
    with pytest.raises(OptionError, match="dtype.*would be ignored"):
        choose_backend(options(backend="reference", dtype="bf16"))


def test_warming_up_runs_and_leaves_no_trace():
    """On a card it runs when a session opens."""
    session = opened(model(layers=1), num_blocks=8, max_num_seqs=3, max_num_batched_tokens=40)
    session._warm_up()
    requests = [(ids(20).tolist(), SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.3))]
    assert run(session, requests) == run(opened(model(layers=1), reference, num_blocks=8), requests)
