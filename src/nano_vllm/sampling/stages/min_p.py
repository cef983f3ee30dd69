"""Keeps the tokens at least min_p times as likely as the likeliest: exp(logit - maximum) >= min_p, in float64."""

from __future__ import annotations

import numpy as np

from . import _common

NAME = "min_p"
ORDER = 60
PARAMETERS = {"temperature": np.float32, "min_p": np.float64}
HISTORY = False


def active(batch) -> np.ndarray:
    return (batch.values["temperature"] > 0) & (batch.values["min_p"] > 0)


def apply(logits: np.ndarray, batch, i: int) -> np.ndarray:
    return _common.only(logits, _common.odds(logits) >= batch.values["min_p"][i])
