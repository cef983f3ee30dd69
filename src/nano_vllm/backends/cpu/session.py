"""The session of the CPU backend: batches in, ids out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from ...engine.backend import Batch, Result
from ...errors import BackendUnavailable, BatchError, EngineClosed, NanoVLLMError, NotEnoughMemory, UnsupportedModel
from ...formats import Tensor
from ...memory.plan import Plan, kv_bytes_per_token
from ...model.program import Program
from ...sampling.pipeline import SamplingBatch
from .._checks import check_batch
from .build import Builder

# Parameters in the order and types of the native call.
PARAMETERS = {
    "temperature": np.float32,
    "repetition_penalty": np.float32,
    "frequency_penalty": np.float32,
    "presence_penalty": np.float32,
    "min_p": np.float64,
    "top_p": np.float64,
    "top_k": np.int32,
}
STAGES = frozenset({"ban", "repetition", "frequency", "presence", "temperature", "min_p", "top_k", "top_p", "draw"})


@dataclass(frozen=True)
class Done:
    """A ticket of a step that has ended."""

    value: Result

    def result(self) -> Result:
        return self.value


class Session:
    """A loaded model; see `engine.backend.Session`. For one thread at a time."""

    stages = STAGES
    max_outstanding = 0

    def __init__(self, native: ModuleType, program: Program, weights: Mapping[str, Tensor], plan: Plan) -> None:
        self.program, self.plan = program, plan
        try:
            builder = Builder(native, program, weights, plan)
            self.native, self._read_ahead = builder.build(), builder.mapped.read_ahead(native)
        except MemoryError as error:
            raise NotEnoughMemory(
                "the model cannot be loaded",
                "the system refused memory for weights, cache or buffers",
                "Give a smaller kv_cache_memory, or a smaller model.",
            ) from error
        except RuntimeError as error:
            if isinstance(error, NanoVLLMError):
                raise
            mend = "Give fewer threads, or allow the process more of them (ulimit -u)."
            raise BackendUnavailable("the cpu backend cannot start its threads", str(error), mend) from error
        except NanoVLLMError:
            raise
        except ValueError as error:
            raise UnsupportedModel("the cpu backend cannot run this model", str(error)) from error
        memory = self.native.memory()
        self.weight_bytes = memory["weights"] + memory["mapped"]
        self.kv_bytes_per_token = kv_bytes_per_token(program, plan.kv_cache_dtype)
        self.last_ids: np.ndarray | None = None

    def submit(self, batch: Batch) -> Done:
        """Computes the step before it returns; raises what goes wrong in it."""
        self._run(batch, False)
        if batch.want_logits.all():
            ids = np.full(len(batch.wanted), -1, np.int32)
        else:
            ids = draw(self.native, batch.sampling, batch.want_logits)
        self.last_ids = ids
        rows = np.flatnonzero(batch.want_logits).astype(np.int32)
        return Done(Result(ids, self.native.logits(rows) if len(rows) else None))

    def trace(self, batch: Batch) -> dict[str, np.ndarray]:
        """Computes the step as `submit` does, without drawing ids. -> op name -> copy of what the op left in its buffer."""
        return dict(zip((op.name for op in self.program.ops), self._run(batch, True), strict=True))

    def memory(self) -> dict[str, int]:
        """Bytes allocated by owner: weights, kv, scratch; and mapped, weights used where they lie in a file."""
        return self._open().memory()

    def close(self) -> None:
        """Frees weights, cache and buffers, and ends the threads."""
        if self._read_ahead is not None:
            self._read_ahead.stop()
            self._read_ahead = None
        self.native = None

    def _open(self):
        if self.native is None:
            raise EngineClosed("the session is closed")
        return self.native

    def _run(self, batch: Batch, trace: bool):
        native = self._open()
        tokens = check_batch(batch, self.program, self.plan, self.last_ids)
        arrays = [
            np.ascontiguousarray(a, np.int32)
            for a in (tokens, batch.positions, batch.starts, batch.block_tables[0], batch.wanted)
        ]
        try:
            return native.run(*arrays, trace)
        except ValueError as error:
            raise BatchError("a step is outside what the session was made for", str(error)) from error


def draw(native, batch: SamplingBatch, skip: np.ndarray) -> np.ndarray:
    """(wanted,) int32 ids of the last step's wanted rows; -1 where `skip`, and where no token has a finite logit."""
    flat = (
        batch.index,
        batch.position,
        batch.history,
        batch.history_starts,
        batch.prompt_lengths,
        batch.banned,
        batch.banned_starts,
    )
    return native.draw(
        np.ascontiguousarray(skip, bool),
        *(np.ascontiguousarray(batch.values[name], dtype) for name, dtype in PARAMETERS.items()),
        np.ascontiguousarray(batch.seed, np.uint64),
        *(np.ascontiguousarray(array, np.int32) for array in flat),
    )
