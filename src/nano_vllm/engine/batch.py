"""The scheduler's pairs -> Batch: flat arrays, new in each step, gathered from what running requests keep between steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..sampling.pipeline import SamplingBatch, SamplingTable, needs_history
from .backend import Batch, Ticket
from .request import Request


class Rows:
    """What of a running request stays as it is from step to step, in a row of arrays: parameters and block table.

    Args:
        count: requests that may run at once.
    """

    def __init__(self, count: int) -> None:
        self.sampling = SamplingTable(count)
        self._blocks = np.full((count, 16), -1, np.int32)  # wider once a request has more
        self._known = [0] * count  # blocks that are there
        self._free = list(reversed(range(count)))

    def enter(self, request: Request) -> None:
        request.row = self._free.pop()
        self.sampling.put(request.row, request, needs_history(request.params))

    def leave(self, request: Request) -> None:
        self._blocks[request.row, : self._known[request.row]] = -1
        self._known[request.row] = 0
        self._free.append(request.row)
        request.row = -1

    def tables(self, requests: list[Request]) -> np.ndarray:
        """(requests, most blocks of any) int32, a copy: their blocks, -1 after the last."""
        most = max(len(r.blocks) for r in requests)
        if most > self._blocks.shape[1]:
            wider = np.full((len(self._blocks), max(most, 2 * self._blocks.shape[1])), -1, np.int32)
            wider[:, : self._blocks.shape[1]] = self._blocks
            self._blocks = wider
        for request in requests:
            row, count = request.row, len(request.blocks)
            if self._known[row] < count:
                self._blocks[row, self._known[row] : count] = request.blocks[self._known[row] :]
                self._known[row] = count
        return self._blocks[[r.row for r in requests], :most]


@dataclass
class Step:
    """What the engine remembers of a submitted batch until its ids come back.

    Attributes:
        work: the pairs it was built from.
        ends: per pair, the request's `computed` after the step.
        sampled: the requests whose next id it draws, in the order of the batch's wanted rows.
        observed: positions in `sampled` whose logits come back.
    """

    work: list[tuple[Request, int]]
    ends: list[int]
    sampled: list[Request]
    observed: list[int]
    sampling: SamplingBatch
    ticket: Ticket | None = None


def build(work: list[tuple[Request, int]], rows: Rows) -> tuple[Batch, Step]:
    """The batch of the pairs, and what is to be remembered of it. An id that is promised comes from the step before."""
    tokens: list[int] = []
    promised, sources, wanted, positions = [], [], [], []
    step = Step(work, [r.computed + n for r, n in work], [], [], None)
    for (request, n), end in zip(work, step.ends):
        known = len(request.tokens)
        tokens += request.tokens[end - n : end]
        if end > known:  # the last id is still on the device
            promised.append(len(tokens))
            sources.append(request.sampled_at)
            tokens.append(0)
        if end == known + request.promised:
            if request.wants_logits:
                step.observed.append(len(step.sampled))
            request.sampled_at = len(step.sampled)
            step.sampled.append(request)
            wanted.append(len(tokens) - 1)
            positions.append(end)
    step.sampling = rows.sampling.collect([r.row for r in step.sampled], step.sampled, positions)
    source = np.full(len(tokens), -1, np.int32)
    source[promised] = sources
    want_logits = np.zeros(len(wanted), bool)
    want_logits[step.observed] = True
    starts, every = _places(step)
    batch = Batch(
        tokens=np.array(tokens, np.int32),
        sources=source,
        positions=every,
        starts=starts,
        block_tables=(rows.tables([r for r, _ in work]),),
        wanted=np.array(wanted, np.int32),
        sampling=step.sampling,
        want_logits=want_logits,
    )
    return batch, step


def _places(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """`starts` and `positions` of the step's batch."""
    counts = np.array([n for _, n in step.work], np.int32)
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    shift = np.array(step.ends, np.int32) - starts[1:]  # from a row to its position
    return starts, np.arange(starts[-1], dtype=np.int32) + np.repeat(shift, counts)
