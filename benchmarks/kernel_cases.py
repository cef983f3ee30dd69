"""What benchmarks/kernels.py measures: each kernel as a program of one op, repeated, that backends run as they run models.

A program embeds tokens, runs the op `copies` times and selects. Every copy has a matrix or a cache of its own, so that a step
over enough of them reads from memory, as a model's does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from nano_vllm import formats
from nano_vllm.backends import cpu, reference
from nano_vllm.engine.backend import Batch
from nano_vllm.memory.plan import Plan
from nano_vllm.model.program import Attend, Cache, Embed, Gate, Linear, Normalize, Op, Program, Rotate, Select
from nano_vllm.model.spec import Rope

BLOCK = 16
# Of a row's largest number: float32 sums in another order; over whole numbers a unit, where a scale's last bit differs.
TOLERANCE, WHOLE_TOLERANCE = 1e-5, 2e-4
FORMATS = {
    "q4": ("q4", {"group": 32}),
    "q4+min": ("q4", {"group": 32, "minimum": True}),
    "q4+min/128": ("q4", {"group": 128, "minimum": True}),
    "q4_k": ("q4_k", {}),
    "q5_k": ("q5_k", {}),
    "q6_k": ("q6_k", {}),
    "q8": ("q8", {}),
    "bf16": ("bf16", {}),
    "f16": ("f16", {}),
    "f32": ("f32", {}),
}


@dataclass(frozen=True)
class Shape:
    """Attributes:
    n, k: outputs and inputs of a matrix; k is the width of a norm, n that of a gate.
    context: tokens of a sequence; of one with more new rows than that, these and one more.
    """

    n: int = 3072
    k: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_size: int = 128
    context: int = 512


SMALL = Shape(96, 256, 6, 2, 48, 40)  # for checks


@dataclass(frozen=True)
class Case:
    """A kernel to measure.

    Attributes:
        width, out: of the rows that come in ("x") and go out ("y").
        op: of copy i, which has the weight f"w{i}" or the cache i.
        weight: of each copy; None where it needs none.
        vectors: that all copies read.
        cache: of each copy.
        kv: the caches' type.
        alone: each row is the last of a sequence of its own; otherwise they are the last of one.
        multiplies: multiply-adds for each row, of attention for each row and key; 0: the op moves rows.
        peak: the format whose inner step (`kernels.spin`) it multiplies with.
    """

    name: str
    width: int
    out: int
    op: Callable[[int], Op]
    weight: formats.Tensor | None = None
    vectors: dict[str, formats.Tensor] = field(default_factory=dict)
    cache: Cache | None = None
    kv: str = "f32"
    ropes: tuple[Rope, ...] = ()
    context: int = 1
    alone: bool = False
    multiplies: int = 0
    peak: str = "f32"

    def program(self, copies: int, stored: bool = False) -> Program:
        """`stored`: keys and values of the rows themselves enter cache 0 ahead of the copies, by a rotation by nothing."""
        ops: tuple[Op, ...] = (Embed("embedding", "embedding", "x"),)
        shapes, ropes = {name: tensor.info.shape for name, tensor in self.vectors.items()}, self.ropes
        if stored:
            kv_heads, size = self.cache.kv_heads, self.cache.head_size
            ropes, shapes["eye"] = (Rope((0.0,) * (size // 2), 1.0),), (self.width, self.width)
            copy = Linear("copy", ("eye",), (None,), "e", "x")  # as in models, a rotation has a linear before it
            ops = (Embed("embedding", "embedding", "e"), copy)
            ops += (Rotate("store", "x", self.out // size, kv_heads, size, 0, None, None, 0.0, 0),)
        ops += tuple(map(self.op, range(copies)))
        last, size = ("x", self.width) if not copies or isinstance(ops[-1], Rotate) else ("y", self.out)
        shapes["embedding"] = size, self.width
        if self.weight:
            shapes |= {f"w{i}": self.weight.info.shape for i in range(copies)}
        caches = (self.cache,) * max(copies, 1) if self.cache else ()
        widths = {"e": self.width, "x": self.width, "y": self.out, "logits": size}
        return Program((*ops, Select("select", last, "logits")), widths, ropes, caches, shapes, size, 2**20)

    def weights(self, program: Program, rng: np.random.Generator) -> dict[str, formats.Tensor]:
        found = {name: self.weight for name in program.parameters} | self.vectors
        table = rng.standard_normal(program.parameters["embedding"], np.float32)
        eye = {"eye": formats.pack("eye", np.eye(self.width), "f32")} if "eye" in found else {}
        return found | eye | {"embedding": formats.pack("embedding", table, "f32")}

    def plan(self, isa: str, threads: int, rows: int, blocks: int) -> Plan:
        return Plan("cpu", self.kv, BLOCK, blocks, blocks * BLOCK, rows, rows, threads, isa, {})

    def tokens(self, rows: int) -> int:
        """Of each sequence, its new rows included. No row is at position 0, which is rounded twice."""
        return self.context if self.alone else max(self.context, rows + 1)

    def blocks(self, rows: int) -> int:
        return -(-self.tokens(rows) // BLOCK) * (rows if self.alone else 1)

    def batch(self, rows: int, vocabulary: int, rng: np.random.Generator) -> Batch:
        ends = [self.tokens(rows)] * (rows if self.alone else 1)
        return batch([(end - rows // len(ends), end) for end in ends], vocabulary, rng)

    def work(self, rows: int) -> int:
        """Multiply-adds of one copy."""
        if not self.cache:
            return rows * self.multiplies
        end = self.tokens(rows)
        return self.multiplies * (rows * end if self.alone else rows * (2 * end - rows + 1) // 2)


def batch(spans: list[tuple[int, int]], vocabulary: int, rng: np.random.Generator) -> Batch:
    """One step with fresh tokens at positions [begin, end) of each sequence, all of whose rows are wanted."""
    rows = sum(end - begin for begin, end in spans)
    per = -(-max(end for _, end in spans) // BLOCK)
    return Batch(
        tokens=rng.integers(0, vocabulary, rows).astype(np.int32),
        sources=np.full(rows, -1, np.int32),
        positions=np.concatenate([np.arange(*span, dtype=np.int32) for span in spans]),
        starts=np.cumsum([0, *(end - begin for begin, end in spans)]).astype(np.int32),
        block_tables=(np.arange(len(spans) * per, dtype=np.int32).reshape(-1, per),),
        wanted=np.arange(rows, dtype=np.int32),
        sampling=None,  # nothing is drawn
        want_logits=np.ones(rows, bool),
    )


def linear(name: str, shape: Shape) -> Case:
    format, extra = FORMATS[name]
    values = np.random.default_rng(0).normal(0, 0.1, (64, shape.k)).astype(np.float32)
    few = formats.pack("w", values, format, **extra)
    many = formats.reorder(few, np.arange(shape.n) % 64)  # a large matrix needs no quantising
    info = formats.describe("w", (shape.n, shape.k), format, few.info.group, few.info.minimum)

    def op(i: int) -> Op:
        return Linear(f"op{i}", (f"w{i}",), (None,), "x", "y")

    weight = formats.Tensor(info, many.planes)
    return Case(name, shape.k, shape.n, op, weight, multiplies=shape.n * shape.k, peak=format)


def attention(name: str, shape: Shape, kv: str, alone: bool) -> Case:
    sizes = shape.heads, shape.kv_heads, shape.head_size
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_size

    def op(i: int) -> Op:
        return Attend(f"op{i}", "x", "y", *sizes, shape.head_size**-0.5, None, i)

    out = shape.heads * shape.head_size
    cache = Cache(*sizes[1:])
    return Case(name, width, out, op, cache=cache, kv=kv, context=shape.context, alone=alone, multiplies=2 * out)


def rotation(name: str, shape: Shape, kv: str, normed: bool) -> Case:
    sizes = shape.heads, shape.kv_heads, shape.head_size
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_size
    frequencies = tuple(float(np.float32(10000.0 ** (-2 * i / shape.head_size))) for i in range(shape.head_size // 2))
    norms = ("q_norm", "k_norm") if normed else (None, None)

    def op(i: int) -> Op:
        return Rotate(f"op{i}", "x", *sizes, 0, *norms, 1e-6, i)

    vectors = {name: ramp(name, shape.head_size) for name in norms if name}
    return Case(name, width, width, op, None, vectors, Cache(*sizes[1:]), kv, (Rope(frequencies, 1.0),))


def ramp(name: str, size: int) -> formats.Tensor:
    return formats.pack(name, np.linspace(0.5, 1.5, size, dtype=np.float32), "f32")


def norm(shape: Shape) -> Case:
    def op(i: int) -> Op:
        return Normalize(f"op{i}", "weight", 1e-6, "x", "y")

    return Case("norm", shape.k, shape.k, op, vectors={"weight": ramp("weight", shape.k)})


def gate(activation: str, shape: Shape) -> Case:
    def op(i: int) -> Op:
        return Gate(f"op{i}", activation, shape.n, "x", "y")

    return Case(activation, 2 * shape.n, shape.n, op)


def cases(shape: Shape, cache_types: list[str]) -> dict[str, Case]:
    """By name; the same names for every shape."""
    found = [linear(name, shape) for name in FORMATS]
    found += [attention(f"decode {kv}", shape, kv, True) for kv in cache_types]
    found += [attention(f"prefill {kv}", shape, kv, False) for kv in cache_types]
    found += [rotation(f"rotate {kv}", shape, kv, False) for kv in cache_types]
    found += [rotation(f"norm+rotate {cache_types[0]}", shape, cache_types[0], True), norm(shape)]
    return {case.name: case for case in [*found, gate("silu", shape), gate("gelu_tanh", shape)]}


def check(case: Case, isa: str, threads: int) -> None:
    """ValueError unless the kernel's numbers are the reference backend's, which rounds activations as kernels do.

    For attention, three sequences begin, one of more keys than a split has, then each goes on by a row.
    """
    attends = bool(case.cache and case.multiplies)
    steps = [[(0, 5), (0, 40), (0, 270)], [(5, 6), (40, 41), (270, 271)]] if attends else [[(1, 8)]]
    program, rng = case.program(1, stored=attends), np.random.default_rng(0)
    weights, plan = case.weights(program, rng), case.plan(isa, threads, 512, 3 * -(-271 // BLOCK))
    tolerance = WHOLE_TOLERANCE if case.kv.startswith("int") else TOLERANCE
    ours, theirs = cpu.open(program, weights, plan), reference.open(program, weights, plan, activations="int8")
    for spans in steps:
        given = batch(spans, program.vocab_size, rng)
        found, right = ours.submit(given).result().logits, theirs.submit(given).result().logits
        wrong = ~(np.abs(found - right) <= tolerance * np.abs(right).max(axis=-1, keepdims=True))
        if wrong.any():
            raise ValueError(f"{isa} {case.name}: {wrong.sum()} of {wrong.size} numbers differ from the definition")
    ours.close()
