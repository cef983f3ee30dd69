"""Is a batch within the contract? A wrong index would read or write another request's numbers."""

from __future__ import annotations

import numpy as np

from ..engine.backend import Batch
from ..errors import BatchError
from ..memory.plan import Plan
from ..model.program import Attend, Program


def check_batch(batch: Batch, program: Program, plan: Plan, last_ids: np.ndarray | None) -> np.ndarray:
    """-> (rows,) int32 token ids, those of `sources` taken from the ids of the step before. BatchError names what is wrong."""
    rows, sequences = len(batch.tokens), len(batch.starts) - 1
    require(rows > 0, "a batch has no rows")
    require(len(batch.sources) == rows and len(batch.positions) == rows, "tokens, sources and positions differ in length")
    require(
        sequences > 0 and batch.starts[0] == 0 and batch.starts[-1] == rows and (np.diff(batch.starts) > 0).all(),
        "starts must ascend from 0 to the number of rows",
    )
    require(len(batch.want_logits) == len(batch.wanted), "want_logits and wanted differ in length")
    wanted = batch.wanted
    in_order = (np.diff(wanted) > 0).all() and (not len(wanted) or (wanted[0] >= 0 and wanted[-1] < rows))
    require(in_order, "wanted must hold ascending rows of the batch")
    check_blocks(batch, program, plan)
    return tokens_of(batch, program.vocab_size, last_ids)


def tokens_of(batch: Batch, vocab_size: int, last_ids: np.ndarray | None) -> np.ndarray:
    """(rows,) int32 ids, all within the vocabulary."""
    tokens, from_before = batch.tokens, batch.sources >= 0
    if from_before.any():
        known = 0 if last_ids is None else len(last_ids)
        require(batch.sources.max() < known, f"a row takes id {batch.sources.max()} of a step that had {known}")
        tokens = np.where(from_before, last_ids[np.maximum(batch.sources, 0)], tokens)
    require(tokens.min() >= 0 and tokens.max() < vocab_size, f"token ids must be below {vocab_size} and not negative")
    return tokens


def check_blocks(batch: Batch, program: Program, plan: Plan) -> None:
    """Every slot that is written or read has a block of the pool, and no two rows write the same slot."""
    require(len(batch.block_tables) == 1, "there must be one block table, for the one group of caches")
    table, size = batch.block_tables[0], plan.block_size
    sequences = len(batch.starts) - 1
    require(table.ndim == 2 and len(table) == sequences, "the block table must have one row per sequence")
    firsts, lasts = batch.positions[batch.starts[:-1]], batch.positions[batch.starts[1:] - 1]
    sequence = np.repeat(np.arange(sequences), np.diff(batch.starts))
    consecutive = firsts[sequence] + np.arange(len(batch.positions)) - batch.starts[:-1][sequence]
    require((batch.positions == consecutive).all(), "positions of a sequence must be consecutive")
    require(firsts.min() >= 0 and lasts.max() < table.shape[1] * size, "a position is outside the block table")
    reach = [op.window for op in program.ops if isinstance(op, Attend)]
    widest = None if None in reach else max(reach, default=1)
    lowest = np.zeros_like(firsts) if widest is None else np.maximum(0, firsts + 1 - widest)
    column = np.arange(table.shape[1])
    used = (column >= lowest[:, None] // size) & (column <= lasts[:, None] // size)
    outside = used & ((table < 0) | (table >= plan.num_blocks))
    if outside.any():
        s = int(outside.any(axis=1).argmax())
        require(False, f"sequence {s} uses a block outside the pool: {table[s, used[s]].tolist()}")
    written = table[sequence, batch.positions // size].astype(np.int64) * size + batch.positions % size
    written.sort()  # a twelfth of the time of np.unique
    require((written[1:] > written[:-1]).all(), "two rows of the batch write the same slot of the cache")


def require(met: bool, fault: str) -> None:
    if not met:
        raise BatchError("a batch breaks the backend's contract", fault)
