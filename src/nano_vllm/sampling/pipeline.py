"""From a row of logits to an id: the definition, in NumPy. Device versions are tested against it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SamplingBatch:
    """Parameters of the wanted rows of a step, as flat arrays.

    Attributes:
        values: name -> (wanted,) array, one for each name in the PARAMETERS of the files in stages/.
        seed: (wanted,) uint64.
        index: (wanted,) int32, which sample of its request (n > 1) the row belongs to.
        position: (wanted,) int32, position of the token to be drawn.
        history: (total,) int32, prompt and answer ids of the rows that need them, concatenated.
        history_starts: (wanted + 1,) int32 into `history`; empty ranges for rows that do not.
        prompt_lengths: (wanted,) int32, how many of a row's history ids are the prompt's.
        banned: (total,) int32 ids that may not be drawn (min_tokens), concatenated.
        banned_starts: (wanted + 1,) int32 into `banned`.
    """

    values: dict[str, np.ndarray]
    seed: np.ndarray
    index: np.ndarray
    position: np.ndarray
    history: np.ndarray
    history_starts: np.ndarray
    prompt_lengths: np.ndarray
    banned: np.ndarray
    banned_starts: np.ndarray
