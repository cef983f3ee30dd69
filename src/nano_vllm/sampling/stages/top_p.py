"""Nucleus sampling (Holtzman et al. 2020): the smallest set of likeliest tokens whose probability reaches top_p.

Tokens are taken by descending logit, equal ones by ascending id, until their odds, added in that order in float64, reach
top_p times the sum of all odds (added by ascending id in float64). The likeliest is always kept.
"""

from __future__ import annotations

import numpy as np

from . import _common

NAME = "top_p"
ORDER = 80
PARAMETERS = {"temperature": np.float32, "top_p": np.float64}
HISTORY = False


def active(batch) -> np.ndarray:
    return (batch.values["temperature"] > 0) & (batch.values["top_p"] < 1)


def apply(logits: np.ndarray, batch, i: int) -> np.ndarray:
    ids = np.flatnonzero(logits > -np.inf)
    odds, top_p = _common.odds(logits[ids]), batch.values["top_p"][i]
    needed = top_p * np.cumsum(odds)[-1]
    # tokens below their share of what may be left out cannot be in the set (together they weigh less than 1 - top_p), so that
    # few need sorting; half of the share leaves room for rounding
    share = 0.5 * (1 - top_p) * odds.sum() / ids.size if top_p < 1 - 1e-9 else 0.0
    candidates = np.flatnonzero(odds >= share)
    order = candidates[np.argsort(-logits[ids[candidates]], kind="stable")]
    last = np.searchsorted(np.cumsum(odds[order]), needed)
    return _common.only(logits, ids[order[: last + 1]])
