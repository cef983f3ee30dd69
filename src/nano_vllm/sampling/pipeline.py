"""From a row of logits to an id: the definition, in NumPy. Device versions are tested against it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SamplingBatch:
    """Parameters of the wanted rows of a step, as flat arrays.

    Attributes:
        temperature, top_p, min_p: (wanted,) float32.
        top_k: (wanted,) int32, 0 keeps all.
        presence, frequency, repetition: (wanted,) float32 penalties.
        seed: (wanted,) uint64.
        index: (wanted,) int32, which sample of its request (n > 1) the row belongs to.
        position: (wanted,) int32, position of the token to be drawn.
        history: (total,) int32, prompt and answer ids of the rows that have penalties, concatenated.
        history_starts: (wanted + 1,) int32 into `history`; empty ranges for rows without penalties.
        prompt_lengths: (wanted,) int32, how many of a row's history ids are the prompt's.
        banned: (total,) int32 ids that may not be drawn (min_tokens), concatenated.
        banned_starts: (wanted + 1,) int32 into `banned`.
    """

    temperature: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    top_k: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray
    repetition: np.ndarray
    seed: np.ndarray
    index: np.ndarray
    position: np.ndarray
    history: np.ndarray
    history_starts: np.ndarray
    prompt_lengths: np.ndarray
    banned: np.ndarray
    banned_starts: np.ndarray
