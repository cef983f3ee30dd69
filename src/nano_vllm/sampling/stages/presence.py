"""Presence penalty: each id of the answer loses the penalty once."""

from __future__ import annotations

import numpy as np

from . import _common

NAME = "presence"
ORDER = 40
PARAMETERS = {"presence_penalty": np.float32}
HISTORY = True


def active(batch) -> np.ndarray:
    return batch.values["presence_penalty"] != 0


def apply(logits: np.ndarray, batch, i: int) -> np.ndarray:
    ids, _ = _common.answer_counts(batch, i)
    result = logits.copy()
    result[ids] -= batch.values["presence_penalty"][i]
    return result
