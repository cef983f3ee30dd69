"""From a row of logits to an id: the definition, in NumPy. Device versions are tested against it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate, chain
from types import ModuleType, SimpleNamespace

import numpy as np

from .. import registry
from .params import SamplingParams
from .philox import uniform


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

    @cached_property
    def uniform(self) -> np.ndarray:
        """(wanted,) float64 in (0, 1): the number each row's token is drawn with."""
        return uniform(self.seed, self.index, self.position)


@cache
def stages() -> tuple[ModuleType, ...]:
    """The files in stages/, in their order."""
    return tuple(sorted(registry.modules("sampling.stages").values(), key=lambda stage: stage.ORDER))


@cache
def parameters() -> dict[str, np.dtype]:
    """Name -> dtype of all that the stages read."""
    return {name: np.dtype(dtype) for stage in stages() for name, dtype in stage.PARAMETERS.items()}


@lru_cache(maxsize=4096)
def _values(params: SamplingParams) -> tuple[float, ...]:
    """The values of `parameters()`, floats held inside their dtype's range."""
    ends = {name: np.finfo(dtype).max if dtype.kind == "f" else np.iinfo(dtype).max for name, dtype in parameters().items()}
    return tuple(min(getattr(params, name), float(end)) for name, end in ends.items())


@lru_cache(maxsize=4096)
def needed(params: SamplingParams) -> frozenset[str]:
    """Names of the stages that a request may need at some step. A row that needs none is the argmax of its logits."""
    probe = SimpleNamespace(params=params, tokens=[0], prompt_length=1, promised=0, seed=0, index=0, stop_ids=(0,))
    # one token of a one-token prompt: whatever min_tokens may ban is banned; `active` reads no history
    table = SamplingTable(1)
    table.put(0, probe, history=False)
    batch = table.collect([0], [probe], [1])
    return frozenset(stage.NAME for stage in stages() if stage.active(batch)[0])


@cache
def _history_stages() -> frozenset[str]:
    return frozenset(stage.NAME for stage in stages() if stage.HISTORY)


@lru_cache(maxsize=4096)
def needs_history(params: SamplingParams) -> bool:
    """Whether a stage of the request reads its ids: then a step cannot be prepared before the last one's id is known."""
    return not needed(params).isdisjoint(_history_stages())


class SamplingTable:
    """The parameters of requests, one to a row: written once, and gathered for every step.

    Args:
        rows: how many requests there is room for.
    """

    def __init__(self, rows: int) -> None:
        self.values = {name: np.zeros(rows, dtype) for name, dtype in parameters().items()}
        self.seed = np.zeros(rows, np.uint64)
        self.index, self.prompt_lengths, self.min_tokens = (np.zeros(rows, np.int64) for _ in range(3))
        self.history = np.zeros(rows, bool)

    def put(self, row: int, request, history: bool) -> None:
        """Args:
        request: an object with `params`, `prompt_length`, `seed` (int) and `index`.
        history: its stages read its ids.
        """
        for array, value in zip(self.values.values(), _values(request.params), strict=True):
            array[row] = value
        self.seed[row] = request.seed % 2**64
        self.index[row], self.prompt_lengths[row] = request.index, request.prompt_length
        self.min_tokens[row], self.history[row] = request.params.min_tokens, history

    def collect(self, at: Sequence[int], requests: Sequence, positions: Sequence[int]) -> SamplingBatch:
        """The batch of rows whose token is to be drawn.

        Args:
            at: of each request, the row that it was put into.
            requests: with `tokens` (prompt and answer ids) and `stop_ids` (ids that may not be drawn before min_tokens), too.
            positions: of the tokens to be drawn.
        """
        at, position = np.array(at, np.intp), np.array(positions, np.int32)
        prompt_lengths = self.prompt_lengths[at]
        history, history_starts = _ragged(self.history[at], lambda i: requests[i].tokens)
        early = position - prompt_lengths < self.min_tokens[at]
        banned, banned_starts = _ragged(early, lambda i: sorted(requests[i].stop_ids))
        return SamplingBatch(
            values={name: array[at] for name, array in self.values.items()},
            seed=self.seed[at],
            index=self.index[at].astype(np.int32),
            position=position,
            history=history,
            history_starts=history_starts,
            prompt_lengths=prompt_lengths.astype(np.int32),
            banned=banned,
            banned_starts=banned_starts,
        )


def _ragged(some: np.ndarray, ids: Callable[[int], Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """-> the ids of the rows with `some`, concatenated, and where each row's begin: int32 (total,), (rows + 1,)."""
    if not some.any():
        return np.zeros(0, np.int32), np.zeros(len(some) + 1, np.int32)
    parts = [ids(i) if wanted else () for i, wanted in enumerate(some.tolist())]
    return np.array(list(chain.from_iterable(parts)), np.int32), _starts(map(len, parts))


def collect(requests: Iterable) -> SamplingBatch:
    """The batch of rows whose token is to be drawn, one for each request, in their order.

    Args:
        requests: as `SamplingTable` reads them, with `promised` (ids drawn by steps that have not come back).
    """
    requests = list(requests)
    table = SamplingTable(len(requests))
    for row, request in enumerate(requests):
        table.put(row, request, needs_history(request.params))
    return table.collect(range(len(requests)), requests, [len(r.tokens) + r.promised for r in requests])


def _starts(lengths: Iterable[int]) -> np.ndarray:
    return np.array(list(accumulate(lengths, initial=0)), np.int32)


def rows(batch: SamplingBatch, which: np.ndarray) -> SamplingBatch:
    """The batch of some of its rows; which: a (wanted,) mask, or indices."""
    which = np.flatnonzero(which) if np.asarray(which).dtype == bool else np.asarray(which, np.int64)

    def ranges(flat: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        parts = [flat[starts[i] : starts[i + 1]] for i in which]
        return np.concatenate([flat[:0], *parts]), _starts(map(len, parts))

    history, history_starts = ranges(batch.history, batch.history_starts)
    banned, banned_starts = ranges(batch.banned, batch.banned_starts)
    return SamplingBatch(
        values={name: array[which] for name, array in batch.values.items()},
        seed=batch.seed[which],
        index=batch.index[which],
        position=batch.position[which],
        history=history,
        history_starts=history_starts,
        prompt_lengths=batch.prompt_lengths[which],
        banned=banned,
        banned_starts=banned_starts,
    )


def sample(logits: np.ndarray, batch: SamplingBatch) -> np.ndarray:
    """One id per row: its active stages in order, then the largest logit, the lowest id of equals.

    Args:
        logits: (wanted, vocabulary) float32; left as they are.
        batch: parameters of these rows.

    Returns:
        (wanted,) int32; -1 for a row that has no token to draw: its logits hold NaN or +inf, or none is left that is
        finite. The engine ends that request with an error; the other rows are not touched.
    """
    active = [(stage, stage.active(batch)) for stage in stages()]
    staged = np.logical_or.reduce([mask for _, mask in active])
    ids = np.empty(len(logits), np.int32)
    for i, row in enumerate(logits):
        if staged[i]:
            row = _staged(row, batch, i, [stage for stage, mask in active if mask[i]])
        best = int(row.argmax())  # of a row with NaN, the first NaN
        ids[i] = best if np.isfinite(row[best]) else -1
    return ids


def _staged(row: np.ndarray, batch: SamplingBatch, i: int, todo: list[ModuleType]) -> np.ndarray:
    """The row after its stages; cut short when no token can be drawn from it any more."""
    for stage in todo:
        if not np.isfinite(row.max()):
            break
        row = stage.apply(row, batch, i)
    return row
