"""A Program and its weights -> a native session: names become indices."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import numpy as np

from ...errors import ModelFileError, UnsupportedModel
from ...formats import Tensor, TensorInfo
from ...memory.plan import Plan
from ...model.program import Attend, Embed, Gate, Linear, Normalize, Program, Rotate, Select
from .mapped import Mapped

MAX_HEAD_SIZE = 256
ACTIVATIONS = ("silu", "gelu_tanh")
QUANTIZED = ("q8", "q4", "q4_k", "q5_k", "q6_k")
VALUES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


class Builder:
    """Attributes:
    session: the native session, complete after `build`.
    mapped: the weights that it uses where they lie in a file.
    """

    def __init__(self, native: ModuleType, program: Program, weights: Mapping[str, Tensor], plan: Plan) -> None:
        self.program, self.weights, self.mapped = program, weights, Mapped(weights)
        self.session = native.Session(
            threads=plan.threads, isa=plan.isa, max_rows=plan.max_num_batched_tokens, vocab=program.vocab_size,
            kv_type=plan.kv_cache_dtype, block_size=plan.block_size, num_blocks=plan.num_blocks,
        )  # fmt: skip
        self.matrices: dict[str, int] = {}
        self.vectors: dict[str | None, int] = {None: -1}

    def build(self):
        """-> the native session."""
        check_supported(self.program)
        session = self.session
        self.buffers = {name: session.add_buffer(width) for name, width in self.program.widths.items()}
        for rope in self.program.ropes:
            session.add_rope(list(rope.frequencies), rope.scale)
        for cache in self.program.caches:
            session.add_cache(cache.kv_heads, cache.head_size)
        for name, shape in self.program.parameters.items():
            self._load(name, shape)
        for op in self.program.ops:
            self._add(op)
        session.seal()
        return session

    def _load(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.weights:
            raise ModelFileError(f"the model has no tensor {name!r}")
        info = self.weights.infos[name] if hasattr(self.weights, "infos") else self.weights[name].info
        if tuple(info.shape) != shape:
            raise ModelFileError(f"tensor {name!r} has the wrong shape", f"{info.shape}, the config asks for {shape}")
        if len(shape) == 1:
            self.vectors[name] = self.session.add_vector(np.ascontiguousarray(self.weights[name].unpack(), np.float32))
        else:
            self.matrices[name] = self._matrix(name, info)

    def _matrix(self, name: str, info: TensorInfo) -> int:
        quantized = info.format in QUANTIZED
        if not quantized and info.format not in VALUES:
            known = ", ".join((*QUANTIZED, *VALUES))
            raise UnsupportedModel(f"tensor {name!r} is in format {info.format!r}", f"the cpu backend reads {known}")
        if quantized and info.shape[1] % 32:
            raise UnsupportedModel(f"tensor {name!r} has {info.shape[1]} columns", "quantized columns must come in groups of 32")
        shape = {"format": info.format, "n": info.shape[0], "k": info.shape[1], "group": info.group, "minimum": info.minimum}
        packed = self.mapped.packed(name)
        if packed is not None:
            return self.session.add_packed(**shape, data=packed)
        planes = self.weights[name].planes
        arrays = {"values" if plane == "quants" else plane: np.ascontiguousarray(array) for plane, array in planes.items()}
        return self.session.add_matrix(**shape, **arrays)

    def _add(self, op) -> None:
        session, buffers, vectors = self.session, self.buffers, self.vectors
        match op:
            case Embed():
                session.embed(self.matrices[op.weight], buffers[op.dst])
            case Normalize():
                session.normalize(vectors[op.weight], op.eps, buffers[op.src], buffers[op.dst])
            case Linear():
                weights, biases = [self.matrices[w] for w in op.weights], [vectors[b] for b in op.biases]
                session.linear(weights, biases, buffers[op.src], buffers[op.dst], op.accumulate)
            case Rotate():
                norms = vectors[op.q_norm], vectors[op.k_norm]
                session.rotate(buffers[op.buffer], op.heads, op.kv_heads, op.head_size, op.rope, *norms, op.eps, op.cache)
            case Attend():
                shape = op.heads, op.kv_heads, op.head_size
                session.attend(buffers[op.src], buffers[op.dst], *shape, op.scale, op.window or 0, op.cache)
            case Gate():
                session.gate(op.activation, op.size, buffers[op.src], buffers[op.dst])
            case Select():
                session.select(buffers[op.src], buffers[op.dst])
            case _:
                raise UnsupportedModel(f"the cpu backend has no op {type(op).__name__}")


def check_supported(program: Program) -> None:
    """Raises UnsupportedModel for what the kernels lack, before a weight is read."""
    for op in program.ops:
        if isinstance(op, Gate) and op.activation not in ACTIVATIONS:
            raise UnsupportedModel(f"activation {op.activation!r} is not supported", f"known are {', '.join(ACTIVATIONS)}")
    for cache in program.caches:
        if cache.head_size % 2 or cache.head_size > MAX_HEAD_SIZE:
            raise UnsupportedModel(
                f"head_size {cache.head_size} is not supported", f"it must be even and at most {MAX_HEAD_SIZE}"
            )
