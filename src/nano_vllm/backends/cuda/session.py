"""The session of the CUDA backend: batches in, ids out, the next step prepared while the device computes this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from traceback import clear_frames

import numpy as np
import torch

from ...engine.backend import Batch, Result
from ...errors import BatchError, EngineClosed, NotEnoughMemory, OptionError
from ...formats import Tensor
from ...memory.plan import Plan, kv_bytes_per_token, with_blocks
from ...model.program import Program
from .._checks import check_batch
from . import layout, memory, sizing, warmup
from .graphs import MOST, Graphs, Shapes, is_decode
from .kernels import cache
from .kernels.draw import Sampler
from .layout import Shape
from .staging import Download, Staging
from .steps import Runner, Step, check_supported
from .weights import DTYPES, DeviceWeights

STAGES = frozenset({"ban", "repetition", "frequency", "presence", "temperature", "min_p", "top_k", "top_p", "draw"})


class Ticket:
    """A step under way.

    Args:
        idle: called once with a function that says whether the step still runs: there is time.
    """

    def __init__(self, download: Download, idle: Callable[[Callable[[], bool]], None] | None) -> None:
        self.download: Download | None = download
        self.idle = idle
        self.value: Result | None = None

    def result(self) -> Result:
        """Waits for the step. Raises what went wrong on the device."""
        if self.value is None:
            if self.idle:
                self.idle(self.download.waiting)
            self.value, self.download = Result(*self.download.wait()), None
        return self.value


class Session:
    """A loaded model; see `engine.backend.Session`. For one thread at a time.

    All work is on one stream, in the order of `submit`: a step may therefore read the ids that the one before it will have drawn,
    and write over buffers that it still uses.

    Args:
        group: a `parallel.rank.Group`, where program and weights are a rank's.

    Attributes:
        plan: with as many blocks as fit the budget once the model had run, where it came with a share of the device.
        opening: seconds that the parts of opening took: weights, buffers, warm-up, cache, graphs.
        held: what the device holds; None where that is this machine's own memory.
    """

    stages = STAGES
    max_outstanding = 1

    def __init__(self, program: Program, weights: Mapping[str, Tensor], plan: Plan, device: torch.device, group=None) -> None:
        for name, value, known in (("dtype", plan.dtype, DTYPES), ("kv_cache_dtype", plan.kv_cache_dtype, cache.TYPES)):
            if value not in known:
                raise OptionError(f"the cuda backend has no {name} {value!r}", f"there are {', '.join(known)}")
        if plan.kv_cache_dtype == "fp8" and not cache.has_fp8(device):
            name = torch.cuda.get_device_name(device)
            raise OptionError(f"{name} has no fp8", "its compute capability is under 8.9", "Ask for kv_cache_dtype int8.")
        check_supported(program)
        self.program, self.plan, self.device, self.group = program, plan, device, group
        self.held = memory.held(device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.opening: dict[str, float] = {}
        self.kv_bytes_per_token = kv_bytes_per_token(program, plan.kv_cache_dtype)
        self.drawn = 0  # ids that the last step leaves on the device
        self.closed = False
        self.graphs: Graphs | None = None
        try:
            with self._on_stream():
                self._open(weights, plan)
        except BaseException as error:
            clear_frames(error.__traceback__)  # else tensors would stay on the device as long as anybody keeps the error
            self.close()
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            raise NotEnoughMemory(
                "the model cannot be loaded",
                f"the device refused memory for weights, cache or buffers: {str(error).splitlines()[0]}",
                "Give a smaller device_memory_budget, kv_cache_memory or max_num_batched_tokens, or a smaller model.",
            ) from error

    def _open(self, weights: Mapping[str, Tensor], plan: Plan) -> None:
        """Weights and buffers; steps on a small cache, to see what else the device will hold; the cache; graphs, which keep its
        addresses."""
        # each of several ranks would find another number of blocks: they keep to the plan's
        measured = self.held is not None and plan.share is not None and self.group is None
        if measured:
            self.plan = with_blocks(plan, warmup.blocks(plan), "to measure with")
        self._allocate(weights, plan)
        if self.held is not None:
            with self._timed("warm-up"):
                self._warm_up()
            self.held.measure_libraries()
        shapes = Shapes(plan.max_num_batched_tokens, plan.max_num_seqs)
        usual = [] if plan.enforce_eager or not self.stream else list(shapes.usual(self.runner.tile_tokens))
        most = MOST
        if measured:
            with self._timed("cache"):
                most = sizing.size_cache(self, plan, shapes, len(usual))
        if usual:
            self.graphs = Graphs(shapes, self.record, most, self.group and self.group.agree)
            with self._timed("graphs"):
                self.graphs.prepare(iter(usual))
                self._warm_up()  # a graph takes longer when it first runs

    def _allocate(self, weights: Mapping[str, Tensor], plan: Plan) -> None:
        program = self.program
        with self._timed("weights"):
            loaded = DeviceWeights(program, weights, DTYPES[plan.dtype], self.device)
        self.weight_bytes = loaded.nbytes
        with self._timed("buffers"):
            self.runner = Runner(program, loaded, plan, self.device, self.group)
            self.sampler = Sampler(program.vocab_size, plan.max_num_seqs, self.device)
            most, self.max_table = plan.max_num_batched_tokens, plan.max_num_seqs * -(-plan.max_model_len // plan.block_size)
            self.staging = Staging(layout.capacity(most, plan.max_num_seqs, self.max_table), most, self.device)
            self.allocate_cache(self.plan.num_blocks)

    def allocate_cache(self, blocks: int) -> None:
        """In place of the one there is; no graph may know its addresses."""
        self.runner.caches = []
        if self.stream:
            torch.cuda.empty_cache()
        self.runner.allocate_cache(blocks)
        self.kv_bytes = sum(c.nbytes for c in self.runner.caches)

    def submit(self, batch: Batch) -> Ticket:
        """Launches the step and returns; what goes wrong on the device is raised by the ticket's `result`."""
        if self.closed:
            raise EngineClosed("the session is closed")
        self._check(batch)
        with self._on_stream():
            padded = self._graph_shape(batch)
            shape = padded or layout.shape_of(batch, self.runner.tile_tokens)
            used = layout.fill(self.staging.begin(), shape, batch, self.runner.tile_tokens, self.plan.block_size)
            self.staging.upload(used)
            logits, wanted = None, len(batch.wanted)
            if padded is None or not self.graphs.replay(padded):
                logits = self._launch(shape, batch)
            if batch.want_logits.any():
                logits = logits[torch.from_numpy(np.flatnonzero(batch.want_logits)).to(self.device, non_blocking=True)]
            else:
                logits = None
            download = self.staging.download(self.runner.last_ids[:wanted], logits)
            self.drawn = wanted
        return Ticket(download, self._idle if padded and is_decode(padded) else None)

    def memory(self) -> dict[str, int]:
        """Bytes of the device by owner: weights, kv, scratch (buffers), and on a card also context (CUDA's, where it came with
        us), libraries (code, handles, stacks), graphs, and allocator: what PyTorch's rounds up, or keeps of steps."""
        scratch = sum(b.nbytes for b in (*self.runner.tensors(), *self.sampler.tensors(), self.staging.inputs))
        found = {"weights": self.weight_bytes, "kv": self.kv_bytes, "scratch": scratch}
        if self.held is not None:
            graphs = len(self.graphs.captured) * self.held.graph if self.graphs else 0
            outside = {"context": self.held.context, "libraries": self.held.libraries, "graphs": graphs}
            found |= outside | {"allocator": max(0, self.held.tensors() - sum(found.values()))}
        return found

    def close(self) -> None:
        """Gives the memory back: the device's, and what is pinned of the host's."""
        if self.stream and not self.closed:
            self.stream.synchronize()
        self.closed = True
        self.runner = self.sampler = self.staging = self.graphs = None
        if self.stream:
            torch._C._cuda_clearCublasWorkspaces()  # else they stay for the stream's next product, which there will not be
            torch.cuda.empty_cache()
            host = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache  # the first is newer
            host()

    @contextmanager
    def _timed(self, part: str):
        begun = time.perf_counter()
        yield
        if self.stream:
            self.stream.synchronize()
        self.opening[part] = time.perf_counter() - begun

    def _on_stream(self):
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def _check(self, batch: Batch) -> None:
        plan = self.plan
        # ids of the step before are not known here; their number is
        check_batch(batch, self.program, plan, np.zeros(self.drawn, np.int32))
        for what, has, most in (
            ("rows", len(batch.tokens), plan.max_num_batched_tokens),
            ("sequences", len(batch.starts) - 1, plan.max_num_seqs),
            ("positions", int(batch.positions.max()) + 1, plan.max_model_len),
            ("block ids", batch.block_tables[0].size, self.max_table),
        ):
            if has > most:
                raise BatchError(
                    "a step is outside what the session was made for", f"it has {has:,} {what}, {most:,} is the most"
                )

    def _graph_shape(self, batch: Batch) -> Shape | None:
        """The padded shape if the step is one that graphs are made for: ids are wanted, by the stages that need no second look at
        the vocabulary, and it is a decode step, or small."""
        if self.graphs is None or not len(batch.wanted) or batch.want_logits.any():
            return None
        if edits(batch) or borders(batch, self.program.vocab_size):
            return None
        shape = layout.shape_of(batch, self.runner.tile_tokens)
        return self.graphs.shapes.decode(shape.rows) if is_decode(shape) else self.graphs.shapes.mixed(shape)

    def _idle(self, waiting: Callable[[], bool]) -> None:
        if self.graphs is not None:
            with self._on_stream():
                self.graphs.idle(waiting)

    def _launch(self, shape: Shape, batch: Batch) -> torch.Tensor:
        """Every kernel of the step, one launch after the other. -> logits (wanted, vocabulary)."""
        step = self.staging.step(shape, is_decode(shape) or len(batch.wanted) == shape.rows)
        logits = self.runner.run(step)
        if shape.wanted and not batch.want_logits.all():
            self._draw(logits, step, batch)
        elif shape.wanted:
            self.runner.last_ids[: shape.wanted].fill_(-1)
        return logits

    def _draw(self, logits: torch.Tensor, step: Step, batch: Batch) -> None:
        """Rows whose logits are wanted draw nothing, and are edited by nothing."""
        sampler, ids, inputs, most = self.sampler, self.runner.last_ids, step.inputs, self.sampler.rows
        needs, limits = edits(batch), borders(batch, self.program.vocab_size)
        if needs:
            edited, inputs = logits, dict(inputs)
            if batch.want_logits.any():
                edited = logits.clone()
            inputs["history"], inputs["banned"] = self.staging.extra(batch.sampling.history, batch.sampling.banned)
            logits = edited
        for first in range(0, len(logits), most):
            some = slice(first, first + most)
            part = {name: inputs[name][some] for name in (*layout.SAMPLING, "seed")}
            if needs:
                part |= {name: inputs[name] for name in ("history", "banned")}
                part |= {name: inputs[name][first : first + most + 1] for name in ("history_starts", "banned_starts")}
                sampler.edit(logits[some], part)
            sampler.draw(logits[some], part, ids[some][: len(logits[some])], limits)

    def record(self, shape: Shape) -> None:
        """What a graph holds."""
        step = self.staging.step(shape, is_decode(shape))
        logits = self.runner.run(step)
        self.sampler.draw(logits, step.inputs, self.runner.last_ids[: shape.wanted], False)

    def _warm_up(self) -> None:
        """Compiles or loads every kernel that a step may need, and makes PyTorch's handles, before a request waits."""
        for batch in warmup.batches(self.plan):
            self.submit(batch).result()
        self.drawn = 0


def edits(batch: Batch) -> bool:
    """Some row has banned ids or penalties."""
    return bool(len(batch.sampling.history) or len(batch.sampling.banned))


def borders(batch: Batch, vocab_size: int) -> bool:
    """Some row keeps a part of the vocabulary only, by top_k or top_p."""
    values = batch.sampling.values
    drawn, k = values["temperature"] > 0, values["top_k"]
    return bool((drawn & (((k > 0) & (k < vocab_size)) | (values["top_p"] < 1))).any())
