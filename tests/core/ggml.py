"""Planes woven into ggml's blocks, so that files can be written in types that the gguf package only reads."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from nano_vllm import formats

SUPER = {Type.Q4_K: "q4_k", Type.Q5_K: "q5_k", Type.Q6_K: "q6_k"}


def quantize(values: np.ndarray, kind: Type) -> np.ndarray:
    """float32 (…, K) -> ggml's bytes (…, bytes of a row): the package's rounding where it has one, else ours."""
    return super_blocks(formats.pack("w", values, SUPER[kind])) if kind in SUPER else gguf.quantize(values, kind)


def super_blocks(tensor: formats.Tensor) -> np.ndarray:
    """A tensor of q4_k, q5_k or q6_k as the blocks that ggml-common.h describes."""
    planes, shape = tensor.planes, tensor.info.shape
    quants = numbers(planes)
    parts = {name: plane.reshape(len(quants), -1).view(np.uint8) for name, plane in planes.items()}
    if tensor.info.format == "q6_k":
        low = (quants & 15).reshape(-1, 2, 2, 64)  # of 128 columns, the first 64 in the low nibbles
        high = (quants >> 4).reshape(-1, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        woven = [low[:, :, 0] | low[:, :, 1] << 4, np.bitwise_or.reduce(high, axis=2), parts["sub_scales"], parts["scales"]]
    else:
        low = (quants & 15).reshape(-1, 4, 2, 32)
        high = (quants >> 4).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
        woven = [parts["scales"], parts["mins"], six_bits(parts["sub_scales"], parts["sub_mins"])]
        woven += [np.bitwise_or.reduce(high, axis=1)] if tensor.info.format == "q5_k" else []
        woven += [low[:, :, 0] | low[:, :, 1] << 4]
    return np.concatenate([part.reshape(len(quants), -1) for part in woven], axis=1).reshape(*shape[:-1], -1)


def numbers(planes: dict[str, np.ndarray]) -> np.ndarray:
    """(super-blocks, 256) uint8, one column after the other by what formats/ says of `quants` and `high`."""
    quants = planes["quants"].reshape(-1, 128)
    out = np.empty((len(quants), 256), np.uint8)
    bits = 8 * planes["high"].size // planes["quants"].size // 2 if "high" in planes else 0
    high = planes["high"].reshape(len(quants), -1) if bits else None
    for column in range(256):
        group, c = column // 32, column % 32
        out[:, column] = quants[:, 16 * group + c % 16] >> (4 * (c // 16)) & 15
        if bits:
            each = 32 // bits  # columns that four bytes reach
            byte = 4 * bits * group + c // each * 4 + c % 4
            out[:, column] |= (high[:, byte] >> (c % each // 4 * bits) & ((1 << bits) - 1)) << 4
    return out


def six_bits(scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    """Eight scales and eight minima below 64 -> twelve bytes."""
    first = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, mins)]
    return np.concatenate([*first, scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4], axis=1)
