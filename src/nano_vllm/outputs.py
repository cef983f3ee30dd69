"""What comes back: RequestOutput for whole answers, StreamPiece for parts of one. Names are vLLM's where it has one."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from .engine.request import ERROR, STOP, Request, Update
from .errors import NanoVLLMError
from .text.detokenizer import Detokenizer


@dataclass(frozen=True)
class Usage:
    """Token counts; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Seconds. queued: until first scheduled; first_token: from arrival; prefill: from first scheduled to first token;
    decode: from first token to the last."""

    queued_s: float
    first_token_s: float
    prefill_s: float
    decode_s: float


@dataclass
class CompletionOutput:
    """One answer.

    Attributes:
        finish_reason: stop, length, abort or error.
        stop_reason: the stop string or stop token id that ended it, None for end-of-text.
        error: with finish_reason "error", what went wrong; text and token_ids are what came before it.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    error: Exception | None = None


@dataclass
class RequestOutput:
    """A request and its answer; `text`, `token_ids`, `finish_reason` and `error` are those of the first output."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def error(self) -> Exception | None:
        return self.outputs[0].error


@dataclass(frozen=True)
class StreamPiece:
    """Part of an answer. The last piece has a finish_reason and the whole `output`, whose text is that of all pieces joined."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: RequestOutput | None = None


class Answer:
    """Builds a RequestOutput from a request's updates; text is assembled here unless the engine did it for stop strings."""

    def __init__(self, request: Request, prompt: str | None, tokenizer) -> None:
        self.request, self.prompt = request, prompt
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None
        self._texts: list[str] = []
        self._detokenizer = None
        if request.detokenizer is None and tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=request.params.skip_special_tokens)

    def add(self, update: Update) -> str:
        """Takes an update and returns the text it makes certain."""
        if update.finish_reason == ERROR:
            self.error = update.error or NanoVLLMError("the request failed")
        self.token_ids += update.ids
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        text = update.text or ""
        if self._detokenizer is not None:
            text = self._detokenizer.push(self._shown(update))
            if update.finish_reason is not None:
                text += self._detokenizer.finish()
        self._texts.append(text)
        return text

    def _shown(self, update: Update) -> list[int]:
        """The id that ended an answer is in token_ids, but not in the text unless asked for."""
        ended_by_id = update.finish_reason == STOP and not self.request.params.include_stop_str_in_output
        return update.ids[:-1] if ended_by_id else update.ids

    def output(self) -> RequestOutput:
        request = self.request
        text = "".join(self._texts)
        completion = CompletionOutput(request.index, text, self.token_ids, self.finish_reason, self.stop_reason, self.error)
        return RequestOutput(
            request_id=request.id,
            prompt=self.prompt,
            prompt_token_ids=request.tokens[: request.prompt_length],
            outputs=[completion],
            finished=self.finish_reason is not None,
            usage=Usage(request.prompt_length, len(self.token_ids), request.cached_tokens),
            timings=_timings(request),
        )


def _timings(request: Request) -> Timings:
    end = request.finished_at or perf_counter()
    scheduled = request.first_scheduled or end
    first = request.first_token or end
    return Timings(scheduled - request.arrival, first - request.arrival, first - scheduled, end - first)
