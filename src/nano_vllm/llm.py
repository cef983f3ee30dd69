"""LLM: a model in this process. The same straight line as the server's, without its HTTP ends."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from . import registry
from .engine.request import Request, Update
from .engine.thread import EngineThread
from .errors import PromptError, TemplateError, UnknownOption
from .memory.plan import Plan
from .options import options as make_options
from .outputs import Answer, RequestOutput, StreamPiece
from .running import RunningEngine
from .sampling.params import SamplingParams, merged
from .text.template import ChatTemplate, encode_chat

SAMPLING = tuple(field.name for field in fields(SamplingParams))
Prompt = str | dict[str, Any] | Sequence[int]


class LLM:
    """A loaded model: `LLM("smollm2")`, an alias, a Hugging Face id, a folder, a .nano or .gguf file.

    Keywords are the fields of `Options`. Use it as a context manager, or call `close()`: both free everything.
    Its methods may be called from several threads; all requests share one engine.
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self._running = RunningEngine(make_options(model=model, **options))
        self._close = weakref.finalize(self, self._running.close)  # at exit, too, if nobody closed it
        loaded = self._running.loaded
        self.options, self.spec, self.tokenizer = loaded.options, loaded.spec, loaded.tokenizer
        self._templates: dict[str | None, ChatTemplate] = {}

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends running requests (finish_reason "abort") and frees the model. Closing twice is no error."""
        self._close()

    def unload_model(self) -> None:
        """Gives weights, cache and buffers back, on the device and on the host, until `load_model`.

        Does not wait for answers: requests that run end at once with finish_reason "error" and ModelUnloaded, and keep what they
        have said so far (who wants whole answers waits for them first). Until the model is loaded again, new requests raise
        ModelUnloaded; text is encoded and decoded as before. Cached prefixes are lost. Of a GPU, the process keeps what CUDA
        itself takes, its context and the code of kernels. Unloading twice is no error.

        Raises:
            EngineClosed: this process was forked from the one that loaded the model.
        """
        self._running.unload()

    def load_model(self) -> None:
        """Loads the model again after `unload_model`, from the same file, with the same options; `plan` is made anew, from the
        memory that is free now. Counters and the seeds of requests without one begin anew. Loading twice is no error.

        Raises:
            NotEnoughMemory: it does not fit now. The model stays unloaded; this can be called again.
            ModelNotFound, ModelFileError: its file is gone, or holds another model.
            EngineClosed: `close` was called, or this process was forked from the one that loaded the model.
        """
        self._running.load()

    @property
    def plan(self) -> Plan:
        """What was decided when the model was last loaded."""
        return self._running.loaded.plan

    @property
    def _thread(self) -> EngineThread:
        """Raises ModelUnloaded, or EngineClosed. To be asked for once in each call; see RunningEngine."""
        return self._running.thread

    # -- whole answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Answers to raw prompts, in their order.

        A prompt or parameter that is not valid raises before anything runs. A request that fails while it runs takes no other's
        answer away: its output has finish_reason "error" and the exception in `error`. Where every request failed, the first's
        is raised.

        Args:
            prompts: text, ids, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or a list of these; ids are a list, a tuple or
                a NumPy array of whole numbers.
            sampling_params: one for all, or one each; None: the model's own defaults.
            use_tqdm: a progress bar for lists, where standard error is a terminal.
            priority: one for all, or one each; less is served sooner. For scheduler_policy "priority".
        """
        single = isinstance(prompts, (str, bytes, dict)) or _is_ids(prompts) or not np.iterable(prompts)
        return self._run(self._encode_prompt, [prompts] if single else list(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[dict] | Sequence[Sequence[dict]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers to one conversation or several, through the model's chat template; requests that fail as in `generate`.

        Args:
            template: `chat_template` (Jinja source instead of the model's), `add_generation_prompt`, and what the template
                itself reads (`tools`, `enable_thinking`, …). A name that it does not read raises UnknownOption, unless the value
                asks for nothing: None, False or empty.
        """
        several = isinstance(messages, (list, tuple)) and len(messages) > 0 and not isinstance(messages[0], dict)
        chats = messages if several else [messages]
        return self._run(lambda chat: self._encode_chat(chat, template), chats, sampling_params, use_tqdm, 0)

    def _run(self, encode: Callable, prompts: Sequence, params, use_tqdm: bool, priority) -> list[RequestOutput]:
        thread = self._thread
        each_params = self._one_each(params if params is not None else self.default_sampling_params(), len(prompts), "params")
        priorities = self._one_each(priority, len(prompts), "priorities")
        updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        answers: dict[str, Answer] = {}
        requests = []
        for i, (prompt, p, rank) in enumerate(zip(prompts, each_params, priorities), 1):
            try:
                text, ids = encode(prompt)
                request = thread.engine.make_request(ids, p, updates.put, priority=rank)
            except (PromptError, TemplateError) as error:
                raise error if len(prompts) == 1 else error.about(f"prompt {i} of {len(prompts)}")
            requests.append(request)
            answers[request.id] = Answer(request, text, self.tokenizer)
        bar = _progress_bar(len(requests), use_tqdm)
        thread.submit(requests)
        running = set(answers)
        try:
            while running:
                update = updates.get()
                answers[update.request.id].add(update)
                if update.finish_reason is not None:
                    running.discard(update.request.id)
                    bar.update(1)
        finally:
            if running:  # an error, or Ctrl-C: what still runs is of no use to anybody
                thread.abort([answers[i].request for i in running])
            bar.close()
        outputs = [a.output() for a in answers.values()]
        if outputs and all(output.error is not None for output in outputs):
            raise outputs[0].error
        return outputs

    @staticmethod
    def _one_each(value, n: int, what: str) -> list:
        if isinstance(value, (list, tuple)):
            if len(value) != n:
                raise PromptError(f"{len(value)} {what} for {n} prompts", "", "Give one, or one for each prompt.")
            return list(value)
        return [value] * n

    # -- streams

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, stream_interval: int = 1
    ) -> Iterator[StreamPiece]:
        """Pieces of the answer as they become certain, `stream_interval` tokens at a time; the last one has `.output`.

        Raises what ended the request, if it failed.
        The request begins when the first piece is asked for. Closing the iterator aborts it.
        """
        return self._stream(*self._encode_prompt(prompt), sampling_params, stream_interval)

    generate_stream = stream

    def stream_chat(
        self,
        messages: Sequence[dict],
        sampling_params: SamplingParams | None = None,
        stream_interval: int = 1,
        **template: Any,
    ) -> Iterator[StreamPiece]:
        """`stream` for a conversation; `template` as for `chat`."""
        return self._stream(*self._encode_chat(messages, template), sampling_params, stream_interval)

    def _stream(self, text: str | None, ids: list[int], params, interval: int) -> Iterator[StreamPiece]:
        if not isinstance(interval, int) or interval < 1:
            raise PromptError(f"stream_interval {interval!r} is not valid", "it is a whole number of at least 1")
        thread, updates = self._thread, queue.SimpleQueue()
        request = thread.engine.make_request(ids, params or self.default_sampling_params(), updates.put)
        return self._pieces(thread, request, Answer(request, text, self.tokenizer), updates, interval)

    @staticmethod
    def _pieces(
        thread: EngineThread, request: Request, answer: Answer, updates: queue.SimpleQueue[Update], interval: int
    ) -> Iterator[StreamPiece]:
        text, ids = "", []
        thread.submit([request])
        try:
            while answer.finish_reason is None:
                update = updates.get()
                text += answer.add(update)
                ids += update.ids
                if answer.error is not None:
                    raise answer.error
                if answer.finish_reason is not None:
                    yield StreamPiece(text, ids, answer.finish_reason, answer.output())
                elif len(ids) >= interval:
                    yield StreamPiece(text, ids)
                    text, ids = "", []
        finally:
            thread.abort([request])

    # -- text and numbers

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, with the tokens that the model wants around it (BOS)."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens)

    def default_sampling_params(self) -> SamplingParams:
        """The model's generation_config where it says something, vLLM's defaults elsewhere."""
        return merged(self._running.loaded.generation_config, {})

    def stats(self) -> dict:
        """Counters since loading, and what a step reads: `weight_bytes`, `kv_bytes_per_token`."""
        thread = self._thread
        session = thread.engine.session
        counters = thread.call(lambda engine: engine.stats.as_dict())
        return counters | {"weight_bytes": session.weight_bytes, "kv_bytes_per_token": session.kv_bytes_per_token}

    # -- from what users give to ids

    def _encode_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, dict) and set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
            return prompt["prompt"], self.tokenizer.encode(prompt["prompt"])
        if isinstance(prompt, dict) and set(prompt) == {"prompt_token_ids"}:
            prompt = prompt["prompt_token_ids"]
            if np.iterable(prompt):
                return None, list(prompt)
        if _is_ids(prompt) or (isinstance(prompt, (list, tuple)) and not prompt):
            return None, list(prompt)
        mend = 'Give text, {"prompt": …} or {"prompt_token_ids": …}.'
        raise PromptError(f"a prompt of type {type(prompt).__name__} is not understood", "", mend)

    def _encode_chat(self, messages: Sequence[dict], template: dict[str, Any]) -> tuple[str, list[int]]:
        template = dict(template)
        source = template.pop("chat_template", None)
        if not isinstance(source, (str, type(None))):
            raise TemplateError("chat_template must be text", f"it is {type(source).__name__}", "Give the template's source.")
        if source not in self._templates:
            self._templates[source] = ChatTemplate.of(self.tokenizer, source)
        known = self._templates[source].reads | {"add_generation_prompt"}
        for name, value in template.items():
            if name not in known and (name in SAMPLING or not _asks_nothing(value)):
                mend = "Put it into SamplingParams." if name in SAMPLING else registry.nearest(name, sorted(known))
                raise UnknownOption(f"the chat template does not read {name!r}", "it would be ignored", mend or "Leave it out.")
        rendered = self._templates[source].render(messages, **template)
        return rendered.text, encode_chat(self.tokenizer, rendered)


def _is_ids(prompt: Any) -> bool:
    """A flat list of ids, which is one prompt and not several."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and prompt.dtype.kind in "iu"
    return isinstance(prompt, (list, tuple)) and len(prompt) > 0 and all(isinstance(t, (int, np.integer)) for t in prompt)


def _asks_nothing(value: Any) -> bool:
    """A template's variable that changes nothing where it is not read."""
    return value is None or (isinstance(value, (bool, str, list, tuple, dict)) and not value)


def _progress_bar(total: int, wanted: bool):
    from tqdm import tqdm  # here, since most uses of the package never show a bar

    return tqdm(total=total, desc="Answers", disable=None if wanted and total > 1 else True, dynamic_ncols=True)
