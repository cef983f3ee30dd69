"""Weight formats against the `gguf` package, bit for bit, on odd sizes and at the edges of rounding."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_vllm import formats
from nano_vllm.errors import OptionError

from . import ggml

KINDS = {  # format, options -> ggml's type
    "f32": ("f32", {}, Type.F32),
    "f16": ("f16", {}, Type.F16),
    "bf16": ("bf16", {}, Type.BF16),
    "q8": ("q8", {}, Type.Q8_0),
    "q4": ("q4", {"minimum": False}, Type.Q4_0),
    "q4min": ("q4", {"minimum": True}, Type.Q4_1),
}
SHAPES = [(1, 32), (7, 64), (33, 96), (3, 1056), (160,)]


def ggml_bytes(tensor: formats.Tensor) -> np.ndarray:
    """Our planes woven into ggml's blocks."""
    planes, shape = tensor.planes, tensor.info.shape
    if "values" in planes:
        return planes["values"].view(np.uint8).reshape(*shape[:-1], -1)
    parts = [planes[n][..., None].view(np.uint8) for n in ("scales", "mins") if n in planes]
    parts.append(planes["quants"].view(np.uint8).reshape(*parts[0].shape[:-1], -1))
    return np.concatenate(parts, axis=-1).reshape(*shape[:-1], -1)


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype == np.float32 and a.shape == b.shape
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def edges(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Values on which rounding errs: ties, both zeros, denormals, empty groups, groups of one value, wide ranges."""
    rng = np.random.default_rng(seed)
    flat = rng.standard_normal(np.prod(shape)).astype(np.float32).reshape(-1, 32)
    rows = [
        np.zeros(32),
        -np.zeros(32),
        np.full(32, -3.25),
        np.arange(32) - 15.5,
        np.r_[127.0, np.arange(31) + 0.5],
        np.r_[-8.0, np.arange(31) / 2 - 7.25],
        np.full(32, 1e-9),
        rng.standard_normal(32) * 6e-8,
        rng.standard_normal(32) * 1e-39,
        np.r_[30000.0, rng.standard_normal(31)],
        np.r_[-0.0, 1.0, np.zeros(30)],
    ]
    for i in range(len(flat)):
        if rng.random() < 0.7:
            flat[i] = rows[(i + seed) % len(rows)]
    return flat.reshape(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_pack_and_unpack_are_ggmls(kind: str, shape: tuple[int, ...], seed: int) -> None:
    name, options, ggml_type = KINDS[kind]
    values = edges(shape, seed)
    tensor = formats.pack("w", values, name, **options)
    packed = ggml_bytes(tensor)
    assert tensor.info.nbytes == packed.nbytes == sum(p.nbytes for p in tensor.planes.values())
    assert (tensor.info.shape, tensor.info.format, tensor.info.minimum) == (shape, name, options.get("minimum", False))
    with np.errstate(all="ignore"):
        wanted = quants.quantize(values, ggml_type) if kind != "f32" else values
    # in a group below float16's range the package divides by a scale that underflowed; its quants mean nothing there
    normal = np.abs(values.reshape(-1, 32)).max(axis=-1) > 1e-30
    normal |= (values.reshape(-1, 32) == 0).all(axis=-1)
    blocks = wanted.view(np.uint8).reshape(len(normal), -1)
    np.testing.assert_array_equal(packed.reshape(len(normal), -1)[normal], blocks[normal])
    same_bits(tensor.unpack(), quants.dequantize(packed, ggml_type).reshape(shape))


@pytest.mark.parametrize("kind", KINDS)
def test_every_stored_pattern_unpacks_as_ggml(kind: str) -> None:
    """Any bytes a file may hold, not only those that `pack` makes: every scale, negative and denormal ones too."""
    name, options, ggml_type = KINDS[kind]
    tensor = formats.pack("w", np.zeros((2048, 32), np.float32), name, **options)
    rng = np.random.default_rng(5)
    for plane, array in tensor.planes.items():
        bits = np.uint16 if array.dtype == np.float16 else np.uint8
        patterns = rng.integers(0, 1 << (8 * np.dtype(bits).itemsize), array.view(bits).shape, dtype=bits)
        if bits == np.uint16:
            patterns[(patterns & 0x7C00) == 0x7C00] &= 0x83FF  # no infinities: their quotients have no agreed NaN
        tensor.planes[plane] = patterns.view(array.dtype)
    with np.errstate(invalid="ignore"):
        same_bits(tensor.unpack(), quants.dequantize(ggml_bytes(tensor), ggml_type).reshape(2048, 32))


@pytest.mark.parametrize("shape", [(1, 256), (7, 768), (33, 256), (512,)], ids=str)
@pytest.mark.parametrize("kind", ggml.SUPER, ids=lambda k: k.name)
@pytest.mark.parametrize("seed", range(3))
def test_super_blocks_unpack_as_ggml(kind: Type, shape: tuple[int, ...], seed: int) -> None:
    """What `pack` makes, and then every byte of it at random: negative scales, denormal ones, scales of six bits that no packing
    of ours would choose."""
    tensor = formats.pack("w", edges(shape, seed), ggml.SUPER[kind])
    assert tensor.info.nbytes == sum(p.nbytes for p in tensor.planes.values())
    assert tensor.info.nbytes <= 1.03 * ggml.super_blocks(tensor).nbytes
    same_bits(tensor.unpack(), quants.dequantize(ggml.super_blocks(tensor), kind).reshape(shape))
    rng = np.random.default_rng(seed)
    for name, plane in tensor.planes.items():
        top = 64 if name.startswith("sub_") and kind != Type.Q6_K else 256
        plane.view(np.uint8)[...] = rng.integers(0, top, plane.view(np.uint8).shape)
        if plane.dtype == np.float16:
            bits = plane.view(np.uint16)
            bits[(bits & 0x7C00) == 0x7C00] &= 0x83FF
    same_bits(tensor.unpack(), quants.dequantize(ggml.super_blocks(tensor), kind).reshape(shape))


@pytest.mark.parametrize("kind", ggml.SUPER, ids=lambda k: k.name)
def test_super_blocks_err_by_half_a_step(kind: Type) -> None:
    """And by what six bits, or eight, do to the scales: `coarse`, half a step of theirs times the largest number."""
    values = np.random.default_rng(1).standard_normal((9, 1024)).astype(np.float32)
    values *= np.exp(np.random.default_rng(2).standard_normal((9, 1024 // 16))).repeat(16, axis=1).astype(np.float32)
    tensor = formats.pack("w", values, ggml.SUPER[kind])
    wide = {p: np.abs(tensor.planes[p].astype(np.float32)).repeat(256, axis=1) for p in ("scales", "mins") if p in tensor.planes}
    small = {p: np.abs(tensor.planes[f"sub_{p}"].astype(np.float32)) for p in wide}
    step = wide["scales"] * small["scales"].repeat(1024 // small["scales"].shape[1], axis=1)
    error = np.abs(tensor.unpack() - values)
    if kind == Type.Q6_K:  # the side opposite to the farthest value ends at +31, a whole step short of it
        bound = step + 32 * wide["scales"] / 2
    else:
        bound = step / 2 + ((15 if kind == Type.Q4_K else 31) * wide["scales"] + wide["mins"]) / 2
    assert (error <= 1.01 * bound).all() and np.median(error / np.maximum(step, 1e-9)) < 0.3
    rms = {Type.Q4_K: 0.08, Type.Q5_K: 0.04, Type.Q6_K: 0.02}[kind]  # uniform rounding of normal numbers to 16, 32 and 64 steps
    normal = np.random.default_rng(3).standard_normal((8, 1024)).astype(np.float32)
    assert np.sqrt(np.mean((formats.pack("w", normal, ggml.SUPER[kind]).unpack() - normal) ** 2)) < rms


@given(st.integers(0, 0xFFFFFFFF))
@settings(max_examples=300, deadline=None)
def test_bf16_rounds_to_nearest_even_and_keeps_nan(bits: int) -> None:
    import torch
    value = np.array([bits], np.uint32).view(np.float32)
    ours = formats.pack("w", value, "bf16").unpack()
    theirs = torch.from_numpy(value.copy()).bfloat16().float().numpy()
    if np.isnan(value[0]):
        assert np.isnan(ours[0]) and np.isnan(theirs[0])
    else:
        same_bits(ours, theirs)


@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_q4_error_is_within_half_a_step(group: int, minimum: bool) -> None:
    values = np.random.default_rng(group).standard_normal((5, 3 * group)).astype(np.float32)
    tensor = formats.pack("w", values, "q4", group=group, minimum=minimum)
    assert tensor.planes["scales"].shape == (5, 3) and tensor.planes["quants"].shape == (5, 3 * group // 2)
    step = np.abs(tensor.planes["scales"].astype(np.float32)).repeat(group, axis=-1)
    error = np.abs(tensor.unpack() - values) / step
    # without a minimum the side opposite to the farthest value ends at +7, a whole step short of it
    top = 0.52 if minimum else 1.01
    assert error.max() <= top and np.median(error) < 0.3


def test_groups_of_64_and_128_spread_their_scale() -> None:
    values = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    for group in (64, 128):
        tensor = formats.pack("w", values, "q4", group=group, minimum=True)
        planes, small = dict(tensor.planes), formats.describe("w", values.shape, "q4", 32, True)
        for plane in ("scales", "mins"):
            planes[plane] = planes[plane].repeat(group // 32, axis=-1)
        as_q4_1 = ggml_bytes(formats.Tensor(small, planes))
        same_bits(tensor.unpack(), quants.dequantize(as_q4_1, Type.Q4_1))


@pytest.mark.parametrize("format", ["q8", "q4", *ggml.SUPER.values()])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
def test_what_cannot_be_quantised_is_refused(format: str, bad: float) -> None:
    values = np.ones((2, 256), np.float32)
    values[1, 3] = bad
    with pytest.raises(OptionError, match="w has values"):
        formats.pack("w", values, format)


def test_columns_and_groups_are_checked() -> None:
    with pytest.raises(OptionError, match="33 columns"):
        formats.pack("w", np.ones((2, 33), np.float32), "q8")
    with pytest.raises(OptionError, match="groups of 16"):
        formats.pack("w", np.ones((2, 32), np.float32), "q4", group=16)
    with pytest.raises(OptionError, match="groups of 256"):
        formats.pack("w", np.ones((2, 128), np.float32), "q5_k")


def test_reorder_moves_whole_rows() -> None:
    values = np.random.default_rng(1).standard_normal((6, 512)).astype(np.float32)
    order = np.array([3, 0, 5, 1, 2, 4])
    for name, options, _ in (*KINDS.values(), *((name, {}, kind) for kind, name in ggml.SUPER.items())):
        tensor = formats.pack("w", values, name, **options)
        same_bits(formats.reorder(tensor, order).unpack(), tensor.unpack()[order])
