"""Native sampling against the stages' NumPy definition, id for id."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from nano_vllm.backends import cpu
from nano_vllm.backends.cpu.session import STAGES, draw
from nano_vllm.formats import pack
from nano_vllm.model.program import Embed, Linear, Program, Select
from nano_vllm.sampling import pipeline
from nano_vllm.sampling.params import SamplingParams
from tests.backends import tiny
from tests.backends.sampling import CASES

ROWS = 8


def holding(logits: np.ndarray):
    """A native session whose last step left these logits (rows, vocabulary): embedding row i is the i-th unit vector, the head
    is the logits themselves."""
    rows, vocab = logits.shape
    ops = (
        Embed("embedding", "embedding", "x"),
        Select("select", "x", "x"),
        Linear("head", ("head",), (None,), "x", "logits"),
    )
    program = Program(ops, {"x": rows, "logits": vocab}, (), (), {"embedding": (vocab, rows), "head": (vocab, rows)}, vocab, 16)
    table = np.zeros((vocab, rows), np.float32)
    table[np.arange(rows), np.arange(rows)] = 1
    weights = {"embedding": pack("embedding", table, "f32"), "head": pack("head", np.ascontiguousarray(logits.T), "f32")}
    session = cpu.open(program, weights, tiny.plan("cpu"))
    left = session.submit(tiny.batch([(np.arange(rows), 0, [0])])).result().logits
    np.testing.assert_array_equal(left, logits)
    return session.native


def sampling(params: list[SamplingParams], vocab: int, seed=3):
    """Parameters of rows with random prompts and answers, ids that repeat among them."""
    rng = np.random.default_rng(seed)
    requests = [
        SimpleNamespace(
            params=p, tokens=rng.integers(0, min(vocab, 12), 9 + i).tolist(), prompt_length=4 + i % 3, promised=0,
            seed=7 * i + 2**40, index=i % 3, stop_ids=(1, vocab - 1) if p.min_tokens else (),
        )
        for i, p in enumerate(params)
    ]  # fmt: skip
    return pipeline.collect(requests)


def both(logits: np.ndarray, params: list[SamplingParams], seed=3) -> tuple[np.ndarray, np.ndarray]:
    batch = sampling(params, logits.shape[1], seed)
    return draw(holding(logits), batch, np.zeros(len(params), bool)), pipeline.sample(logits, batch)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("vocab", [8, 33, 1000])
def test_ids_are_those_of_the_definition(name, vocab):
    for seed in range(3):
        logits = (3 * np.random.default_rng(seed).standard_normal((ROWS, vocab))).astype(np.float32)
        ours, right = both(logits, [SamplingParams(**CASES[name])] * ROWS, seed)
        np.testing.assert_array_equal(ours, right)


@pytest.mark.parametrize("name", CASES)
def test_equal_logits_are_taken_by_ascending_id(name):
    logits = np.random.default_rng(0).integers(-2, 3, (ROWS, 200)).astype(np.float32)
    ours, right = both(logits, [SamplingParams(**CASES[name])] * ROWS)
    np.testing.assert_array_equal(ours, right)


def test_rows_with_different_parameters_do_not_touch_each_other():
    logits = (2 * np.random.default_rng(5).standard_normal((len(CASES), 500))).astype(np.float32)
    ours, right = both(logits, [SamplingParams(**case) for case in CASES.values()])
    np.testing.assert_array_equal(ours, right)


def test_a_large_vocabulary():
    logits = (2 * np.random.default_rng(6).standard_normal((4, 60_000))).astype(np.float32)
    params = [
        SamplingParams(),
        SamplingParams(top_p=0.95),
        SamplingParams(top_k=50, top_p=0.9),
        SamplingParams(min_p=0.05, temperature=1.5),
    ]
    ours, right = both(logits, params)
    np.testing.assert_array_equal(ours, right)


def test_draws_follow_the_probabilities():
    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    rows = 4
    logits = np.tile(np.log(probabilities).astype(np.float32), (rows, 1))
    native, counts = holding(logits), np.zeros(4)
    for seed in range(500):
        batch = sampling([SamplingParams()] * rows, 4, seed)
        batch = replaced(batch, seed=np.arange(rows, dtype=np.uint64) + np.uint64(1000 * seed))
        counts += np.bincount(draw(native, batch, np.zeros(rows, bool)), minlength=4)
    chi = ((counts - 2000 * probabilities) ** 2 / (2000 * probabilities)).sum()
    assert chi < 16.27  # 3 degrees of freedom, p = 0.001


def replaced(batch, **changes):
    return pipeline.SamplingBatch(**{name: changes.get(name, getattr(batch, name)) for name in batch.__dataclass_fields__})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_without_a_finite_maximum_have_no_id(bad):
    # the square table of this program: a row of logits is its embedding
    vocab = 64
    logits = np.random.default_rng(1).standard_normal((vocab, vocab)).astype(np.float32)
    logits[1, 5] = bad
    logits[2] = -np.inf
    logits[3, :-1] = -np.inf
    ops = (Embed("embedding", "embedding", "x"), Select("select", "x", "logits"))
    program = Program(ops, {"x": vocab, "logits": vocab}, (), (), {"embedding": (vocab, vocab)}, vocab, 16)
    session = cpu.open(program, {"embedding": pack("embedding", logits, "f32")}, tiny.plan("cpu"))
    session.submit(tiny.batch([(np.arange(5), 0, [0])]))
    for case in (dict(temperature=0), dict(), dict(top_p=0.5, top_k=3), dict(repetition_penalty=2.0)):
        batch = sampling([SamplingParams(**case)] * 5, vocab)
        ours = draw(session.native, batch, np.zeros(5, bool))
        np.testing.assert_array_equal(ours, pipeline.sample(logits[:5], batch))
        assert ours[1] == -1 and ours[2] == -1 and ours[3] == vocab - 1 and ours[0] >= 0 and ours[4] >= 0


def test_skipped_rows_have_no_id():
    logits = np.eye(4, 9, dtype=np.float32)
    ids = draw(holding(logits), sampling([SamplingParams(temperature=0)] * 4, 9), np.array([False, True, False, True]))
    np.testing.assert_array_equal(ids, [0, -1, 2, -1])


def test_every_stage_of_the_definition_is_native():
    assert STAGES == {stage.NAME for stage in pipeline.stages()}


@pytest.mark.parametrize(
    "fault",
    [
        dict(history=np.full(100, 9, np.int32)),
        dict(banned=np.array([9], np.int32), banned_starts=np.array([0, 1, 1, 1, 1], np.int32)),
        dict(banned=np.array([-1], np.int32), banned_starts=np.array([0, 1, 1, 1, 1], np.int32)),
        dict(history_starts=np.array([0, 5, 3, 9, 9], np.int32)),
        dict(prompt_lengths=np.full(4, 99, np.int32)),
        dict(seed=np.zeros(3, np.uint64)),
    ],
    ids=lambda fault: ",".join(fault),
)
def test_ids_and_ranges_outside_their_arrays_are_refused(fault):
    native = holding(np.eye(4, 9, dtype=np.float32))
    batch = sampling([SamplingParams(frequency_penalty=1.0)] * 4, 9)
    with pytest.raises(ValueError):
        draw(native, replaced(batch, **fault), np.zeros(4, bool))
