"""What of a request can be checked before it enters: past this point a wrong value would end other requests, too."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from ..errors import ParameterError, PromptError, PromptTooLong
from ..memory.plan import Plan
from ..sampling.params import SamplingParams


def check_params(params: object, vocab_size: int, tokenizer) -> None:
    """ParameterError for what is no SamplingParams, or none for this model."""
    if not isinstance(params, SamplingParams):
        raise ParameterError("sampling_params", f"it is of type {type(params).__name__}", "Give SamplingParams(…).")
    params.check_against(vocab_size)
    if params.stop and tokenizer is None:
        raise ParameterError("stop", "this engine has no tokenizer", "Use stop_token_ids.")


def checked_ids(prompt_ids: Sequence[int], vocab_size: int, plan: Plan) -> list[int]:
    """The prompt as a list of Python's integers. PromptError for other things, PromptTooLong where no answer would fit."""
    if len(prompt_ids) == 0:
        raise PromptError("prompt is empty", "there is no token to continue from", "Give at least one token.")
    plain = set(map(type, prompt_ids)) == {int}  # all of them, at a loop's fraction of the time
    if not (plain and min(prompt_ids) >= 0 and max(prompt_ids) < vocab_size):
        for t in prompt_ids:
            if isinstance(t, bool) or not isinstance(t, (int, np.integer)) or not 0 <= t < vocab_size:
                raise PromptError(
                    "prompt has an id that the vocabulary lacks", f"{t!r} is not an integer from 0 to {vocab_size - 1}"
                )
    if len(prompt_ids) >= plan.max_model_len:
        reason = plan.reasons.get("max_model_len", "as asked")
        raise PromptTooLong(
            f"prompt has {len(prompt_ids):,} tokens",
            f"max_model_len is {plan.max_model_len:,} for prompt and answer ({reason})",
            "Shorten the prompt, or raise max_model_len and the cache (kv_cache_memory or num_blocks).",
        )
    return list(prompt_ids) if plain else [int(t) for t in prompt_ids]


def check_fields(request_id: object, priority: object, cache_salt: object, policy: ModuleType) -> None:
    """ParameterError for what would fail in the scheduler or the prefix cache, and for a priority that nobody would read."""
    whole = isinstance(priority, (int, np.integer)) and not isinstance(priority, bool)
    if not (whole and abs(int(priority)) < 2**31):
        raise ParameterError("priority", "it must be a whole number of 32 bits", "Less is served sooner.")
    if priority and not policy.USES_PRIORITY:
        why = f"the policy {policy.__name__.rpartition('.')[2]!r} does not read it"
        raise ParameterError("priority", why, 'Load the model with scheduler_policy="priority", or leave it out.')
    for name, value in (("request_id", request_id), ("cache_salt", cache_salt)):
        if not isinstance(value, (str, type(None))):
            raise ParameterError(name, f"it must be a text or None, not {value!r:.60}")
