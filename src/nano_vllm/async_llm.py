"""AsyncLLM: the same engine thread, for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from .engine.request import Update
from .errors import EngineClosed
from .llm import LLM, Prompt
from .outputs import Answer, StreamPiece
from .sampling.params import SamplingParams


class AsyncLLM:
    """An LLM whose answers are awaited. Loading blocks; `await AsyncLLM.load(…)` does it in a thread.

    Requests that wait at the same time share their steps:

    ```python
    import asyncio
    from nano_vllm import AsyncLLM, SamplingParams

    async def answer(llm, prompt):
        pieces = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))
        return "".join([piece.text async for piece in pieces])

    async def main():
        async with await AsyncLLM.load("smollm2") as llm:
            prompts = ["The capital of France is", [{"role": "user", "content": "Say hello."}]]
            for text in await asyncio.gather(*(answer(llm, prompt) for prompt in prompts)):
                print(text)

    asyncio.run(main())
    ```
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self.llm = LLM(model, **options)

    @classmethod
    async def load(cls, model: str = "smollm2", **options: Any) -> AsyncLLM:
        return await asyncio.to_thread(cls, model, **options)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.to_thread(self.llm.close)

    async def unload_model(self) -> None:
        """As `LLM.unload_model`; the loop goes on meanwhile."""
        await asyncio.to_thread(self.llm.unload_model)

    async def load_model(self) -> None:
        """As `LLM.load_model`; the loop goes on meanwhile."""
        await asyncio.to_thread(self.llm.load_model)

    async def abort(self, request_id: str) -> None:
        """Ends a request, in whatever state it is, with finish_reason "abort"."""
        with suppress(EngineClosed):  # which has ended every request
            self.llm._thread.abort_id(request_id)

    async def generate(
        self,
        prompt: Prompt | Sequence[dict],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[StreamPiece]:
        """Pieces of the answer to a raw prompt, or to a list of chat messages. Leaving the loop aborts the request.

        Raises what ended the request, if it failed.
        """
        llm, loop = self.llm, asyncio.get_running_loop()
        thread = llm._thread
        is_chat = isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], dict)
        text, ids = llm._encode_chat(prompt, {}) if is_chat else llm._encode_prompt(prompt)
        updates: asyncio.Queue[Update] = asyncio.Queue()

        def sink(update: Update) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits for it
                loop.call_soon_threadsafe(updates.put_nowait, update)

        params = sampling_params or llm.default_sampling_params()
        request = thread.engine.make_request(ids, params, sink, request_id, priority, cache_salt)
        answer = Answer(request, text, llm.tokenizer)
        thread.submit([request])
        try:
            while answer.finish_reason is None:
                update = await updates.get()
                piece = answer.add(update)
                if answer.error is not None:
                    raise answer.error
                done = answer.finish_reason is not None
                yield StreamPiece(piece, update.ids, answer.finish_reason, answer.output() if done else None)
        finally:
            thread.abort([request])
