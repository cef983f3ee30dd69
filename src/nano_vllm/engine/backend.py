"""The contract between the engine and what computes. Plain arrays cross it, never a framework's type.

A backend is a module in `backends/` with

    RANK: int                                       # order in which `backend="auto"` tries; higher first
    KV_DTYPE: str                                   # the cache's type where none is asked for
    OPTIONS: frozenset[str]                         # which of the options that not every backend reads it does read
    def probe(options) -> Probe                     # usable, or the reason and the mend
    def open(program, weights, plan) -> Session     # weights: Mapping[str, Tensor], each read once
    def device(options, infos) -> Device            # where it has memory of its own to plan with; see memory/plan.py
    def ceilings(options) -> Ceilings | None        # where it can measure them; nothing is loaded then

The engine owns block ids, the session owns block bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..memory.plan import Plan
from ..sampling.pipeline import SamplingBatch


@dataclass(frozen=True)
class Probe:
    """What a backend says of this machine.

    Attributes:
        notable: the user should hear of it when another backend is taken because this one is not usable.
    """

    usable: bool
    reason: str
    mend: str = ""
    details: dict[str, str] = field(default_factory=dict)
    notable: bool = True


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do, measured: bytes read per second, and multiply-adds per second in numbers of type `multiplied`."""

    bytes_per_s: float
    multiply_adds_per_s: float
    multiplied: str


@dataclass(frozen=True)
class Batch:
    """One step. Rows are tokens; the rows of a sequence are consecutive, at consecutive positions.

    Attributes:
        tokens: (rows,) int32 ids; ignored where `sources` >= 0.
        sources: (rows,) int32; -1: the id is in `tokens`; else the index into the ids of the ticket submitted just before.
        positions: (rows,) int32.
        starts: (sequences + 1,) int32; sequence s has rows starts[s] to starts[s + 1].
        block_tables: per cache group (sequences, max_blocks) int32 block ids, unused entries -1.
        wanted: (wanted,) int32 rows whose next token is wanted, ascending.
        sampling: parameters of the wanted rows, in the same order.
        want_logits: (wanted,) bool; True: the row's float32 logits come back, and no id is drawn.
    """

    tokens: np.ndarray
    sources: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    block_tables: tuple[np.ndarray, ...]
    wanted: np.ndarray
    sampling: SamplingBatch
    want_logits: np.ndarray


@dataclass(frozen=True)
class Result:
    """Attributes:
    ids: (wanted,) int32; -1 where logits were wanted instead.
    logits: (number of True in want_logits, vocabulary) float32; valid until the next submit. None where none was wanted.
    """

    ids: np.ndarray
    logits: np.ndarray | None


class Ticket(Protocol):
    """A step under way."""

    def result(self) -> Result:
        """Waits for the step. Raises what went wrong in it."""


class Session(Protocol):
    """A loaded model with its cache.

    Attributes:
        plan: the one that it was opened with, but for what it measured: the number of blocks, and what no longer fits them.
        stages: names of the sampling stages that run on the session's device; rows that need others ask for logits.
        max_outstanding: tickets that may be open when `submit` is called. 0: each step ends before the next begins; 1: one step
            runs ahead. The engine refuses others: a row takes its id from the step just before, and from none earlier.
        weight_bytes: bytes of weights read by a step that touches all of them.
        kv_bytes_per_token: bytes of cache per token over all layers.
    """

    plan: Plan
    stages: frozenset[str]
    max_outstanding: int
    weight_bytes: int
    kv_bytes_per_token: int

    def submit(self, batch: Batch) -> Ticket: ...

    def close(self) -> None: ...
