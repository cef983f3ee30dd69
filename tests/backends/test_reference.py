"""The reference backend: each op against torch, the paged cache against itself in every division of the work, bad batches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from nano_vllm import registry
from nano_vllm.backends import reference
from nano_vllm.backends._rounding import (
    CACHE_TYPES, FP8Cache, Quantized, from_e4m3, linear_int8, quantize_rows, to_bf16, to_e4m3,
)  # fmt: skip
from nano_vllm.errors import BatchError, EngineClosed, ModelFileError, OptionError, UnsupportedModel
from nano_vllm.formats import pack
from nano_vllm.model.program import Gate, lower
from nano_vllm.model.spec import Rope

from . import tiny

RNG = np.random.default_rng(0)
WINDOWED = ("qwen2", 2)


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


@pytest.fixture(scope="module")
def model():
    """(program, weights) of a model with windows on some of its layers, biases, and rope scaling."""
    module = registry.load("architectures", WINDOWED[0])
    config = tiny.configs(module)[WINDOWED[1]]
    program = lower(module.describe(config))
    return program, tiny.rounded(tiny.values(tiny.theirs(config), module), "f32")


def opened(model, kv: str = "f32", **more):
    return reference.open(*model, tiny.plan(kv_cache_dtype=kv), **more)


def close(a: np.ndarray, b: torch.Tensor | np.ndarray, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(a, np.asarray(b), rtol=tolerance, atol=tolerance)


def test_norm_and_activations_equal_torch():
    x, weight = random(7, 33), random(33)
    close(reference.normalize(x, weight, 0.01), torch.nn.functional.rms_norm(torch.tensor(x), (33,), torch.tensor(weight), 0.01))
    wide = np.concatenate([random(5, 9) * 4, random(5, 9)], axis=1)
    wide[0, 0], wide[1, 0] = -200, 200
    a, b = torch.tensor(wide).chunk(2, dim=1)
    close(reference.gate(wide, 9, "silu"), torch.nn.functional.silu(a) * b)
    close(reference.gate(wide, 9, "gelu_tanh"), torch.nn.functional.gelu(a, approximate="tanh") * b)


@pytest.mark.parametrize("heads, kv_heads, size, keys", [(1, 1, 2, 1), (6, 2, 10, 33), (5, 1, 16, 7), (4, 4, 8, 100)])
def test_attention_equals_torch(heads, kv_heads, size, keys):
    q, k, v = random(heads, size), random(kv_heads, keys, size), random(kv_heads, keys, size)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        torch.tensor(q)[None, :, None], torch.tensor(k)[None], torch.tensor(v)[None], scale=0.7, enable_gqa=True
    )
    close(reference.attend(q, k, v, 0.7), theirs[0, :, 0])


def test_rotation_equals_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    positions, rope = np.array([0, 1, 17, 4095, 131071], np.int32), Rope((1.0, 0.25, 0.01), 1.25)
    angles = torch.tensor(positions)[:, None].float() * torch.tensor(rope.frequencies)
    cosine, sine = (torch.cat([f, f], dim=-1)[None] * 1.25 for f in (angles.cos(), angles.sin()))
    x = random(5, 3, 6)
    theirs, _ = apply_rotary_pos_emb(*(torch.tensor(x).transpose(0, 1)[None],) * 2, cosine, sine)
    close(reference.rotate(x, *reference.turns(positions, rope)), theirs[0].transpose(0, 1))


def test_bf16_rounds_as_torch():
    bits = np.concatenate([RNG.integers(0, 2**32, 20000, np.uint32), np.arange(0x3F7F8000 - 9, 0x3F7F8000 + 9, dtype=np.uint32)])
    special = np.array([0.0, -0.0, np.inf, -np.inf, 3.4e38], np.float32)
    x = np.concatenate([bits.view(np.float32), special])
    x = x[~np.isnan(x)]
    np.testing.assert_array_equal(to_bf16(x), torch.tensor(x).bfloat16().view(torch.uint16).numpy())
    assert np.isnan(CACHE_TYPES["bf16"][2](to_bf16(np.array([np.nan], np.float32)))).all()


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunks_equal_one_step(model, chunk):
    ids = tiny.tokens(96)
    whole = tiny.logits(opened(model), ids)
    session, parts = opened(model), []
    for first in range(0, len(ids), chunk):
        parts.append(session.submit(tiny.batch([(ids[first : first + chunk], first, [9, 4, 30])])).result().logits.copy())
    close(np.concatenate(parts), whole, 1e-5)


def test_e4m3_rounds_as_torch():
    rng, codes = np.random.default_rng(0), np.array([c for c in range(256) if c & 127 != 127], np.uint8)
    numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(from_e4m3(codes), numbers)
    some = np.unique(numbers)
    x = np.concatenate([numbers, (some[1:] + some[:-1]) / 2, 2.0 ** rng.uniform(-14, 8.8, 4000) * rng.choice([-1, 1], 4000)])
    x = x.astype(np.float32)
    np.testing.assert_array_equal(to_e4m3(x), torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy())


def test_an_fp8_cache_loses_a_sixteenth_of_a_number_at_most():
    cache, at = FP8Cache(3, 16, 2, 24), np.arange(40)
    k, v = np.random.default_rng(1).standard_normal((2, 40, 2, 24)).astype(np.float32) * np.logspace(-9, 9, 40)[:, None, None]
    v[3] = 0
    cache.write(at // 16, at % 16, k.astype(np.float32), v.astype(np.float32))
    for read, x in zip(cache.read(at // 16, at % 16), (k, v)):
        x = x.transpose(1, 0, 2)
        steps = np.abs(x).max(axis=-1, keepdims=True) * 2**-9 / 448  # of the smallest numbers
        assert (np.abs(read - x) <= np.maximum(np.abs(x) * 2**-4, steps / 2) * 1.00001).all()


@pytest.mark.parametrize("kv, dtype", [("f16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("chunk", [45, 20])
def test_attention_reads_rounded_keys_and_values_of_its_own_step_too(model, kv, dtype, chunk):
    ids, session, before = tiny.tokens(96), opened(model, kv), torch.empty(0, 4, 8)
    for first in range(0, len(ids), chunk):
        copies = session.trace(tiny.batch([(ids[first : first + chunk], first, [9, 4, 30])]))
        heads = torch.tensor(copies["layers.1.attention.rotate"]).reshape(-1, 10, 8)
        now = heads[:, 6:].to(dtype).float()
        before = torch.cat([before, now])
        rows = torch.arange(first, first + len(now))
        theirs = torch.nn.functional.scaled_dot_product_attention(
            heads[:, :6].transpose(0, 1)[None], before[:, :2].transpose(0, 1)[None], before[:, 2:].transpose(0, 1)[None],
            attn_mask=rows[:, None] >= torch.arange(len(before)), enable_gqa=True,
        )  # fmt: skip
        close(copies["layers.1.attention.attend"], theirs[0].transpose(0, 1).reshape(len(now), -1))


def test_rounding_of_the_cache_shows(model):
    ids = tiny.tokens(96)
    exact, half, brain = (tiny.logits(opened(model, kv), ids) for kv in ("f32", "f16", "bf16"))
    assert 1e-4 < np.abs(half - exact).max() < np.abs(brain - exact).max() / 3 < 0.1  # 11 bits against 8
    stored = opened(model, "f16")
    traced = stored.trace(tiny.batch([(ids, 0, [0, 1, 2])]))
    k = traced["layers.1.attention.rotate"].reshape(len(ids), -1, 8)[:, 6:8]
    np.testing.assert_array_equal(stored.caches[1].keys.reshape(-1, 2, 8)[: len(ids)], k.astype(np.float16))


def test_sequences_of_a_batch_do_not_meet(model):
    a, b, c = (tiny.tokens(96, n, seed) for n, seed in ((20, 1), (33, 2), (1, 3)))
    alone = [tiny.logits(opened(model), ids) for ids in (a, b, c)]
    session = opened(model)
    session.submit(tiny.batch([(b[:30], 0, [5, 2])]))
    mixed = session.submit(tiny.batch([(a, 0, [8, 1]), (b[30:], 30, [5, 2, 0]), (c, 0, [7])])).result().logits
    close(mixed, np.concatenate([alone[0], alone[1][30:], alone[2]]), 1e-5)


@pytest.mark.parametrize("kv", ["f32", "f16"])
def test_other_slots_may_hold_anything(model, kv):
    ids = tiny.tokens(96, 21)
    clean, dirty = opened(model, kv), opened(model, kv)
    for cache in dirty.caches:
        cache.keys[:], cache.values[:] = np.nan, np.nan
    np.testing.assert_array_equal(tiny.logits(dirty, ids), tiny.logits(clean, ids))


def test_blocks_behind_every_window_are_not_needed():
    module = registry.load("architectures", "llama")
    config = next(c for c in module.TINY if c.get("sliding_window"))
    model = lower(module.describe(config)), tiny.rounded(tiny.values(tiny.theirs(config), module), "f32")
    ids = tiny.tokens(96)
    session = opened(model)
    session.submit(tiny.batch([(ids[:40], 0, [3, 1, 2])]))
    last = session.submit(tiny.batch([(ids[40:], 40, [-1, -1, 2])])).result().logits
    close(last, tiny.logits(opened(model), ids)[40:], 1e-5)


def test_rows_are_rounded_as_defined():
    x = random(5, 96) * np.float32(10)
    x[1, 32:64] = 0
    q, scales = quantize_rows(x)
    for row in range(5):
        for group in range(3):
            part = x[row, 32 * group : 32 * group + 32]
            absmax = np.abs(part).max()
            inverse = np.float32(127) / absmax if absmax else np.float32(0)
            assert [int(v) for v in q[row, group]] == [int(np.rint(v * inverse)) for v in part]
            assert scales[row, group] == absmax / np.float32(127)
    assert np.abs(q).max() == 127 and np.abs(q * scales[..., None] - x.reshape(5, 3, 32)).max() <= scales.max() / 2 * 1.0001


CASES = [("q8", {})] + [("q4", {"group": g, "minimum": m}) for g in (32, 64, 128) for m in (False, True)]
CASES += [("q4_k", {}), ("q5_k", {}), ("q6_k", {})]


@pytest.mark.parametrize("format, options", CASES, ids=str)
def test_linear_on_rounded_rows(format, options):
    x, weight, bias = random(3, 256), pack("w", random(7, 256), format, **options), random(7)
    q, scales = quantize_rows(x)
    rounded = (q.astype(np.float64) * scales[..., None]).reshape(x.shape)
    exact = rounded @ weight.unpack().astype(np.float64).T + bias
    close(linear_int8(x, Quantized.of(weight), bias, np.zeros(len(x), bool)), exact, 1e-5)
    unrounded = x.astype(np.float64) @ weight.unpack().T.astype(np.float64) + bias
    assert np.abs(exact - unrounded).max() > 1e-3
    error = np.abs(linear_int8(x, Quantized.of(weight), bias, np.array([False, True, False])) - unrounded).max(axis=1)
    assert error[1] < min(error[0], error[2]) / 20


def test_int8_activations_change_quantised_linears_alone():
    module = registry.load("architectures", "llama")
    config = tiny.wide(module.TINY[0])
    program, values = lower(module.describe(config)), tiny.values(tiny.theirs(config), module)
    ids = tiny.tokens(256)
    for format, changes in (("f16", False), ("bf16", False), ("q8", True), ("q4", True)):
        model = program, tiny.rounded(values, format)
        error = np.abs(tiny.logits(opened(model, activations="int8"), ids) - tiny.logits(opened(model), ids)).max()
        assert 0.01 < error < 0.5 if changes else error == 0


def test_trace_has_every_op(model):
    program, _ = model
    ids = tiny.tokens(96)
    step = tiny.batch([(ids, 0, [3, 1, 2])])
    copies = opened(model).trace(step)
    assert list(copies) == [op.name for op in program.ops] and len(set(copies)) == len(program.ops)
    assert len({id(array) for array in copies.values()}) == len(copies)
    np.testing.assert_array_equal(copies["head"], opened(model).submit(step).result().logits)
    np.testing.assert_array_equal(copies["embedding"], model[1]["embedding"].unpack()[ids])


def test_ids_and_logits_as_wanted(model):
    ids = tiny.tokens(96)
    parts = [(ids, 0, [1, 2, 3]), (ids[:9], 0, [4])]
    logits = opened(model).submit(tiny.batch(parts, "last")).result().logits
    drawn = opened(model).submit(tiny.batch(parts, "last", want_logits=False)).result()
    assert drawn.logits is None and drawn.ids.dtype == np.int32
    np.testing.assert_array_equal(drawn.ids, logits.argmax(axis=1))
    some = dataclasses.replace(tiny.batch(parts, "last"), want_logits=np.array([False, True]))
    both = opened(model).submit(some).result()
    assert both.ids.tolist() == [logits[0].argmax(), -1]
    np.testing.assert_array_equal(both.logits, logits[1:])


def test_ids_of_the_step_before(model):
    ids = tiny.tokens(96, 20)
    session = opened(model)
    first = session.submit(tiny.batch([(ids, 0, [1, 2])], "last", want_logits=False)).result().ids
    step = tiny.batch([(np.array([0]), 20, [1, 2])])
    again = session.submit(dataclasses.replace(step, sources=np.array([0], np.int32))).result().logits
    known = opened(model)
    known.submit(tiny.batch([(ids, 0, [1, 2])]))
    np.testing.assert_array_equal(again, known.submit(tiny.batch([(first, 20, [1, 2])])).result().logits)


def test_a_step_that_wants_nothing(model):
    step = tiny.batch([(tiny.tokens(96, 5), 0, [0])])
    nothing = dataclasses.replace(step, wanted=np.empty(0, np.int32), sampling=tiny.greedy(0), want_logits=np.empty(0, bool))
    result = opened(model).submit(nothing).result()
    assert result.ids.tolist() == [] and result.logits is None


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


BAD = {
    "token too large": {"tokens": int32(1, 2, 96, 3)},
    "negative token": {"tokens": int32(1, -1, 2, 3)},
    "no step before": {"sources": int32(-1, -1, -1, 0)},
    "gap": {"positions": int32(0, 1, 3, 4)},
    "negative position": {"positions": int32(-1, 0, 1, 2)},
    "beyond the table": {"positions": int32(14, 15, 16, 17)},
    "starts": {"starts": int32(0, 3)},
    "empty sequence": {"starts": int32(0, 0, 4), "block_tables": (np.array([[0], [1]], np.int32),)},
    "unused block": {"block_tables": (np.array([[-1]], np.int32),)},
    "unknown block": {"block_tables": (np.array([[32]], np.int32),)},
    "two tables": {"block_tables": (np.array([[0]], np.int32),) * 2},
    "table rows": {"block_tables": (np.array([[0], [1]], np.int32),)},
    "wanted out of range": {"wanted": int32(0, 1, 2, 4)},
    "wanted not ascending": {"wanted": int32(0, 2, 1, 3)},
    "want_logits": {"want_logits": np.ones(3, bool)},
    "sources": {"sources": int32(-1)},
    "same slot": {
        "starts": int32(0, 2, 4), "positions": int32(0, 1, 0, 1), "block_tables": (np.array([[5], [5]], np.int32),),
    },
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_bad_batches_are_typed_errors(model, fault):
    session, good = opened(model), tiny.batch([(tiny.tokens(96, 4), 0, [3])])
    with pytest.raises(BatchError, match="contract"):
        session.submit(dataclasses.replace(good, **BAD[fault]))
    assert session.submit(good).result().logits.shape == (4, 96)


def test_what_cannot_be_opened(model):
    program, weights = model
    with pytest.raises(ModelFileError, match="'final_norm'"):
        opened((program, {n: w for n, w in weights.items() if n != "final_norm"}))
    with pytest.raises(ModelFileError, match=r"'final_norm' has the wrong shape"):
        opened((program, weights | {"final_norm": pack("final_norm", np.ones(47), "f32")}))
    with pytest.raises(OptionError, match="cache type 'f8'"):
        opened(model, "f8")
    with pytest.raises(OptionError, match="activations 'int4'"):
        opened(model, activations="int4")
    ops = tuple(dataclasses.replace(op, activation="relu") if isinstance(op, Gate) else op for op in program.ops)
    with pytest.raises(UnsupportedModel, match="'relu'"):
        opened((dataclasses.replace(program, ops=ops), weights))


def test_books_of_a_session(model):
    program, weights = model
    session = opened(model, "f16")
    assert reference.probe(None).usable and reference.RANK == 0 and session.max_outstanding == 0
    assert session.stages == frozenset(registry.names("sampling.stages"))
    assert session.weight_bytes == sum(weights[name].info.nbytes for name in program.parameters)
    assert session.kv_bytes_per_token == 3 * 2 * 2 * 8 * 2  # layers, k and v, kv heads, head size, bytes
    assert sum(c.keys.nbytes + c.values.nbytes for c in session.caches) == session.kv_bytes_per_token * 32 * tiny.BLOCK_SIZE
    session.close()
    with pytest.raises(EngineClosed):
        session.submit(tiny.batch([(tiny.tokens(96, 4), 0, [3])]))
