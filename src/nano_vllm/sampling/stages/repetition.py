"""Repetition penalty (Keskar et al. 2019, CTRL): ids of prompt and answer, each once, however often it occurs.

A positive logit is divided by the penalty, another multiplied by it, so that above 1 both become less likely.
"""

from __future__ import annotations

import numpy as np

from . import _common

NAME = "repetition"
ORDER = 20
PARAMETERS = {"repetition_penalty": np.float32}
HISTORY = True


def active(batch) -> np.ndarray:
    return batch.values["repetition_penalty"] != 1


def apply(logits: np.ndarray, batch, i: int) -> np.ndarray:
    ids = np.unique(batch.history[batch.history_starts[i] : batch.history_starts[i + 1]])
    penalty, seen, result = batch.values["repetition_penalty"][i], logits[ids], logits.copy()
    with np.errstate(over="ignore"):
        multiplied = np.maximum(seen * penalty, -_common.LIMIT)
    result[ids] = np.where(seen > 0, _common.scaled(seen, penalty), np.where(np.isneginf(seen), seen, multiplied))
    return result
