"""A backend without a model: an id is a function of the tokens read back from the cache, so any wrong block shows."""

from __future__ import annotations

import zlib

import numpy as np

from nano_vllm.engine.backend import Batch, Result
from nano_vllm.engine.engine import Engine
from nano_vllm.memory.plan import Plan
from nano_vllm.sampling.params import SamplingParams

VOCAB = 97
EMPTY = -7


def next_id(tokens) -> int:
    """The fake model."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % VOCAB


def answer(prompt: list[int], n: int) -> list[int]:
    """What the fake model answers to a prompt, computed without an engine."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_id(tokens))
    return tokens[len(prompt) :]


class FakeSession:
    """Keeps (token, position) in cache slots. `max_outstanding` 1: ids come back a step late, as from a device."""

    stages = frozenset()
    weight_bytes = kv_bytes_per_token = 1

    def __init__(self, plan: Plan, max_outstanding: int = 0) -> None:
        self.plan, self.max_outstanding = plan, max_outstanding
        self.cache = np.full((plan.num_blocks, plan.block_size, 2), EMPTY, np.int64)
        self.last_ids = np.zeros(0, np.int32)
        self.fail_on: int | None = None
        self.steps: list[Batch] = []

    def submit(self, batch: Batch) -> FakeTicket:
        size = self.plan.block_size
        if not 1 <= len(batch.tokens) <= self.plan.max_num_batched_tokens:
            raise ValueError(f"{len(batch.tokens)} rows")
        if len(batch.starts) - 1 > self.plan.max_num_seqs:
            raise ValueError("too many sequences")
        self.steps.append(batch)
        ids = np.where(batch.sources >= 0, self.last_ids[np.maximum(batch.sources, 0)] if len(self.last_ids) else 0, batch.tokens)
        drawn = {}
        for s, table in enumerate(batch.block_tables[0]):
            for row in range(batch.starts[s], batch.starts[s + 1]):
                position = batch.positions[row]
                self.cache[table[position // size], position % size] = ids[row], position
            position = batch.positions[batch.starts[s + 1] - 1]
            slots = np.concatenate([self.cache[b] for b in table[: position // size + 1]])[: position + 1]
            if not np.array_equal(slots[:, 1], np.arange(position + 1)):
                raise ValueError(f"sequence {s} reads slots that are not its own")
            drawn[batch.starts[s + 1] - 1] = next_id(slots[:, 0])
        self.last_ids = np.array([drawn[row] for row in batch.wanted], np.int32)
        if self.fail_on is not None and self.fail_on in batch.tokens:
            raise RuntimeError("the device is on fire")
        logits = np.full((len(batch.wanted), VOCAB), -1, np.float32)
        logits[np.arange(len(batch.wanted)), self.last_ids] = 1
        return FakeTicket(Result(np.where(batch.want_logits, -1, self.last_ids), logits[batch.want_logits]))

    def close(self) -> None:
        pass


class OnDevice(FakeSession):
    """A session that draws ids itself."""

    def __init__(self, plan: Plan, max_outstanding: int = 0) -> None:
        super().__init__(plan, max_outstanding)
        from nano_vllm import registry

        self.stages = frozenset(registry.names("sampling.stages"))


class FakeTicket:
    def __init__(self, result: Result) -> None:
        self._result = result

    def result(self) -> Result:
        return self._result


def make_plan(num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=None) -> Plan:
    length = max_model_len or num_blocks * block_size
    return Plan("fake", "f32", block_size, num_blocks, length, max_num_seqs, max_num_batched_tokens, 1, "", {})


class Client:
    """Collects what an engine says of each request, and checks that it says one last thing."""

    def __init__(self, max_outstanding: int = 0, on_device: bool = True, engine_options: dict | None = None, **plan) -> None:
        self.plan = make_plan(**plan)
        self.session = (OnDevice if on_device else FakeSession)(self.plan, max_outstanding)
        self.engine = Engine(self.session, VOCAB, **(engine_options or {}))
        self.ids: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.errors: dict[str, Exception] = {}

    def submit(self, prompt, max_tokens=8, **options) -> str:
        params = options.pop("params", None) or SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = self.engine.make_request(prompt, params, self._sink, **options)
        self.ids[request.id] = []
        self.engine.submit(request)
        return request.id

    def _sink(self, update) -> None:
        key = update.request.id
        if key in self.ends:
            raise AssertionError(f"{key} got an update after its end")
        self.ids[key] += update.ids
        if update.finish_reason is not None:
            self.ends[key] = update.finish_reason
            if update.error is not None:
                self.errors[key] = update.error

    def run(self, limit: int = 10_000) -> None:
        while self.engine.busy:
            self.engine.step()
            limit -= 1
            if not limit:
                raise AssertionError("engine hangs")
        self.engine.check()
