"""Perplexity of a text: the measure of what a format or a backend costs.

Windows do not overlap, and the second half of each is scored, as llama.cpp's perplexity tool does it, so values can be compared
with its.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from .engine.backend import Batch
from .errors import OptionError
from .sampling.params import SamplingParams
from .sampling.pipeline import collect


@dataclass(frozen=True)
class Perplexity:
    """Attributes:
    value: exp of the mean negative log-likelihood (natural logarithm) of the scored tokens.
    tokens: how many were scored.
    windows: how many whole windows the text holds.
    stderr: standard error of `value`: value · sd(nll) / sqrt(tokens − 1).
    steps: that were computed. A window's last token is in none of them.
    """

    value: float
    tokens: int
    windows: int
    stderr: float
    steps: int


# Nothing is drawn, yet a batch names the parameters of every wanted row.
_GREEDY = SimpleNamespace(
    params=SamplingParams(temperature=0), tokens=[0], prompt_length=1, promised=0, seed=0, index=0, stop_ids=()
)


def _batch(ids: np.ndarray, begin: int, end: int, scored: int, table: np.ndarray) -> Batch:
    """Rows `begin` to `end` of one window `ids`; those from `scored` on want logits."""
    wanted = np.arange(max(scored, begin) - begin, end - begin, dtype=np.int32)
    return Batch(
        tokens=ids[begin:end],
        sources=np.full(end - begin, -1, np.int32),
        positions=np.arange(begin, end, dtype=np.int32),
        starts=np.array([0, end - begin], np.int32),
        block_tables=(table,),
        wanted=wanted,
        sampling=collect([_GREEDY] * len(wanted)),
        want_logits=np.ones(len(wanted), bool),
    )


def log_likelihoods(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """log softmax(logits)[target] per row, in float64. logits (rows, vocabulary) float32, targets (rows,)."""
    found = np.empty(len(targets))
    for i, (row, target) in enumerate(zip(logits, targets, strict=True)):  # a row at a time: float64 of all would be large
        wide = row.astype(np.float64)
        top = wide.max()
        found[i] = wide[target] - top - math.log(np.exp(wide - top).sum())
    return found


def perplexity(
    session,
    ids,
    window: int,
    progress: Callable[[int, int, float], None] | None = None,
    *,
    block_size: int = 16,
    max_rows: int = 512,
    max_wanted: int = 256,
    bos: int | None = None,
) -> Perplexity:
    """Scores `ids` (a sequence of token ids) with an idle session, whose cache blocks 0 … are overwritten.

    Position p of a window predicts token p + 1; window/2 ≤ p ≤ window − 2 are scored. Tokens after the last whole window are not
    used.

    Args:
        progress: called after each window with (windows done, windows, perplexity so far).
        block_size: of the session's cache.
        max_rows, max_wanted: most rows, and most rows with logits, of one step.
        bos: id that takes the place of each window's first token, for models whose tokenizer begins a text with one.

    Raises:
        OptionError: the window is shorter than 4 or longer than the text.
    """
    ids = np.asarray(ids, np.int32)
    windows = len(ids) // window if window >= 4 else 0
    if not windows:
        fact = f"the text has {len(ids)} tokens" if window >= 4 else "a window has at least 4 tokens"
        raise OptionError(f"--window {window} is not possible", fact, "Choose a window between 4 and the text's length.")
    table = np.arange(-(-window // block_size), dtype=np.int32)[None]  # (1, blocks)
    half, scores, steps = window // 2, [], 0
    for w in range(windows):
        text = ids[w * window : (w + 1) * window].copy()
        targets = text[1:].copy()
        if bos is not None:
            text[0] = bos
        begin = 0
        while begin < window - 1:
            end = min(begin + max_rows, window - 1, max(begin, half) + max_wanted)
            result = session.submit(_batch(text, begin, end, half, table)).result()
            if end > half:
                scores.append(-log_likelihoods(result.logits, targets[max(begin, half) : end]))
            begin, steps = end, steps + 1
        if progress:
            progress(w + 1, windows, math.exp(np.concatenate(scores).mean()))
    nll = np.concatenate(scores)
    value = math.exp(nll.mean())
    return Perplexity(value, len(nll), windows, value * float(nll.std()) / math.sqrt(len(nll) - 1), steps)


def of_text(loaded, text: str, window: int, progress: Callable[[int, int, float], None] | None = None) -> Perplexity:
    """Perplexity of raw text: what spells a control token stays text, and windows begin with BOS where the model's texts do.

    Args:
        loaded: what `loading.load` returns, with nothing running in its engine.

    Raises:
        OptionError: the window is longer than the context, or than the text.
    """
    plan, tokenizer = loaded.plan, loaded.tokenizer
    if window > plan.max_model_len:
        raise OptionError(
            f"--window {window} is not possible", f"the context holds {plan.max_model_len:,} tokens", "Choose a shorter window."
        )
    begins = tokenizer.encode("")[:1] == [tokenizer.bos_id]
    return perplexity(
        loaded.engine.session,
        tokenizer.encode(text, parse_special=False),
        window,
        progress,
        block_size=plan.block_size,
        max_rows=plan.max_num_batched_tokens,
        max_wanted=plan.max_num_seqs,
        bos=tokenizer.bos_id if begins else None,
    )
