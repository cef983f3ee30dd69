"""Ids that may not be drawn yet: end-of-text and stop ids while the answer is shorter than min_tokens."""

from __future__ import annotations

import numpy as np

NAME = "ban"
ORDER = 10
PARAMETERS: dict = {}  # which ids are banned is in the batch
HISTORY = False


def active(batch) -> np.ndarray:
    return np.diff(batch.banned_starts) > 0


def apply(logits: np.ndarray, batch, i: int) -> np.ndarray:
    result = logits.copy()
    result[batch.banned[batch.banned_starts[i] : batch.banned_starts[i + 1]]] = -np.inf
    return result
