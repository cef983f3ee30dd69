"""Sampling on the device against the stages' NumPy definition, id for id."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the backend is PyTorch's")
pytest.importorskip("triton", reason="Triton has no package for this system")

from nano_vllm.backends.cuda.kernels.draw import Sampler  # noqa: E402
from nano_vllm.sampling import pipeline  # noqa: E402
from nano_vllm.sampling.params import SamplingParams  # noqa: E402
from tests.backends.sampling import CASES  # noqa: E402

from . import DEVICE  # noqa: E402


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


def on_device(batch, skip) -> dict[str, torch.Tensor]:
    arrays = {name: getattr(batch, name) for name in (
        "index", "position", "history", "history_starts", "prompt_lengths", "banned", "banned_starts")}  # fmt: skip
    arrays |= batch.values | {"seed": batch.seed.view(np.int32).reshape(-1, 2), "skip": skip.astype(np.int32)}
    return {name: torch.from_numpy(np.ascontiguousarray(a)).to(DEVICE) for name, a in arrays.items()}


def draw(logits: np.ndarray, batch, skip=None) -> np.ndarray:
    rows, vocab = logits.shape
    sampler, x = Sampler(vocab, rows, torch.device(DEVICE)), torch.from_numpy(logits.copy()).to(DEVICE)
    p = on_device(batch, np.zeros(rows, bool) if skip is None else skip)
    ids = torch.full((rows,), -7, dtype=torch.int32, device=DEVICE)
    if len(batch.history) or len(batch.banned):
        sampler.edit(x, p)
        assert not sampler.counts.any()
    v = batch.values
    sampler.draw(x, p, ids, bool((v["top_k"] > 0).any() or (v["top_p"] < 1).any()))
    return ids.cpu().numpy()


@pytest.mark.parametrize("vocab, seeds", [(40, 1)])
def test_ids_are_those_of_the_definition(vocab, seeds):
    for seed in range(seeds):
        logits = (3 * np.random.default_rng(seed).standard_normal((len(CASES), vocab))).astype(np.float32)
        batch = sampling([SamplingParams(**case) for case in CASES.values()], vocab, seed)
        np.testing.assert_array_equal(draw(logits, batch), pipeline.sample(logits, batch))


def test_equal_logits_are_taken_by_ascending_id():
    logits = np.random.default_rng(0).integers(-2, 3, (len(CASES), 50)).astype(np.float32)
    batch = sampling([SamplingParams(**case) for case in CASES.values()], 50)
    np.testing.assert_array_equal(draw(logits, batch), pipeline.sample(logits, batch))


def test_a_vocabulary_of_several_chunks():
    logits = (2 * np.random.default_rng(6).standard_normal((4, 9000))).astype(np.float32)
    params = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=50, top_p=0.9), SamplingParams(min_p=0.05)]
    batch = sampling(params, 9000)
    np.testing.assert_array_equal(draw(logits, batch), pipeline.sample(logits, batch))


@pytest.mark.parametrize("fault", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1, 99])
def test_rows_that_are_no_numbers_yield_no_token(fault, place):
    logits = np.random.default_rng(0).standard_normal((len(CASES), 100)).astype(np.float32)
    logits[:, place] = fault
    batch = sampling([SamplingParams(**case) for case in CASES.values()], 100)
    np.testing.assert_array_equal(draw(logits, batch), -1)


def test_infinities_and_skipped_rows():
    logits = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    logits[0, 5:] = -np.inf
    logits[1] = -np.inf
    batch = sampling([SamplingParams(temperature=2.0, top_p=0.9)] * 3, 50)
    ids = draw(logits, batch, np.array([False, False, True]))
    assert ids.tolist() == [pipeline.sample(logits[:1], pipeline.rows(batch, [0]))[0], -1, -1]


def test_more_histories_than_are_counted_at_a_time():
    logits = np.random.default_rng(0).standard_normal((35, 33)).astype(np.float32)
    batch = sampling([SamplingParams(temperature=0, repetition_penalty=3.0, presence_penalty=0.5)] * 35, 33)
    np.testing.assert_array_equal(draw(logits, batch), pipeline.sample(logits, batch))


def test_draws_follow_the_numbers_of_the_definition():
    rows, vocab = 24, 300
    logits = np.zeros((rows, vocab), np.float32)
    batch = sampling([SamplingParams()] * rows, vocab, 1)
    ids = draw(logits, batch)
    np.testing.assert_array_equal(ids, pipeline.sample(logits, batch))
    np.testing.assert_array_equal(ids, np.floor(batch.uniform * vocab))
