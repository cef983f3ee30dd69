"""The scheduler's pairs -> Batch: flat arrays, built anew each step and thrown away after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..sampling.pipeline import SamplingBatch, collect
from .backend import Batch, Ticket
from .request import Request


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


def build(work: list[tuple[Request, int]], previous: Step | None, needs_logits) -> tuple[Batch, list[Request], list[int]]:
    """Args:
        previous: the outstanding step, from which promised ids come.
        needs_logits: request -> True if its row's logits are wanted on the host.

    Returns:
        The batch, the requests it samples, and the positions among them that want logits.
    """
    promised_at = {id(r): i for i, r in enumerate(previous.sampled)} if previous else {}
    tokens: list[int] = []
    positions: list[np.ndarray] = []
    starts, wanted, sampled, observed, sources = [0], [], [], [], []
    for request, n in work:
        begin, end = request.computed, request.computed + n
        tokens += request.tokens[begin:end]
        missing = end - len(request.tokens)  # 1 where the last id is still on the device
        if missing > 0:
            tokens.append(0)
            sources.append((len(tokens) - 1, promised_at[id(request)]))
        positions.append(np.arange(begin, end, dtype=np.int32))
        starts.append(len(tokens))
        if end == len(request.tokens) + request.promised:
            wanted.append(len(tokens) - 1)
            if needs_logits(request):
                observed.append(len(sampled))
            sampled.append(request)
    source = np.full(len(tokens), -1, np.int32)
    for row, index in sources:
        source[row] = index
    want_logits = np.zeros(len(wanted), bool)
    want_logits[observed] = True
    batch = Batch(
        tokens=np.array(tokens, np.int32),
        sources=source,
        positions=np.concatenate(positions),
        starts=np.array(starts, np.int32),
        block_tables=(_tables(work),),
        wanted=np.array(wanted, np.int32),
        sampling=collect(sampled),
        want_logits=want_logits,
    )
    return batch, sampled, observed


def _tables(work: list[tuple[Request, int]]) -> np.ndarray:
    table = np.full((len(work), max(len(r.blocks) for r, _ in work)), -1, np.int32)
    for row, (request, _) in zip(table, work):
        row[: len(request.blocks)] = request.blocks
    return table
