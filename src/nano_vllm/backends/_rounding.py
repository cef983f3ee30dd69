"""Where the reference backend rounds as fast backends do: activations to int8 before quantised weights, and the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import registry
from ..formats import Tensor

GROUP = 32  # columns of an activation that share a scale


def quantize_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x (rows, K) -> whole numbers −127 to 127 (rows, K/32, 32) and scales (rows, K/32), both float32.

    Per row and 32 columns: scale = absmax / 127, q = rint(x · (127 / absmax)), ties to even; under 2^-119, where 127 / absmax
    may not be finite, all count as zeros, which have the scale 0.
    """
    groups = x.reshape(len(x), -1, GROUP)
    absmax = np.abs(groups).max(axis=-1)
    absmax[absmax < np.float32(2.0**-119)] = 0
    inverse = np.divide(np.float32(127), absmax, out=np.zeros_like(absmax), where=absmax != 0)
    return np.rint(groups * inverse[..., None]), absmax / np.float32(127)


@dataclass(frozen=True)
class Quantized:
    """A quantised matrix by groups of 32 columns, or of 16 where its format has such: quants (K/size, N, size) whole numbers,
    scales and mins (K/size, N), float32."""

    quants: np.ndarray
    scales: np.ndarray
    mins: np.ndarray | None

    @classmethod
    def of(cls, tensor: Tensor) -> Quantized:
        quants, scales, mins = registry.load("formats", tensor.info.format).whole(tensor)
        n, k = quants.shape
        size = min(GROUP, k // scales.shape[1])

        def by_group(plane: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(np.repeat(plane, k // size // plane.shape[1], axis=1).T)

        quants = np.ascontiguousarray(quants.reshape(n, k // size, size).transpose(1, 0, 2))
        return cls(quants, by_group(scales), None if mins is None else by_group(mins))


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a · b + c with one rounding to float32, but for ties of the float64 sum."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def linear_int8(x: np.ndarray, weight: Quantized, bias: np.ndarray | None, twice: np.ndarray) -> np.ndarray:
    """As `linear`, with x (rows, K) rounded by `quantize_rows`.

    Of the rows in `twice`, (rows,) bool, what the rounding leaves is rounded in its turn and its product added.
    The first position of a sequence is computed so. Its hidden state is where models keep their massive activations (Sun et al.
    2024), a few numbers so large that their groups round all others away, and every later position attends to it (Xiao et al.
    2023). The native kernels add what is left last, onto a residual where there is one: a float32 rounding apart from this.
    """
    y = _linear_once(x, weight, bias)
    if twice.any():
        q, scales = quantize_rows(x[twice])
        y[twice] += _linear_once(fused(-scales[..., None], q, x[twice].reshape(q.shape)).reshape(x[twice].shape), weight, None)
    return y


def _linear_once(x: np.ndarray, weight: Quantized, bias: np.ndarray | None) -> np.ndarray:
    """Groups are added in ascending order:
    y = Σ (x_scale · w_scale) · Σ x_q · w_q, plus w_min · (x_scale · Σ x_q) where the weight has a minimum.

    Within a group the sum is of whole numbers below 2^24, which float32 holds exactly in any order.
    """
    q, scales = quantize_rows(x)
    count, n, size = weight.quants.shape
    q, scales = q.reshape(len(x), count, size), scales.repeat(GROUP // size, axis=1)
    y = np.zeros((len(x), n), np.float32)
    for g in range(count):
        dots = q[:, g] @ weight.quants[g].T
        y = fused(scales[:, g, None] * weight.scales[g], dots, y)
        if weight.mins is not None:
            y = fused((scales[:, g] * q[:, g].sum(axis=-1))[:, None], weight.mins[g], y)
    return y if bias is None else y + bias


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16, the upper half, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), (bits >> 16).astype(np.uint16) | np.uint16(64), rounded)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def to_f16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def as_f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32, copy=False)


CACHE_TYPES = {"f32": (np.float32, as_f32, as_f32), "f16": (np.float16, to_f16, as_f32), "bf16": (np.uint16, to_bf16, from_bf16)}


class PagedCache:
    """Keys and values of one layer, each [block, slot, kv_head, head_size] in the cache's type, one of CACHE_TYPES."""

    def __init__(self, blocks: int, block_size: int, kv_heads: int, head_size: int, dtype: str) -> None:
        storage, self.encode, self.decode = CACHE_TYPES[dtype]
        self.keys, self.values = (np.zeros((blocks, block_size, kv_heads, head_size), storage) for _ in range(2))

    def write(self, blocks: np.ndarray, slots: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """blocks, slots (rows,); k, v (rows, kv_heads, head_size), rounded to the cache's type here."""
        self.keys[blocks, slots] = self.encode(k)
        self.values[blocks, slots] = self.encode(v)

    def read(self, blocks: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """-> keys and values (kv_heads, n, head_size) float32 of n slots."""
        return tuple(self.decode(plane[blocks, slots]).transpose(1, 0, 2) for plane in (self.keys, self.values))


# e4m3 has 3 bits of fraction, exponents from −6, and numbers under 2^-6 in steps of 2^-9; the code of a number that is not
# negative is its index here.
E4M3 = np.array([np.ldexp(c & 7 if c < 8 else 8 + (c & 7), max(c >> 3, 1) - 10) for c in range(127)], np.float32)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """float32 of at most 448 -> uint8 codes, rounded to nearest, ties to even."""
    step = np.ldexp(np.float32(1), np.maximum(np.frexp(x)[1] - 1, -6) - 3).astype(np.float32)
    return (np.searchsorted(E4M3, np.rint(np.abs(x) / step) * step) | np.signbit(x) << 7).astype(np.uint8)


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    return np.where(codes >> 7, -1, 1).astype(np.float32) * E4M3[codes & 127]


class FP8Cache:
    """Keys and values of one layer in e4m3 [block, slot, kv_head, head_size] with float32 scales [block, slot, kv_head]: of
    each vector the largest number becomes 448. Vectors under 2^-50 count as zeros."""

    def __init__(self, blocks: int, block_size: int, kv_heads: int, head_size: int) -> None:
        shape = (blocks, block_size, kv_heads, head_size)
        self.keys, self.values = ((np.zeros(shape, np.uint8), np.zeros(shape[:3], np.float32)) for _ in range(2))

    def write(self, blocks: np.ndarray, slots: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        for (codes, scales), x in ((self.keys, k), (self.values, v)):
            most = np.abs(x).max(axis=-1)
            most = np.where(most < np.float32(2.0**-50), np.float32(0), most)
            inverse = np.divide(E4M3[-1], most, out=np.zeros_like(most), where=most != 0)
            codes[blocks, slots] = to_e4m3(np.clip(x * inverse[..., None], -E4M3[-1], E4M3[-1]))
            scales[blocks, slots] = most / E4M3[-1]

    def read(self, blocks: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return tuple(
            (from_e4m3(codes[blocks, slots]) * scales[blocks, slots][..., None]).transpose(1, 0, 2)
            for codes, scales in (self.keys, self.values)
        )


# A cache of whole numbers. Sums of their products are exact in int32, which fast backends compute at twice the speed of float32
# and more; the limits below are what 31 bits allow. Queries are rounded as int16 keys are, the weights of a split together.

LONGEST = np.float32(32700)  # of queries and int16 keys, and the largest weight of a key, in units of their scale
SPLIT = 256  # keys whose weights share a unit, at absolute positions


@dataclass(frozen=True)
class WholeType:
    """Attributes:
    most: the largest number of a value, in an int8 cache of a key too.
    weights: the largest sum of a split's weights.
    """

    storage: type
    most: np.float32
    weights: np.float32


WHOLE_TYPES = {
    "int16": WholeType(np.int16, np.float32(4095), np.float32(520_000)),
    "int8": WholeType(np.int8, np.float32(127), SPLIT * LONGEST),
}


@dataclass(frozen=True)
class Whole:
    """x ≈ scales · q: q (kv_heads, n, head_size) whole numbers, scales (kv_heads, n), both float32."""

    q: np.ndarray
    scales: np.ndarray

    def of(self, keys: slice) -> Whole:
        return Whole(self.q[:, keys], self.scales[:, keys])


def to_whole(x: np.ndarray, size: np.ndarray, units: np.float32) -> Whole:
    """x (…, head_size), size (…) -> whole numbers of which `size` is `units`. Vectors under 2^-50 count as zeros."""
    size = np.where(size < np.float32(2.0**-50), np.float32(0), size)
    inverse = np.divide(units, size, out=np.zeros_like(size), where=size != 0)
    return Whole(np.rint(x * inverse[..., None]), size / units)


def by_length(x: np.ndarray) -> Whole:
    """A vector's length becomes LONGEST."""
    return to_whole(x, np.sqrt(np.sum(x * x, axis=-1, dtype=np.float32)), LONGEST)


def by_most(x: np.ndarray, most: np.float32) -> Whole:
    return to_whole(x, np.abs(x).max(axis=-1), most)


class WholeCache:
    """Keys and values of one layer as whole numbers [block, slot, kv_head, head_size] with scales [block, slot, kv_head]."""

    def __init__(self, blocks: int, block_size: int, kv_heads: int, head_size: int, dtype: str) -> None:
        self.type = WHOLE_TYPES[dtype]
        shape = (blocks, block_size, kv_heads, head_size)
        self.keys, self.values = ((np.zeros(shape, self.type.storage), np.zeros(shape[:3], np.float32)) for _ in range(2))

    def write(self, blocks: np.ndarray, slots: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """blocks, slots (rows,); k, v (rows, kv_heads, head_size)."""
        keys = by_length(k) if self.type.storage is np.int16 else by_most(k, self.type.most)
        for (q, scales), whole in ((self.keys, keys), (self.values, by_most(v, self.type.most))):
            q[blocks, slots], scales[blocks, slots] = whole.q, whole.scales

    def read(self, blocks: np.ndarray, slots: np.ndarray) -> tuple[Whole, Whole]:
        """-> keys and values of n slots."""
        return tuple(
            Whole(q[blocks, slots].transpose(1, 0, 2).astype(np.float32), scales[blocks, slots].T)
            for q, scales in (self.keys, self.values)
        )

    def attend(self, query: np.ndarray, keys: Whole, values: Whole, scale: float, first: int) -> np.ndarray:
        """One row's query (heads, head_size) over the keys at positions from `first` on -> (heads, head_size).

        Per split: scores s, their maximum m, p = exp(s − m), l = Σ p, and weights p · v_scale rounded to whole units, the unit
        such that their sum is `weights` at most and none is above LONGEST. Splits merge as in Milakov & Gimelshein (2018).
        """
        q = by_length(query.reshape(len(keys.q), -1, query.shape[-1]))
        factor = (q.scales * np.float32(scale))[..., None]
        end, parts = first + keys.q.shape[1], []
        for start in range(first // SPLIT * SPLIT, end, SPLIT):
            some = slice(max(start - first, 0), start + SPLIT - first)
            k, v = keys.of(some), values.of(some)
            dots = q.q.astype(np.float64) @ k.q.transpose(0, 2, 1)  # exact
            s = dots.astype(np.float32) * factor * k.scales[:, None]
            m = s.max(axis=-1, keepdims=True)
            p = np.exp(s - m)
            w = p * v.scales[:, None]
            unit = np.maximum(w.sum(axis=-1) / self.type.weights, w.max(axis=-1) / LONGEST)[..., None]
            weights = np.rint(w * np.divide(np.float32(1), unit, out=np.zeros_like(unit), where=unit >= np.float32(2.0**-100)))
            parts.append((m, p.sum(axis=-1, keepdims=True), (weights.astype(np.float64) @ v.q).astype(np.float32) * unit))
        highest = np.max([m for m, _, _ in parts], axis=0)
        shares = [np.exp(m - highest) for m, _, _ in parts]
        total = sum(share * part for share, (_, part, _) in zip(shares, parts))
        return (sum(share * acc for share, (_, _, acc) in zip(shares, parts)) / total).reshape(query.shape)


def cache_of(dtype: str, blocks: int, block_size: int, kv_heads: int, head_size: int) -> PagedCache | WholeCache | FP8Cache:
    """The cache of one layer in a type of CACHES."""
    if dtype == "fp8":
        return FP8Cache(blocks, block_size, kv_heads, head_size)
    return (WholeCache if dtype in WHOLE_TYPES else PagedCache)(blocks, block_size, kv_heads, head_size, dtype)


CACHES = (*CACHE_TYPES, *WHOLE_TYPES, "fp8")
