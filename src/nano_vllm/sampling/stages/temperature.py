"""Logits divided by the temperature, in float32. Greedy rows (temperature 0) skip this stage and all after it."""

from __future__ import annotations

import numpy as np

from . import _common

NAME = "temperature"
ORDER = 50
PARAMETERS = {"temperature": np.float32}
HISTORY = False


def active(batch) -> np.ndarray:
    temperature = batch.values["temperature"]
    return (temperature > 0) & (temperature != 1)


def apply(logits: np.ndarray, batch, i: int) -> np.ndarray:
    return _common.scaled(logits, batch.values["temperature"][i])
