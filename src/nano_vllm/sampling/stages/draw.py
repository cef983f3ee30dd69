"""Draws one of the kept tokens in proportion to its odds, and keeps that one alone.

The odds are added by ascending id in float64; the id drawn is the first whose sum exceeds u times the total, u being the
row's uniform number.
"""

from __future__ import annotations

import numpy as np

from . import _common

NAME = "draw"
ORDER = 90
PARAMETERS = {"temperature": np.float32}
HISTORY = False


def active(batch) -> np.ndarray:
    return batch.values["temperature"] > 0


def apply(logits: np.ndarray, batch, i: int) -> np.ndarray:
    ids = np.flatnonzero(logits > -np.inf)
    sums = np.cumsum(_common.odds(logits[ids]))
    # u is at most 1 - 2^-53, so the product is below the total also after rounding, and some sum exceeds it
    return _common.only(logits, ids[np.searchsorted(sums, batch.uniform[i] * sums[-1], side="right")][None])
