"""SamplingParams: how one request's tokens are chosen. Names, defaults and meanings are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """Checked on construction: a wrong value raises `ParameterError` naming the field.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 or -1 keeps all.
        top_p: keeps the smallest set of tokens whose probability reaches it.
        min_p: keeps tokens at least this fraction as likely as the likeliest.
        presence_penalty, frequency_penalty: -2 to 2, on tokens of the answer.
        repetition_penalty: above 0, on tokens of prompt and answer (Keskar et al. 2019).
        seed: same seed, same request, same answer. None draws one.
        stop: strings that end the answer; not part of the text unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the answer, besides the model's own unless `ignore_eos`.
        max_tokens: of the answer. None: up to the context.
        min_tokens: before which no end-of-text or stop id is drawn.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    skip_special_tokens: bool = True
