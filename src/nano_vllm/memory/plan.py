"""Plan: what was decided, with a reason per line. Resolved once per loaded model, then frozen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Ceilings the session allocates from and the engine stays beneath.

    Attributes:
        kv_cache_dtype: f32, f16 or bf16.
        num_blocks: cache blocks of block_size tokens.
        threads, isa: of the CPU backend.
        reasons: field name -> why it has its value.
    """

    backend: str
    kv_cache_dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    threads: int
    isa: str
    reasons: dict[str, str]
