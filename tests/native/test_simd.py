"""simd.h: every function gives the same bits on every instruction set, and they are the ones that NumPy gives."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nano_vllm._native import kernels

ISAS = kernels.isas()
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.1754944e-38, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan, 2.5, 3.5, -0.5]


def probe(isa: str, op: str, a, b=None, c=None) -> np.ndarray:
    a = np.asarray(a, np.float32)
    b, c = (np.zeros_like(a) if v is None else np.asarray(v, np.float32) for v in (b, c))
    out = np.full_like(a, 7)
    kernels.probe(isa, getattr(kernels.Probe, op), a, b, c, out)
    return out


def numbers(n: int, seed: int) -> np.ndarray:
    """Any bit pattern, then magnitudes near 1, then every pair of special values."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.integers(0, 2**32, n, np.uint32).view(np.float32), rng.normal(0, 10, n).astype(np.float32)])


def same_bits(got: np.ndarray, want: np.ndarray, text: str = "") -> None:
    """A NaN equals any other NaN."""
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan, text)
    np.testing.assert_array_equal(got[~nan].view(np.uint32), want[~nan].view(np.uint32), text)


PAIRS = np.array([(x, y) for x in SPECIAL for y in SPECIAL], np.float32)
A, B, C = (np.concatenate([numbers(5000, s), extra]) for s, extra in enumerate((PAIRS[:, 0], PAIRS[:, 1], PAIRS[::-1, 0])))
DEFINITIONS = {
    "add": lambda a, b, c: a + b,
    "subtract": lambda a, b, c: a - b,
    "multiply": lambda a, b, c: a * b,
    "divide": lambda a, b, c: a / b,
    "sqrt": lambda a, b, c: np.sqrt(a),
    "max": lambda a, b, c: np.where(a > b, a, b),
    "min": lambda a, b, c: np.where(a < b, a, b),
    "f16": lambda a, b, c: a.astype(np.float16).astype(np.float32),
    "select_less": lambda a, b, c: np.where(a < b, c, a),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", DEFINITIONS)
def test_arithmetic_is_numpys(isa, op):
    with np.errstate(all="ignore"):
        same_bits(probe(isa, op, A, B, C), DEFINITIONS[op](A, B, C), op)


@pytest.mark.parametrize("isa", ISAS)
def test_bf16_rounds_to_nearest_even(isa):
    torch = pytest.importorskip("torch", reason="emulated machines have no PyTorch; it is the oracle here alone")
    same_bits(probe(isa, "bf16", A), torch.from_numpy(A).bfloat16().float().numpy())


@pytest.mark.parametrize("isa", ISAS)
def test_every_half_float(isa):
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    same_bits(probe(isa, "f16", halves), halves)
    between = np.nextafter(halves[:31743], np.float32(0)) + np.diff(halves[:31744]) / 2  # and what lies around the ties
    for x in (between, np.nextafter(between, np.float32(9e9)), np.float32([65504, 65519.996, 65520])):
        with np.errstate(over="ignore"):
            same_bits(probe(isa, "f16", x), x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("isa", ISAS)
def test_fma_rounds_once(isa):
    finite = np.isfinite(A) & np.isfinite(B) & np.isfinite(C)
    a, b, c = A[finite], B[finite], C[finite]
    with np.errstate(over="ignore"):
        cancelling = -(a.astype(np.float64) * b).astype(np.float32)  # what is left is the rounding of the product
    scale = np.float32(2.0) ** np.random.default_rng(9).integers(-30, 30, a.size).astype(np.float32)
    with np.errstate(all="ignore"):
        cases = [(a, b, c), (a, b, cancelling), (a, np.ones_like(a), b), (a, b, a * b * scale)]
    for x, y, z in cases:
        keep = np.isfinite(z)
        x, y, z = x[keep][:3000], y[keep][:3000], z[keep][:3000]
        want = np.array([fused(*v) for v in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)], np.float32)
        got = probe(isa, "fma", x, y, z)
        sure = want != 0  # the sign of a zero sum is left to the test below
        same_bits(got[sure], want[sure])
        assert (got[~sure] == 0).all()


def fused(a: float, b: float, c: float) -> float:
    """a · b + c in whole numbers, rounded once to float32."""
    from fractions import Fraction

    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if not exact:
        return 0.0
    exponent = max(math.floor(math.log2(abs(exact.numerator)) - math.log2(exact.denominator)), -126)
    exponent += 1 if abs(exact) >= Fraction(2) ** (exponent + 1) else 0
    exponent -= 1 if exponent > -126 and abs(exact) < Fraction(2) ** exponent else 0
    unit = Fraction(2) ** (exponent - 23)
    value = float(round(exact / unit) * unit) if exponent < 128 else math.copysign(math.inf, exact)
    return value if abs(value) < 2.0**128 else math.copysign(math.inf, value)


@pytest.mark.parametrize("isa", ISAS)
def test_fma_of_special_values(isa):
    triples = np.array([(x, y, z) for x in SPECIAL for y in SPECIAL for z in SPECIAL], np.float32)
    a, b, c = triples.T.copy()
    with np.errstate(all="ignore"):
        want = (a.astype(np.float64) * b + c).astype(np.float32)
    special = ~np.isfinite(want) & ~(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)) | (want == 0)
    same_bits(probe(isa, "fma", a, b, c)[special], want[special])
    same_bits(probe(isa, "fma", a, b, c), probe(ISAS[0], "fma", a, b, c))


@pytest.mark.parametrize("isa", ISAS)
def test_to_i32_rounds_to_nearest_even(isa):
    edges = np.float32([2**22 + 0.5, 2**23 - 0.5, -(2**22) - 1.5, -(2.0**31), 2.0**31, 2147483520])
    x = np.concatenate([A, np.arange(-9, 9, 0.25, np.float32), edges])
    fits = (x >= -(2.0**31)) & (x < 2.0**31)
    want = np.full(x.shape, -(2**31), np.int64)
    want[fits] = np.rint(x[fits].astype(np.float64))
    np.testing.assert_array_equal(probe(isa, "to_i32", x).view(np.int32), want)


@pytest.mark.parametrize("isa", ISAS)
def test_reductions_are_one_tree(isa):
    x = np.concatenate([np.random.default_rng(4).normal(0, 1, 160), 10.0 ** np.arange(16)]).astype(np.float32)
    tree = x.reshape(-1, 16)
    while tree.shape[1] > 1:
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    same_bits(probe(isa, "reduce_add", x), np.repeat(tree[:, 0], 16))
    same_bits(probe(isa, "reduce_max", x), np.repeat(x.reshape(-1, 16).max(1), 16))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", range(1, 16))
def test_tails_touch_nothing_past_them(isa, n):
    for op in ("add", "f16", "bf16", "first"):
        out = np.full(64, 7, np.float32)
        a = np.arange(1, n + 1, dtype=np.float32)
        kernels.probe(isa, getattr(kernels.Probe, op), a, a * 0, a * 0, out[:n])
        same_bits(out[:n], a)
        assert (out[n:] == 7).all()


@pytest.mark.parametrize("isa", ISAS)
def test_exp(isa):
    spans = np.linspace(-87.3365, 88.7228, 200_000), np.linspace(-1, 1, 50_000), np.logspace(-30, 0, 1000)
    x = np.concatenate(spans).astype(np.float32)
    want = np.exp(x.astype(np.float64))
    got = probe(isa, "exp", x)
    assert (np.abs(got - want) / np.spacing(want.astype(np.float32))).max() <= 1.0
    same_bits(got, probe(ISAS[0], "exp", x))
    special = np.float32([0, -0.0, -87.34, -1e4, -math.inf, 88.73, math.inf, math.nan])
    same_bits(probe(isa, "exp", special), np.float32([1, 1, 0, 0, 0, math.inf, math.inf, math.nan]))


@pytest.mark.parametrize("isa", ISAS)
def test_powers_of_two_down_to_the_least(isa):
    x = -np.concatenate([np.linspace(0, 126, 300_000), np.linspace(0, 1, 50_000), np.logspace(-30, 0, 1000)]).astype(np.float32)
    want = np.exp2(x.astype(np.float64))
    got = probe(isa, "exp2_down", x)
    assert (np.abs(got - want) / np.spacing(want.astype(np.float32))).max() <= 1.0
    same_bits(got, probe(ISAS[0], "exp2_down", x))
    special = np.float32([0, -0.0, -126, -126.01, -1e4, -math.inf, math.nan])
    same_bits(probe(isa, "exp2_down", special), np.float32([1, 1, 2.0**-126, 0, 0, 0, math.nan]))
