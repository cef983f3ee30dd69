"""Keeps the k tokens of the largest logits, exactly k; of equal ones at the border the lower ids."""

from __future__ import annotations

import numpy as np

from . import _common

NAME = "top_k"
ORDER = 70
PARAMETERS = {"temperature": np.float32, "top_k": np.int32}
HISTORY = False


def active(batch) -> np.ndarray:
    return (batch.values["temperature"] > 0) & (batch.values["top_k"] > 0)


def apply(logits: np.ndarray, batch, i: int) -> np.ndarray:
    k = int(batch.values["top_k"][i])
    if k >= logits.size:
        return logits
    border = np.partition(logits, logits.size - k)[logits.size - k]
    above = np.flatnonzero(logits > border)
    equal = np.flatnonzero(logits == border)[: k - above.size]
    return _common.only(logits, np.concatenate([above, equal]))
