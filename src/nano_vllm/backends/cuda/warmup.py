"""Steps that touch every kernel once: a graph can only be captured of kernels that are loaded, and a first request should find
what later ones find. They write over the cache, which holds nothing yet."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np

from ...engine.backend import Batch
from ...memory.plan import Plan
from ...sampling.params import SamplingParams
from ...sampling.pipeline import collect
from .graphs import MIXED_ROWS, MIXED_STEP, padded_sizes

PLAIN = SamplingParams()
EVERY_STAGE = SamplingParams(top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1)


def batches(plan: Plan) -> Iterator[Batch]:
    """Decode at every padded size (without graphs, powers of two) and beside a prompt, every sampling stage, prompts of the sizes
    that graphs have, and the largest step: within the plan, each over blocks of its own."""
    most = min(plan.max_num_seqs, plan.max_num_batched_tokens, plan.num_blocks)
    for size in [2**i for i in range(most.bit_length())] if plan.enforce_eager else padded_sizes(most):
        yield batch([1] * size, plan)
    yield batch([1], plan, EVERY_STAGE)
    for size in (1, 2, 4, 8, 16):  # decoding beside a prompt, which kernels for few rows alone do not take
        if size < min(most, plan.max_num_batched_tokens - 1):
            yield batch([2] + [1] * size, plan)
    rows = min(plan.max_num_batched_tokens, plan.max_model_len, plan.num_blocks * plan.block_size)
    for length in sorted({min(rows, n) for n in (2, *range(MIXED_STEP, MIXED_ROWS + 1, MIXED_STEP))}):
        yield batch([length], plan)
    yield batch(largest(plan), plan)


def blocks(plan: Plan) -> int:
    """Of a cache that these steps can run on as they would on the plan's."""
    return min(plan.num_blocks, max(plan.max_num_seqs, -(-plan.max_num_batched_tokens // plan.block_size)))


def largest(plan: Plan) -> list[int]:
    """Lengths of prompts that together have as many tokens as a step may, or few less."""
    most = min(plan.max_num_batched_tokens, plan.num_blocks * plan.block_size)
    count = -(-most // plan.max_model_len)
    length = most // count
    length = length // plan.block_size * plan.block_size or length
    return [length] * min(count, plan.max_num_seqs, plan.num_blocks // -(-length // plan.block_size))


def batch(lengths: list[int], plan: Plan, params: SamplingParams = PLAIN) -> Batch:
    """One step of sequences that begin in it, drawn with `params`."""
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    blocks = -(-max(lengths) // plan.block_size)
    request = SimpleNamespace(params=params, tokens=[0], prompt_length=1, promised=0, seed=0, index=0, stop_ids=())
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
