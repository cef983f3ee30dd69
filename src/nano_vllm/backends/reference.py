"""The definition: one NumPy function per kind of op. Slow, and what every kernel and backend is tested against.

Arrays are float32. Rows are the tokens of a step. NumPy decides the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..engine.backend import Batch, Probe, Result
from ..errors import BatchError, EngineClosed, ModelFileError, OptionError, UnsupportedModel
from ..formats import Tensor
from ..memory.plan import Plan, kv_bytes_per_token
from ..model.program import Attend, Embed, Gate, Linear, Normalize, Program, Rotate, Select
from ..model.spec import Rope
from ..sampling.pipeline import sample, stages
from ._checks import check_batch
from ._rounding import CACHES, Quantized, WholeCache, cache_of, linear_int8

RANK = 0
KV_DTYPE = "f32"
OPTIONS = frozenset()


def probe(options) -> Probe:
    """Usable wherever NumPy is."""
    return Probe(True, f"NumPy {np.__version__}, slow: the definition that the others are tested against")


def open(program: Program, weights: Mapping[str, Tensor], plan: Plan, activations: str = "f32") -> Session:
    """Weights are unpacked to float32 here.

    Args:
        activations: f32, or int8: rows that enter a linear over quantised weights are rounded first, as fast kernels do.

    Raises:
        ModelFileError: a weight is missing or has another shape.
        UnsupportedModel: an activation function that is not known.
        OptionError: a cache type or `activations` that is not known.
    """
    return Session(program, weights, plan, activations)


# The ops


def embed(table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """table (vocabulary, width), tokens (rows,) -> (rows, width): the tokens' rows."""
    return table[tokens]


def normalize(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x (…, width), weight (width,) -> (…, width): x / sqrt(mean(x²) + eps) · weight."""
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    return x / np.sqrt(mean + np.float32(eps)) * weight


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """x (rows, K), weight (N, K), bias (N,) or None -> (rows, N): x · weightᵀ + bias."""
    y = x @ weight.T
    return y if bias is None else y + bias


def turns(positions: np.ndarray, rope: Rope) -> tuple[np.ndarray, np.ndarray]:
    """positions (rows,) -> cosine and sine (rows, head_size / 2) of position · frequency, times the rope's scale.

    The angle is a float32 product; cosine and sine of it are taken in float64 and rounded.
    """
    angles = (positions.astype(np.float32)[:, None] * np.float32(rope.frequencies)).astype(np.float64)
    return tuple(f(angles).astype(np.float32) * np.float32(rope.scale) for f in (np.cos, np.sin))


def rotate(x: np.ndarray, cosine: np.ndarray, sine: np.ndarray) -> np.ndarray:
    """x (rows, heads, head_size), cosine and sine (rows, head_size / 2): [a | b] -> [a·cos − b·sin | b·cos + a·sin]."""
    a, b = np.split(x, 2, axis=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """One row: q (heads, head_size), keys and values that it sees (kv_heads, n, head_size) -> (heads, head_size).

    Head h reads kv head h // (heads / kv_heads): softmax(scale · q · keysᵀ) · values.
    """
    grouped = q.reshape(len(keys), -1, q.shape[-1])  # (kv_heads, heads / kv_heads, head_size)
    scores = grouped @ keys.transpose(0, 2, 1) * np.float32(scale)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (shares / shares.sum(axis=-1, keepdims=True) @ values).reshape(q.shape)


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + exp(−x)) (Elfwing et al. 2017)."""
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """x / 2 · (1 + tanh(sqrt(2 / π) · (x + 0.044715 x³))) (Hendrycks & Gimpel 2016)."""
    return x / 2 * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"silu": silu, "gelu_tanh": gelu_tanh}


def gate(x: np.ndarray, size: int, activation: str) -> np.ndarray:
    """x (rows, 2 · size) -> (rows, size): activation(first half) · second half."""
    return ACTIVATIONS[activation](x[:, :size]) * x[:, size : 2 * size]


def select(x: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """x (rows, width), wanted (n,) -> (n, width)."""
    return x[wanted]


# The session


@dataclass(frozen=True)
class Done:
    """A ticket of a step that has ended."""

    value: Result

    def result(self) -> Result:
        return self.value


class Session:
    """A loaded model; see `engine.backend.Session`."""

    max_outstanding = 0

    def __init__(self, program: Program, weights: Mapping[str, Tensor], plan: Plan, activations: str) -> None:
        if plan.kv_cache_dtype not in CACHES:
            raise OptionError(f"no cache type {plan.kv_cache_dtype!r}", f"there are {', '.join(CACHES)}")
        if activations not in ("f32", "int8"):
            raise OptionError(f"no activations {activations!r}", "there are f32, int8")
        for op in program.ops:
            if isinstance(op, Gate) and op.activation not in ACTIVATIONS:
                raise UnsupportedModel(f"activation {op.activation!r} is not supported", f"known are {', '.join(ACTIVATIONS)}")
        self.program, self.plan = program, plan
        self.stages = frozenset(stage.NAME for stage in stages())
        self.weights: dict[str, np.ndarray] = {}
        self.quantized: dict[str, Quantized] = {}
        self.weight_bytes = 0
        for name, shape in program.parameters.items():
            self._load(name, shape, weights, activations == "int8")
        self.caches = [
            cache_of(plan.kv_cache_dtype, plan.num_blocks, plan.block_size, c.kv_heads, c.head_size) for c in program.caches
        ]
        self.kv_bytes_per_token = kv_bytes_per_token(program, plan.kv_cache_dtype)
        self.last_ids: np.ndarray | None = None
        self.closed = False

    def _load(self, name: str, shape: tuple[int, ...], weights: Mapping[str, Tensor], int8: bool) -> None:
        if name not in weights:
            raise ModelFileError(f"the model has no tensor {name!r}")
        tensor = weights[name]
        if tuple(tensor.info.shape) != shape:
            raise ModelFileError(f"tensor {name!r} has the wrong shape", f"{tensor.info.shape}, the config asks for {shape}")
        self.weights[name] = tensor.unpack()
        self.weight_bytes += tensor.info.nbytes
        if int8 and tensor.info.group:
            self.quantized[name] = Quantized.of(tensor)

    def submit(self, batch: Batch) -> Done:
        """Computes the step before it returns; raises what goes wrong in it."""
        logits = self._run(batch, None)["logits"]
        ids = np.full(len(batch.wanted), -1, np.int32)
        if not batch.want_logits.all():
            ids = np.where(batch.want_logits, np.int32(-1), sample(logits, batch.sampling)).astype(np.int32)
        self.last_ids = ids
        return Done(Result(ids, logits[batch.want_logits] if batch.want_logits.any() else None))

    def trace(self, batch: Batch) -> dict[str, np.ndarray]:
        """Computes the step as `submit` does, without drawing ids. -> op name -> copy of what the op left in its buffer."""
        copies: dict[str, np.ndarray] = {}
        self._run(batch, copies)
        return copies

    def close(self) -> None:
        """Gives the arrays back."""
        self.weights, self.quantized, self.caches, self.closed = {}, {}, [], True

    def _run(self, batch: Batch, copies: dict[str, np.ndarray] | None) -> dict[str, np.ndarray]:
        if self.closed:
            raise EngineClosed("the session is closed")
        tokens = check_batch(batch, self.program, self.plan, self.last_ids)
        buffers: dict[str, np.ndarray] = {}
        positions = batch.positions  # of the rows that ops run on
        for op in self.program.ops:
            dst = op.buffer if isinstance(op, Rotate) else op.dst
            buffers[dst] = self._compute(op, buffers, batch, tokens, positions)
            if isinstance(op, Select):
                positions = batch.positions[batch.wanted]
            if copies is not None:
                copies[op.name] = buffers[dst].copy()
        return buffers

    def _compute(self, op, buffers: dict[str, np.ndarray], batch: Batch, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        match op:
            case Embed():
                return embed(self.weights[op.weight], tokens)
            case Normalize():
                return normalize(buffers[op.src], self.weights[op.weight], op.eps)
            case Linear():
                x, first = buffers[op.src], positions == 0
                y = np.concatenate([self._linear(x, w, b, first) for w, b in zip(op.weights, op.biases)], axis=-1)
                return buffers[op.dst] + y if op.accumulate else y
            case Rotate():
                return self._rotate(op, buffers[op.buffer], batch)
            case Attend():
                return self._attend(op, buffers[op.src], batch)
            case Gate():
                return gate(buffers[op.src], op.size, op.activation)
            case Select():
                return select(buffers[op.src], batch.wanted)
        raise BatchError(f"no op {type(op).__name__} in this backend")

    def _linear(self, x: np.ndarray, weight: str, bias: str | None, first: np.ndarray) -> np.ndarray:
        b = self.weights[bias] if bias else None
        if weight in self.quantized:
            return linear_int8(x, self.quantized[weight], b, first)
        return linear(x, self.weights[weight], b)

    def _rotate(self, op: Rotate, buffer: np.ndarray, batch: Batch) -> np.ndarray:
        heads = buffer.reshape(len(buffer), -1, op.head_size)
        q, k, v = np.split(heads, [op.heads, op.heads + op.kv_heads], axis=1)
        if op.q_norm:
            q, k = normalize(q, self.weights[op.q_norm], op.eps), normalize(k, self.weights[op.k_norm], op.eps)
        cosine, sine = turns(batch.positions, self.program.ropes[op.rope])
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        sequences = np.repeat(np.arange(len(batch.starts) - 1), np.diff(batch.starts))
        self.caches[op.cache].write(*self._slots(batch, sequences, batch.positions), k, v)
        return np.concatenate([q, k, v], axis=1).reshape(buffer.shape)

    def _attend(self, op: Attend, buffer: np.ndarray, batch: Batch) -> np.ndarray:
        width = op.heads * op.head_size
        q = buffer[:, :width].reshape(-1, op.heads, op.head_size)
        out, cache = np.empty_like(q), self.caches[op.cache]
        for s, (start, end) in enumerate(zip(batch.starts[:-1], batch.starts[1:])):
            first, last = int(batch.positions[start]), int(batch.positions[end - 1])
            lowest = max(0, first + 1 - op.window) if op.window else 0
            keys, values = cache.read(*self._slots(batch, s, np.arange(lowest, last + 1)))
            for row in range(start, end):  # what a row must not see is left out, never multiplied by zero
                stop = int(batch.positions[row]) + 1
                seen = slice(max(0, stop - op.window) - lowest if op.window else 0, stop - lowest)
                if isinstance(cache, WholeCache):
                    out[row] = cache.attend(q[row], keys.of(seen), values.of(seen), op.scale, lowest + seen.start)
                else:
                    out[row] = attend(q[row], keys[:, seen], values[:, seen], op.scale)
        return out.reshape(len(q), width)

    def _slots(self, batch: Batch, sequences, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Block ids and slots in them of positions of sequences."""
        size = self.plan.block_size
        return batch.block_tables[0][sequences, positions // size], positions % size
