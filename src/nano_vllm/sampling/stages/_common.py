"""What several stages share."""

from __future__ import annotations

import numpy as np

LIMIT = np.finfo(np.float32).max


def scaled(logits: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """logits / factors in float32, with overflow held at float32's ends so that a kept token stays kept.

    Args:
        logits: (n,) float32, -inf where excluded.
        factors: float32 above 0, (n,) or one number.
    """
    with np.errstate(over="ignore"):
        quotient = np.clip(logits / factors, -LIMIT, LIMIT)
    return np.where(np.isneginf(logits), logits, quotient)


def odds(logits: np.ndarray) -> np.ndarray:
    """(n,) float64 exp(logit - maximum): the difference in float32, the exponential in float64; not normalised."""
    with np.errstate(over="ignore"):
        return np.exp((logits - logits.max()).astype(np.float64))


def only(logits: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The logits of the kept ids (a mask, or an array of ids); the rest -inf."""
    result = np.full_like(logits, -np.inf)
    result[kept] = logits[kept]
    return result


def answer_counts(batch, i: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids of row i's answer, ascending, and how often each occurs (float32)."""
    start = batch.history_starts[i] + batch.prompt_lengths[i]
    ids, counts = np.unique(batch.history[start : batch.history_starts[i + 1]], return_counts=True)
    return ids, counts.astype(np.float32)
