"""Each op against its definition in float64, on odd sizes, and every instruction set against the others' bits."""

from __future__ import annotations

import numpy as np
import pytest

from nano_vllm.backends import cpu
from nano_vllm.backends._rounding import Quantized, linear_int8
from nano_vllm.formats import pack
from nano_vllm.model.program import Attend, Embed, Gate, Linear, Normalize, Rotate, Select

from . import models

MIXED = {"attention.k": "q5_k", "attention.v": "q6_k", "mlp.up": "q8", "": "q4_k"}
SUPER = ["q4_k", "q5_k", "q6_k", MIXED]


def off(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference, relative to the largest number of its row."""
    return float((np.abs(ours - theirs) / np.abs(theirs).max(-1, keepdims=True)).max())


def traced(spec, length, **settings):
    session = models.session(spec, **settings)
    return session, models.step(session, [(models.ids(length), 0, models.blocks(session, length))])


@pytest.mark.parametrize("isa", models.ISAS)
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("hidden", [1, 7, 33, 576])
def test_norm(isa, rows, hidden):
    session, copies = traced(models.model(hidden=hidden), rows, isa=isa)
    packed = models.weights(session.program)
    op = models.ops_of(session, Normalize)[0]
    x = copies["embedding"].astype(np.float64)
    right = x / np.sqrt((x**2).mean(-1, keepdims=True) + op.eps) * packed[op.weight].unpack()
    assert off(copies[op.name], right) < 4e-7


@pytest.mark.parametrize("format", ["f32", "f16", "bf16", "q8", "q4", "q4_k", "q5_k", "q6_k"])
def test_embedding_is_the_table(format):
    session, copies = traced(models.model(8, 2, 32, 256, mlp=256), 33, format=format)
    op = models.ops_of(session, Embed)[0]
    table = models.weights(session.program, format)[op.weight].unpack()
    np.testing.assert_array_equal(copies[op.name], table[models.ids(33)])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 33, 96])
def test_gate(activation, size):
    session, copies = traced(models.model(mlp=size, activation=activation), 33)
    op = models.ops_of(session, Gate)[0]
    x = copies[op.name.replace("activation", "gate_up")].astype(np.float64)
    gate, up = x[:, :size], x[:, size:]
    z = gate if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    assert off(copies[op.name], gate / (1 + np.exp(-z)) * up) < 1e-6


@pytest.mark.parametrize("isa", models.ISAS)
@pytest.mark.parametrize("head_size", [2, 6, 50, 64, 80, 128, 256])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_rotation(isa, head_size, qk_norm):
    session = models.session(models.model(head_size=head_size, qk_norm=qk_norm, window=1), isa=isa, tokens=4096)
    copies = models.step(session, [(models.ids(33), 4001, models.blocks(session, 4096))])
    op = models.ops_of(session, Rotate)[0]
    packed = models.weights(session.program)
    right = models.rotated(session, op, copies[op.name.replace("rotate", "qkv")], 4001 + np.arange(33), packed)
    assert off(copies[op.name], right) < 1e-6


@pytest.mark.parametrize("isa", models.ISAS)
@pytest.mark.parametrize(
    "heads, kv_heads, head_size, window, block_size, length, kv",
    [
        (1, 1, 64, None, 16, 1, "f16"),
        (3, 1, 64, None, 16, 33, "f16"),
        (9, 3, 64, None, 16, 530, "f16"),  # two borders of splits
        (4, 1, 80, None, 64, 270, "bf16"),
        (8, 1, 128, None, 1024, 270, "f16"),
        (7, 1, 34, None, 16, 100, "f32"),  # a group larger than a tile, a head that is no multiple of a vector
        (2, 2, 6, None, 16, 300, "f16"),
        (2, 1, 256, None, 64, 40, "f32"),
        (4, 2, 64, 20, 16, 300, "f16"),
        (4, 2, 64, 1, 16, 40, "f16"),
        (3, 1, 64, 300, 64, 700, "bf16"),  # the window's end crosses splits
        (4, 2, 50, 5, 16, 270, "f32"),
    ],
)
def test_attention(isa, heads, kv_heads, head_size, window, block_size, length, kv):
    ours, rows, op = attention(isa, heads, kv_heads, head_size, window, block_size, length, kv)
    assert off(ours, models.attend(rows, op, kv)) < 4e-6


def attention(isa, heads, kv_heads, head_size, window, block_size, length, kv):
    """What attention gave, the rows that it was given, and the op."""
    spec = models.model(heads, kv_heads, head_size, window=window, hidden=32, mlp=8)
    session, copies = traced(spec, length, isa=isa, kv=kv, block_size=block_size)
    op = models.ops_of(session, Attend)[0]
    return copies[op.name], copies[op.name.replace("attend", "rotate")], op


@pytest.mark.parametrize("isa", models.ISAS)
@pytest.mark.parametrize("kv", ["int16", "int8"])
@pytest.mark.parametrize(
    "heads, kv_heads, head_size, window, block_size, length",
    [
        (1, 1, 64, None, 16, 1),
        (9, 3, 64, None, 16, 530),
        (4, 1, 80, None, 64, 270),
        (8, 1, 128, None, 1024, 270),
        (13, 1, 34, None, 16, 100),  # more queries of one row than a tile has
        (2, 2, 6, None, 16, 300),
        (2, 1, 256, None, 64, 40),
        (4, 2, 64, 20, 16, 300),
        (4, 2, 64, 1, 16, 40),
        (3, 1, 64, 300, 64, 700),
    ],
)
def test_attention_in_whole_numbers(isa, kv, heads, kv_heads, head_size, window, block_size, length):
    """By the definition, up to a unit where the last bit of a scale differs; int16 loses less than an f16 cache does."""
    ours, rows, op = attention(isa, heads, kv_heads, head_size, window, block_size, length, kv)
    assert off(ours, models.attend_whole(rows, op, kv)) < 2e-4
    exact = models.attend(rows, op, "f32")
    assert off(ours, exact) < (0.1 if kv == "int8" else off(models.attend(rows, op, "f16"), exact))


@pytest.mark.parametrize("isa", models.ISAS)
@pytest.mark.parametrize("kv", ["int16", "int8"])
@pytest.mark.parametrize("broken", [np.nan, np.inf, 3e38, 1e-30, 0.0])
def test_whole_numbers_of_broken_and_tiny_vectors(isa, kv, broken):
    """A key and a value without numbers spoil every row that sees them and no other; tiny ones count as zeros."""
    session = models.session(models.model(4, 2, 64, bias=False, qk_norm=False), isa=isa, kv=kv)
    packed, ids = models.weights(session.program), models.ids(20)
    table = models.ops_of(session, Embed)[0].weight
    rows = packed[table].unpack().copy()
    rows[ids[10]] = broken
    session = cpu.open(session.program, packed | {table: pack(table, rows, "f32")}, session.plan)
    copies = models.step(session, [(ids, 0, models.blocks(session, 20))])
    out = copies[models.ops_of(session, Attend)[0].name]
    first = int(np.flatnonzero(ids == ids[10])[0])
    assert np.isfinite(out[:first]).all()
    assert np.isfinite(out[first:]).all() if np.isfinite(broken) else np.isnan(out[first:]).all()


@pytest.mark.parametrize(
    "heads, kv_heads, head_size, window, format, kv",
    [
        (9, 3, 64, None, "q4", "f16"),
        (9, 3, 64, 100, "q8", "f32"),
        (8, 1, 80, None, "q8", "bf16"),
        (4, 2, 50, 37, "f32", "f32"),
        (4, 2, 50, None, "bf16", "bf16"),
        (2, 2, 18, None, "f16", "f16"),
        (4, 2, 64, None, "q4_k", "f16"),
        (4, 2, 64, None, "q5_k", "f16"),
        (4, 2, 64, None, "q6_k", "f16"),
        (4, 2, 64, None, MIXED, "f16"),
        (9, 3, 64, None, "q4", "int16"),
        (9, 3, 64, 100, "q8", "int8"),
        (8, 1, 80, None, "q8", "int16"),
        (4, 2, 50, 37, "f32", "int8"),
        (2, 1, 256, None, "f16", "int16"),
    ],
)
def test_instruction_sets_agree_on_every_bit(heads, kv_heads, head_size, window, format, kv):
    spec = models.model(heads, kv_heads, head_size, 256 if format in SUPER else 96, window, mlp=256)
    first, *others = (traced(spec, 290, format=format, kv=kv, isa=isa)[1] for isa in models.ISAS)
    for other in others:
        for name, array in first.items():
            np.testing.assert_array_equal(array, other[name], err_msg=name)


@pytest.mark.parametrize("isa", models.ISAS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "format, options", [("q4", {"minimum": True}), *((f, {}) for f in SUPER)], ids=["q4", "q4_k", "q5_k", "q6_k", "mixed"]
)
def test_linear_rounds_rows_and_the_first_position_twice(isa, threads, format, options):
    """Two sequences begin in this step, another goes on; of the wanted rows, too, some are at position 0."""
    spec = models.model(hidden=96, mlp=160) if options else models.model(8, 2, 32, 256, mlp=256)
    session = models.session(spec, format, isa, threads, **options)
    packed = models.weights(session.program, format, **options)
    models.step(session, [(models.ids(5), 0, [9])])
    copies = models.step(session, [(models.ids(1), 0, [1]), (models.ids(6), 5, [9]), (models.ids(7), 0, [2])], "last")
    positions = np.array([0, *range(5, 11), *range(7)])
    source, exact_rows = "embedding", {}
    for op in session.program.ops:
        if isinstance(op, Select):
            positions = np.array([0, 10, 6])
        if isinstance(op, Linear) and not op.accumulate:
            first = positions == 0
            x = copies[source]
            defined = [
                linear_int8(x, Quantized.of(packed[w]), packed[b].unpack() if b else None, first)
                for w, b in zip(op.weights, op.biases)
            ]
            assert off(copies[op.name], np.concatenate(defined, axis=1)) < 2e-6
            weights = np.concatenate([packed[w].unpack() for w in op.weights])
            bias = np.concatenate([packed[b].unpack() for b in op.biases]) if op.biases[0] else 0
            exact = x.astype(np.float64) @ weights.T + bias
            error = np.abs(copies[op.name] - exact).max(axis=1)
            exact_rows[op.name] = error[first].max(), error[~first].min()
        source = op.name
    assert len(exact_rows) == 3 and all(twice < once / 20 for twice, once in exact_rows.values())
