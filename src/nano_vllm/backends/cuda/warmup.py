"""Steps that touch every kernel once: a graph can only be captured of kernels that are loaded. They write over the cache, which
holds nothing yet."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np

from ...engine.backend import Batch
from ...memory.plan import Plan
from ...sampling.params import SamplingParams
from ...sampling.pipeline import collect
from .graphs import padded_sizes


def batches(plan: Plan) -> Iterator[Batch]:
    """Decode at every padded size, then prompts: within the plan, each over blocks of its own."""
    for size in padded_sizes(min(plan.max_num_seqs, plan.max_num_batched_tokens, plan.num_blocks)):
        yield batch([1] * size, plan)
    rows = min(plan.max_num_batched_tokens, plan.max_model_len, plan.num_blocks * plan.block_size)
    for length in sorted({min(rows, n) for n in (2, 64, rows)}):
        yield batch([length], plan)


def batch(lengths: list[int], plan: Plan) -> Batch:
    """One step of sequences that begin in it, drawn with temperature."""
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    blocks = -(-max(lengths) // plan.block_size)
    request = SimpleNamespace(params=SamplingParams(), tokens=[0], prompt_length=1, promised=0, seed=0, index=0, stop_ids=())
    return Batch(
        tokens=np.zeros(starts[-1], np.int32),
        sources=np.full(starts[-1], -1, np.int32),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        starts=starts,
        block_tables=(np.arange(len(lengths) * blocks, dtype=np.int32).reshape(len(lengths), blocks),),
        wanted=starts[1:] - 1,
        sampling=collect([request] * len(lengths)),
        want_logits=np.zeros(len(lengths), bool),
    )
