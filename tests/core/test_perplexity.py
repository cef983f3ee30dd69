"""Perplexity against its definition, with a stand-in for the session."""

from __future__ import annotations

import math
import types

import numpy as np
import pytest

from nano_vllm import perplexity
from nano_vllm.errors import OptionError


class Bigram:
    """A session whose logits at a row depend on that row's id alone; keeps what it was asked."""

    def __init__(self, vocabulary: int) -> None:
        self.table = np.random.default_rng(1).normal(0, 3, (vocabulary, vocabulary)).astype(np.float32)
        self.batches = []

    def submit(self, batch):
        self.batches.append(batch)
        rows = batch.wanted[batch.want_logits]
        result = types.SimpleNamespace(ids=np.full(len(batch.wanted), -1), logits=self.table[batch.tokens[rows]])
        return types.SimpleNamespace(result=lambda: result)


def expected(table, ids, window, bos=None):
    """The definition, written the plain way."""
    losses = []
    for w in range(len(ids) // window):
        text = list(ids[w * window : (w + 1) * window])
        for p in range(window // 2, window - 1):
            row = table[text[p]].astype(np.longdouble)
            losses.append(float(np.log(np.exp(row).sum()) - row[text[p + 1]]))
    mean = sum(losses) / len(losses)
    square = sum(x * x for x in losses) / len(losses)
    return math.exp(mean), len(losses), math.exp(mean) * math.sqrt((square - mean**2) / (len(losses) - 1))


@pytest.mark.parametrize("window", [4, 7, 32, 33])
@pytest.mark.parametrize("max_rows, max_wanted", [(512, 256), (5, 256), (512, 3), (5, 2)])
def test_perplexity_is_the_definitions_however_windows_are_cut_into_steps(window, max_rows, max_wanted):
    session, ids = Bigram(50), np.random.default_rng(0).integers(0, 50, 131)
    steps = []
    found = perplexity.perplexity(
        session, ids, window, lambda *a: steps.append(a), block_size=16, max_rows=max_rows, max_wanted=max_wanted
    )
    value, tokens, error = expected(session.table, ids, window)
    assert found.tokens == tokens and found.windows == len(ids) // window and found.steps == len(session.batches)
    assert found.value == pytest.approx(value, rel=1e-9) and found.stderr == pytest.approx(error, rel=1e-6)
    assert [s[:2] for s in steps] == [(w + 1, found.windows) for w in range(found.windows)] and steps[-1][2] == pytest.approx(
        value
    )
    for batch in session.batches:
        assert len(batch.tokens) <= max_rows and len(batch.wanted) <= max_wanted and batch.want_logits.all()
        assert batch.starts.tolist() == [0, len(batch.tokens)] and batch.tokens.dtype == batch.positions.dtype == np.int32
        assert batch.block_tables[0].shape == (1, -(-window // 16))
    positions = np.concatenate([b.positions for b in session.batches])
    assert positions.tolist() == list(range(window - 1)) * found.windows


def test_a_beginning_of_text_takes_the_place_of_each_windows_first_token():
    session, ids = Bigram(50), np.arange(1, 41)
    perplexity.perplexity(session, ids, 8, bos=0)
    assert [b.tokens[0] for b in session.batches] == [0] * 5 and [b.tokens[1] for b in session.batches] == [2, 10, 18, 26, 34]


@pytest.mark.parametrize("window", [-1, 0, 3, 21])
def test_impossible_windows_are_refused(window):
    with pytest.raises(OptionError, match="window"):
        perplexity.perplexity(Bigram(50), np.arange(20), window)


def test_log_likelihoods_do_not_overflow():
    logits = np.array([[1e4, -1e4, 0.0]], np.float32)
    assert perplexity.log_likelihoods(logits, np.array([1]))[0] == pytest.approx(-2e4)
