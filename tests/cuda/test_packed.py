"""Kernels over packed matrices against the formats' own unpacking."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the backend is PyTorch's")
pytest.importorskip("triton", reason="Triton has no package for this system")

from nano_vllm.backends import reference  # noqa: E402
from nano_vllm.backends.cuda.kernels import one_row_packed, packed, rows  # noqa: E402
from nano_vllm.backends.cuda.weights import Upload, on_device  # noqa: E402
from nano_vllm.formats import pack  # noqa: E402

from . import DEVICE  # noqa: E402
from .test_kernels import array, close, ints, poisoned, random  # noqa: E402

FORMATS = {
    "q8": ("q8", {}),
    "q4": ("q4", {}),
    "q4, groups of 128": ("q4", {"group": 128}),
    "q4 with minimum": ("q4", {"group": 64, "minimum": True}),
}


def matrix(name: str, n: int, k: int):
    format, options = FORMATS[name]
    tensor = pack("w", np.random.default_rng(5).standard_normal((n, k)).astype(np.float32), format, **options)
    return on_device([tensor], Upload(torch.device(DEVICE)), torch.device(DEVICE)), tensor.unpack()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "count, n, k, type",
    [(2, 9, 128, "f32"), (3, 33, 256, "f32"), (16, 18, 384, "bf16"), (19, 70, 640, "bf16")],
)
def test_linear(name, count, n, k, type):
    (weight, values), x, bias = matrix(name, n, k), random(count, k, type=type), random(n, seed=2)
    right = reference.linear(array(x), values, array(bias))
    for parts in {1, packed.parts(count, n, k)}:
        out = poisoned(parts, count, n)
        packed.linear(x, weight, bias, out)
        close(out.sum(0), right, type)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n, k, type", [(1, 128, "f32"), (37, 1152, "bf16"), (9, 5120, "f32")])
def test_product_of_one_row(name, n, k, type):
    (weight, values), x, bias = matrix(name, n, k), random(1, k, type=type), random(n, seed=2)
    out, total = poisoned(1, n), random(1, n, seed=3)
    one_row_packed.product(x, weight, bias, out)
    close(out, reference.linear(array(x), values, array(bias)), "f32")
    right = array(total) + reference.linear(array(x), values, None)
    one_row_packed.product(x, weight, None, total, add=True)
    close(total, right, "f32")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("activation", ["", *rows.ACTIVATIONS])
@pytest.mark.parametrize("n, k, type", [(6, 384, "f32"), (74, 1152, "bf16"), (10, 3072, "f32")])
def test_product_with_its_norm_and_gate(name, activation, n, k, type):
    weight, values = matrix(name, n, k)
    x, norm, bias = random(1, k), random(k, seed=1), random(n, seed=3)
    right = reference.linear(reference.normalize(array(x), array(norm), 1e-2), values, array(bias))
    if activation:
        right = reference.gate(right, n // 2, activation)
    out = poisoned(*right.shape, type=type)
    one_row_packed.product(x, weight, bias, out, norm, 1e-2, activation)
    close(out, right, type)


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_product_of_very_small_and_large_numbers(size):
    (weight, values), x = matrix("q4", 9, 384), size * random(1, 384)
    out = poisoned(1, 9)
    one_row_packed.product(x, weight, None, out)
    close(out, reference.linear(array(x), values, None), "f32")


@pytest.mark.parametrize("name", ["q8", "q4 with minimum"])
def test_linear_of_several_tiles_of_rows(name):
    (weight, values), x = matrix(name, 65, 192), random(131, 192, type="bf16")
    out = poisoned(1, 131, 65)
    packed.linear(x, weight, None, out)
    close(out[0], reference.linear(array(x), values, None), "bf16")


@pytest.mark.parametrize("name", FORMATS)
def test_unpack_and_embed(name):
    weight, values = matrix(name, 7, 1152)
    out = poisoned(3, 1152)
    packed.unpack(weight, 2, out)
    np.testing.assert_array_equal(array(out), values[2:5])
    packed.embed(weight, ints([6, 1, 0]), ints([-1, -1, 1]), ints([0, 3]), out)
    np.testing.assert_array_equal(array(out), values[[6, 1, 3]])


@pytest.mark.parametrize("format, kind", [("f32", "bfloat16"), ("f16", "float16"), ("bf16", "float32"), ("q8", "float32")])
def test_uploads_in_pieces_are_the_numbers(format, kind):
    """More pieces than there are buffers, and a last one that is short."""
    tensor = pack("w", np.random.default_rng(3).standard_normal((7, 96)).astype(np.float32), format)
    out = poisoned(7, 96).to(getattr(torch, kind))
    Upload(torch.device(DEVICE), piece=400).tensor(tensor, out)
    right = torch.from_numpy(tensor.unpack()).to(out.dtype).float()
    np.testing.assert_array_equal(array(out.float()), right.numpy())


def test_parts_of_a_packed_matrix_are_one_below_the_other():
    parts = [pack("w", np.random.default_rng(n).standard_normal((n, 64)).astype(np.float32), "q4", minimum=True) for n in (3, 5)]
    out = poisoned(8, 64)
    packed.unpack(on_device(parts, Upload(torch.device(DEVICE), piece=100), torch.device(DEVICE)), 0, out)
    np.testing.assert_array_equal(array(out), np.concatenate([part.unpack() for part in parts]))
