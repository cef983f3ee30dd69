"""The matrix kernels of every instruction set: the same bits as each other, and the numbers of the definition in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from nano_vllm import formats
from nano_vllm._native import kernels

ISAS = kernels.isas()
QUANTIZED = [("q4", 32, False), ("q4", 32, True), ("q4", 64, False), ("q4", 64, True)]
QUANTIZED += [("q4", 128, False), ("q4", 128, True), ("q8", 32, False)]
SUPER = [("q4_k", 256, False), ("q5_k", 256, False), ("q6_k", 256, False)]
FLOATS = [("f32", 0, False), ("f16", 0, False), ("bf16", 0, False)]
MATRICES = [(*f, 384) for f in QUANTIZED] + [(*f, 768) for f in SUPER] + [(*f, k) for f in FLOATS for k in (1, 33, 64)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 33]
same = np.testing.assert_array_equal


def weights(format: str, group: int, minimum: bool, n: int, k: int, seed: int = 0) -> formats.Tensor:
    values = np.random.default_rng(seed).normal(0, 0.1, (n, k)).astype(np.float32)
    options = {"q4": {"group": group, "minimum": minimum}}.get(format, {})
    return formats.pack("w", values, format, **options)


def packed(tensor: formats.Tensor):
    info, planes = tensor.info, dict(tensor.planes)
    first = planes.pop("quants" if info.group else "values")
    return kernels.pack(info.format, *info.shape, info.group, info.minimum, first, **planes)


def inputs(rows: int, k: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (rows, k)).astype(np.float32)


def linear(isa: str, w, x: np.ndarray, n: int, quantized: bool, **options) -> np.ndarray:
    out = np.full((len(x), n), np.nan, np.float32)
    kernels.linear(isa, w, kernels.quantize(isa, x) if quantized else x, out, **options)
    return out


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x (rows, K) -> whole numbers (rows, K/32, 32) and scales (rows, K/32), the definition of a quantised activation."""
    groups = x.reshape(len(x), -1, 32)
    most = np.abs(groups).max(-1)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    return np.rint(groups * inverse[..., None]), most / np.float32(127)


def exact(tensor: formats.Tensor, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64 after the same rounding of x, and the sum of its terms' magnitudes."""
    values = tensor.unpack().astype(np.float64)
    if tensor.info.group:
        q, scales = rounded(x)
        x = (q * scales[..., None].astype(np.float64)).reshape(x.shape)
    x = x.astype(np.float64)
    return x @ values.T, np.abs(x) @ np.abs(values).T


@pytest.mark.parametrize("isa", ISAS)
def test_quantized_activations_are_the_definition(isa):
    x = inputs(9, 256) * np.float32(10.0) ** np.random.default_rng(2).integers(-20, 20, (9, 1)).astype(np.float32)
    x[3, 32:64] = 0
    x[4, 64:96] = np.linspace(-127, 127, 32).round() / 2  # ties when the scale is a power of two
    x[4, 64] = 127
    got, (q, scales) = kernels.quantize(isa, x), rounded(x)
    same(got.quants.reshape(q.shape), q)
    same(got.scales, scales)
    same(got.sums, q.sum(-1))
    same(got.shifts, scales * q.sum(-1, dtype=np.float32))
    assert not got.scales[3, 1] and not got.sums[3, 1]
    strided = np.zeros((9, 300), np.float32)
    strided[:, :256] = x
    same(kernels.quantize(isa, strided[:, :256]).quants, got.quants)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_number_that_is_not_finite_becomes_nan_alone(isa, poison):
    x = inputs(3, 96)
    x[1, 40] = poison
    activations = kernels.quantize(isa, x)
    assert np.isnan(activations.scales[1, 1]) and not activations.quants[1, 32:64].any()
    w = packed(weights("q4", 32, True, 40, 96))
    out = linear(isa, w, x, 40, True)
    assert np.isnan(out[1]).all()
    same(out[[0, 2]], linear(isa, w, x[[0, 2]], 40, True))


@pytest.mark.parametrize("isa", ISAS)
def test_tiny_groups_count_as_zero(isa):
    x = np.full((2, 32), 2.0**-120, np.float32)
    x[1] = 2.0**-119
    got = kernels.quantize(isa, x)
    assert not got.quants[0].any() and got.scales[0, 0] == 0
    assert (got.quants[1] == 127).all() and got.scales[1, 0] > 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "group", "minimum", "k"), MATRICES)
@pytest.mark.parametrize("n", [1, 32, 49])
def test_packing_loses_nothing(isa, format, group, minimum, k, n):
    tensor = weights(format, group, minimum, n, k)
    w = packed(tensor)
    assert w.nbytes == kernels.packed_bytes(format, n, k, group, minimum)
    assert w.blocks == (n + 31) // 32
    ids = np.random.default_rng(3).permutation(n).astype(np.int32)
    out = np.empty((n, k), np.float32)
    kernels.embed(isa, w, ids, out)
    same(out, tensor.unpack()[ids])


def test_the_packed_layout_is_the_documented_one():
    tensor = weights("q4", 64, True, 33, 128)
    quants, scales, mins = (tensor.planes[p] for p in ("quants", "scales", "mins"))
    body = packed(tensor).packed.reshape(2, 2, 2 * 512 + 128)  # block, scale group
    block, group, step, output, t, j = 0, 1, 1, 21, 2, 3
    vectors = body[block, group, :1024].reshape(2, 2, 4, 16, 4)  # step, half, t, output, j
    assert vectors[step, output // 16, t, output % 16, j] == quants[output, group * 32 + step * 16 + t * 4 + j]
    same(body[0, 1, 1024:1088].view(np.float16), scales[:32, 1])
    same(body[0, 1, 1088:].view(np.float16), mins[:32, 1])
    assert not body[1, 0, 1088:].view(np.float16)[1:].any()  # outputs past the last are zero

    values = weights("bf16", 0, False, 32, 3).planes["values"]
    pairs = packed(weights("bf16", 0, False, 32, 3)).packed.view(np.uint32).reshape(2, 32)
    same(pairs[0], values[:, 0].astype(np.uint32) << 16 | values[:, 1])
    same(pairs[1], values[:, 2].astype(np.uint32) << 16)


def test_the_packed_layout_of_super_blocks_is_the_documented_one():
    output, column = 21, 256 + 5 * 32 + 16 + 4 * 2 + 3  # of the second super-block: step 5, t 2, j 3, the high nibble
    five, six = weights("q5_k", 256, False, 33, 512), weights("q6_k", 256, False, 33, 512)
    body = packed(five).packed.reshape(2, 2, 8 * 640 + 640)[0, 1]
    step = body[5 * 640 : 6 * 640]
    value = step[256 + 2 * 64 + 5 * 4 + 3] >> 4 | (step[512 + 64 + 5 * 4 + 3] >> (4 + 2) & 1) << 4
    scale, minimum = body[5120 + 5 * 32 + output], body[5120 + 256 + 5 * 32 + output]
    d, dmin = (body[5120 + at : 5120 + at + 64].view(np.float16)[output].astype(np.float32) for at in (512, 576))
    assert d * np.float32(scale) * np.float32(value) - dmin * np.float32(minimum) == five.unpack()[output, column]

    body = packed(six).packed.reshape(2, 2, 8 * 768 + 576)[0, 1]
    step = body[5 * 768 : 6 * 768]
    value = int(step[256 + 2 * 64 + 5 * 4 + 3] >> 4 | (step[512 + 128 + 64 + 5 * 4 + 3] >> 2 * 2 & 3) << 4) - 32
    scale = body.view(np.int8)[6144 + 11 * 32 + output]
    d = body[6144 + 512 : 6144 + 576].view(np.float16)[output].astype(np.float32)
    assert d * np.float32(scale) * np.float32(value) == six.unpack()[output, column]


@pytest.mark.parametrize(("format", "bits"), [("q4_k", 4.5), ("q5_k", 5.5), ("q6_k", 6.5625)])
def test_super_blocks_keep_about_their_bits(format, bits):
    assert bits <= 8 * kernels.packed_bytes(format, 64, 1024, 256) / (64 * 1024) <= 1.03 * bits


def test_planes_are_read_where_a_file_has_them():
    """Blocks as ggml's Q4_1 has them, scale, minimum and nibbles together: views of them pack to the same bytes."""
    tensor = weights("q4", 32, True, 40, 96)
    blocks = np.dtype([("scale", np.float16), ("min", np.float16), ("quants", np.uint8, 16)])
    file = np.zeros((40, 3), blocks)
    file["scale"], file["min"] = tensor.planes["scales"], tensor.planes["mins"]
    file["quants"] = tensor.planes["quants"].reshape(40, 3, 16)
    got = kernels.pack("q4", 40, 96, 32, True, file["quants"], file["scale"], file["min"])
    same(got.packed, packed(tensor).packed)


@pytest.mark.parametrize(("format", "group", "minimum", "k"), MATRICES)
@pytest.mark.parametrize("n", [33, 80])
def test_linear_is_the_definition_and_the_same_everywhere(format, group, minimum, k, n):
    tensor = weights(format, group, minimum, n, k)
    w, x = packed(tensor), inputs(33, k)
    want, magnitude = exact(tensor, x)
    whole = [linear(isa, w, x, n, group > 0) for isa in ISAS]
    for isa, got in zip(ISAS, whole, strict=True):
        assert (np.abs(got - want) <= 1e-5 * magnitude).all(), isa
        same(got, whole[0], isa)
        for rows in ROWS:  # a row's result does not depend on the rows beside it
            same(linear(isa, w, x[:rows], n, group > 0), got[:rows], isa)


@pytest.mark.parametrize(("format", "group", "minimum"), QUANTIZED)
def test_extreme_numbers_do_not_saturate(format, group, minimum):
    k = 256
    quants = {"q4": np.full((32, k // 2), 0xFF, np.uint8), "q8": np.full((32, k), -128, np.int8)}[format]
    quants[1] = {"q4": 0x00, "q8": 127}[format]
    ones = np.ones((32, k // group), np.float16)
    w = kernels.pack(format, 32, k, group, minimum, quants, ones, ones if minimum else None)
    for sign in (1, -1):
        x = np.full((5, k), 127 * sign, np.float32)
        low, high = {"q4": (0, 15) if minimum else (-8, 7), "q8": (127, -128)}[format]
        for isa in ISAS:
            out = linear(isa, w, x, 32, True)
            same(out[:, 0], 127 * sign * k * (high + minimum))
            same(out[:, 1], 127 * sign * k * (low + minimum))


@pytest.mark.parametrize("format", ["q4_k", "q5_k", "q6_k"])
def test_extreme_numbers_of_super_blocks_do_not_saturate(format):
    """All bits set in output 0, none in output 1; scales and minima as large as they can be."""
    k, signed = 512, format == "q6_k"
    planes = formats.pack("w", np.zeros((32, k), np.float32), format).planes
    for name, plane in planes.items():
        if name in ("quants", "high"):
            plane[0], plane[1:] = 0xFF, 0
        else:
            plane[...] = 1 if plane.dtype == np.float16 else -128 if signed else 63
    w = packed(formats.Tensor(formats.describe("w", (32, k), format, 256), planes))
    high, low = {"q4_k": (15 * 63 - 63, -63), "q5_k": (31 * 63 - 63, -63), "q6_k": (31 * -128, -32 * -128)}[format]
    for sign in (1, -1):
        x = np.full((5, k), 127 * sign, np.float32)
        for isa in ISAS:
            out = linear(isa, w, x, 32, True)
            same(out[:, 0], 127 * sign * k * high)
            same(out[:, 1], 127 * sign * k * low)


@pytest.mark.parametrize(("format", "group", "minimum"), [QUANTIZED[1], QUANTIZED[5], *SUPER, FLOATS[1]])
def test_bias_then_accumulate_and_any_split_of_blocks(format, group, minimum):
    n, k, rows = 100, 256, 5
    w, x = packed(weights(format, group, minimum, n, k)), inputs(rows, k)
    bias, old = inputs(1, n, 5)[0], inputs(rows, n, 6)
    plain = linear(ISAS[0], w, x, n, group > 0)
    for isa in ISAS:
        same(linear(isa, w, x, n, group > 0, bias=bias), plain + bias)
        out = np.zeros((rows, n + 20), np.float32)  # inside wider rows, whose rest stays
        out[:, :n] = old
        activations = kernels.quantize(isa, x) if group else x
        for begin, end in ((2, 4), (0, 1), (1, 2)):
            kernels.linear(isa, w, activations, out[:, :n], bias=bias, accumulate=True, begin=begin, end=end)
        same(out[:, :n], old + (plain + bias))
        assert not out[:, n:].any()


def test_what_does_not_fit_is_refused():
    w = packed(weights("q4", 32, False, 40, 64))
    out = np.zeros((2, 40), np.float32)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.linear(ISAS[0], w, kernels.quantize(ISAS[0], inputs(2, 96)), out)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.linear(ISAS[0], w, inputs(2, 64), out)
    with pytest.raises(ValueError, match="whole groups"):
        kernels.packed_bytes("q4", 32, 48, 32, False)
    with pytest.raises(ValueError, match="super-blocks of 256"):
        kernels.packed_bytes("q4_k", 32, 256, 128)
    with pytest.raises(ValueError, match="the plane sub_mins is missing"):
        planes = {name: plane for name, plane in weights("q4_k", 256, False, 32, 256).planes.items() if name != "sub_mins"}
        kernels.pack("q4_k", 32, 256, 256, False, planes.pop("quants"), **planes)
    with pytest.raises(ValueError, match="no kernels for sse9"):
        kernels.quantize("sse9", inputs(1, 32))
    with pytest.raises(ValueError, match="outside"):
        kernels.embed(ISAS[0], w, np.array([40], np.int32), np.zeros((1, 64), np.float32))
