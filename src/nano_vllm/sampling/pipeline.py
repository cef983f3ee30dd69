"""From a row of logits to an id: the definition, in NumPy. Device versions are tested against it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    batch = _assemble([probe], [()])
    return frozenset(stage.NAME for stage in stages() if stage.active(batch)[0])


@cache
def _history_stages() -> frozenset[str]:
    return frozenset(stage.NAME for stage in stages() if stage.HISTORY)


@lru_cache(maxsize=4096)
def needs_history(params: SamplingParams) -> bool:
    """Whether a stage of the request reads its ids: then a step cannot be prepared before the last one's id is known."""
    return not needed(params).isdisjoint(_history_stages())


def collect(requests: Iterable) -> SamplingBatch:
    """The batch of rows whose token is to be drawn, one for each request, in their order.

    Args:
        requests: objects with `params`, `tokens` (prompt and answer ids), `prompt_length`, `promised` (ids drawn by steps that
            have not come back), `seed` (int), `index` and `stop_ids` (ids that may not be drawn before min_tokens).
    """
    requests = list(requests)
    return _assemble(requests, [r.tokens if needs_history(r.params) else () for r in requests])


def _starts(lengths: Iterable[int]) -> np.ndarray:
    return np.array(list(accumulate(lengths, initial=0)), np.int32)


def _assemble(requests: list, histories: list[Sequence[int]]) -> SamplingBatch:
    """The arrays of `SamplingBatch`; histories: of each request, empty where none of its stages needs one."""
    table = np.array([_values(r.params) for r in requests], np.float64).reshape(len(requests), len(parameters()))
    values = {name: table[:, j].astype(dtype) for j, (name, dtype) in enumerate(parameters().items())}
    positions = [len(r.tokens) + r.promised for r in requests]
    banned = [
        sorted(r.stop_ids) if r.params.min_tokens and position - r.prompt_length < r.params.min_tokens else ()
        for r, position in zip(requests, positions, strict=True)
    ]
    return SamplingBatch(
        values=values,
        seed=np.array([r.seed % 2**64 for r in requests], np.uint64),
        index=np.array([r.index for r in requests], np.int32),
        position=np.array(positions, np.int32),
        history=np.array(list(chain.from_iterable(histories)), np.int32),
        history_starts=_starts(map(len, histories)),
        prompt_lengths=np.array([r.prompt_length for r in requests], np.int32),
        banned=np.array(list(chain.from_iterable(banned)), np.int32),
        banned_starts=_starts(map(len, banned)),
    )


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
