"""Kernels over rows: embedding, residual add with RMSNorm, gated activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import pdl
from ._dot import INTERPRETED

BLOCK = 1024  # columns of a program of the elementwise kernels


@triton.jit
def _embed(
    table, tokens, sources, last_ids, out, FIRST: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0)
    source = tl.load(sources + row)
    token = tl.load(tokens + row)
    if source >= 0:  # an id that could not be drawn is -1; its request ends, what its row holds does not matter
        token = tl.maximum(tl.load(last_ids + source), 0)
    token -= FIRST
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    seen = column < WIDTH
    here = seen & (token >= 0) & (token < LINES)
    values = tl.load(table + token.to(tl.int64) * WIDTH + column, mask=here, other=0.0)
    tl.store(out + row.to(tl.int64) * WIDTH + column, values.to(out.dtype.element_ty), mask=seen)


def embed(
    table: torch.Tensor, tokens: torch.Tensor, sources: torch.Tensor, last_ids: torch.Tensor, out: torch.Tensor, first: int = 0
) -> None:
    """out[row] = table[token - first], the token from `tokens`, or from `last_ids` where `sources` is not negative.

    Args:
        table: (lines, width), any float type; a token that has no line in it is zeros.
        tokens, sources: (rows,) int32; last_ids: (n,) int32.
        out: (rows, width), any float type.
    """
    lines, width = table.shape
    columns = min(BLOCK, triton.next_power_of_2(width))
    grid = (len(out), triton.cdiv(width, columns))
    _embed[grid](table, tokens, sources, last_ids, out, first, lines, width, columns, num_warps=4)


@triton.jit(do_not_specialize=["count"])
def _normalize(
    x, parts, weight, out, eps, count,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.release(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    at = row[:, None] * WIDTH + column[None, :]
    seen = (row < count)[:, None] & (column < WIDTH)[None, :]
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    pdl.wait(PDL)
    values = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        values += tl.load(parts + part * count * WIDTH + at, mask=seen, other=0.0).to(tl.float32)
    if PARTS:
        tl.store(x + at, values.to(x.dtype.element_ty), mask=seen)
    mean = tl.sum(values * values, axis=1) / WIDTH
    scaled = values / tl.sqrt(mean + eps)[:, None] * scale[None, :]
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=seen)


def normalize(x: torch.Tensor, parts: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """x += Σ parts, if there are any; out = x / sqrt(mean(x²) + eps) · weight, computed in float32.

    Args:
        x: (rows, width); parts: (n, rows, width) what linears leave for the residual, n at most 8.
        weight: (width,) float32.
        out: (rows, width).
    """
    rows, width = x.shape
    padded = triton.next_power_of_2(width)
    count = 0 if parts is None else len(parts)
    warps = 4 if padded <= 2048 else 8
    each = 32 if INTERPRETED else 1  # rows of a program; interpreted, programs run one after the other
    _normalize[(triton.cdiv(rows, each),)](
        x, x if parts is None else parts, weight, out, eps, rows, width, padded, count, each, num_warps=warps,
        **pdl.options(x.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _add(x, parts, count, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    seen, at = column < WIDTH, tl.program_id(0).to(tl.int64) * WIDTH + column
    values = tl.load(x + at, mask=seen).to(tl.float32)
    for part in tl.static_range(PARTS):
        values += tl.load(parts + part * count * WIDTH + at, mask=seen).to(tl.float32)
    tl.store(x + at, values.to(x.dtype.element_ty), mask=seen)


def add(x: torch.Tensor, parts: torch.Tensor) -> None:
    """x (rows, width) += Σ parts (n, rows, width)."""
    rows, width = x.shape
    columns = min(BLOCK, triton.next_power_of_2(width))
    _add[(rows, triton.cdiv(width, columns))](x, parts, rows, width, columns, len(parts), num_warps=4)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """float32 x -> its activation."""
    if ACTIVATION == "silu":
        y = x / (1 + tl.exp(-x))
    else:  # x/2 · (1 + tanh(z)) = x · sigmoid(2 z)
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1 + tl.exp(-2 * z))
    return y


@triton.jit
def _gate(src, out, SIZE: tl.constexpr, STRIDE: tl.constexpr, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    pdl.release(PDL)
    pdl.wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    seen = column < SIZE
    x = tl.load(src + row * STRIDE + column, mask=seen, other=0.0).to(tl.float32)
    up = tl.load(src + row * STRIDE + SIZE + column, mask=seen, other=0.0).to(tl.float32)
    y = activate(x, ACTIVATION)
    tl.store(out + row * SIZE + column, (y * up).to(out.dtype.element_ty), mask=seen)


ACTIVATIONS = ("silu", "gelu_tanh")


def gate(src: torch.Tensor, size: int, activation: str, out: torch.Tensor) -> None:
    """src (rows, at least 2 · size) -> out (rows, size): activation(first half) · second half, computed in float32."""
    columns = min(BLOCK, triton.next_power_of_2(size))
    grid = (len(out), triton.cdiv(size, columns))
    _gate[grid](src, out, size, src.stride(0), activation, columns, num_warps=4, **pdl.options(src.device))
