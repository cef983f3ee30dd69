"""Frequency penalty: each id of the answer loses the penalty times its count (float32: product, then difference)."""

from __future__ import annotations

import numpy as np

from . import _common

NAME = "frequency"
ORDER = 30
PARAMETERS = {"frequency_penalty": np.float32}
HISTORY = True


def active(batch) -> np.ndarray:
    return batch.values["frequency_penalty"] != 0


def apply(logits: np.ndarray, batch, i: int) -> np.ndarray:
    ids, counts = _common.answer_counts(batch, i)
    result = logits.copy()
    result[ids] -= batch.values["frequency_penalty"][i] * counts
    return result
