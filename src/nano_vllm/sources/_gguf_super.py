"""ggml's super-blocks of 256 weights (Q4_K, Q5_K, Q6_K; layout in ggml-common.h) -> the planes of formats/. Bits are moved, never
converted; scales of six bits become bytes."""

from __future__ import annotations

import numpy as np

LAYOUTS = {
    "Q4_K": np.dtype([("scales", "<f2"), ("mins", "<f2"), ("small", "u1", 12), ("quants", "u1", 128)]),
    "Q5_K": np.dtype([("scales", "<f2"), ("mins", "<f2"), ("small", "u1", 12), ("high", "u1", 32), ("quants", "u1", 128)]),
    "Q6_K": np.dtype([("quants", "u1", 128), ("high", "u1", 64), ("sub_scales", "i1", 16), ("scales", "<f2")]),
}


def unwoven(kind: str, blocks: np.ndarray) -> dict[str, np.ndarray]:
    """(n,) super-blocks of LAYOUTS[kind] -> plane -> (n, numbers of a super-block) or, of float16, (n,)."""
    planes = {"scales": blocks["scales"]}
    if kind == "Q6_K":
        halves = blocks["quants"].reshape(-1, 2, 2, 2, 16)  # 128 columns each, of which two times 32 bytes
        planes |= {"sub_scales": blocks["sub_scales"], "high": _pairs(blocks["high"])}
        return planes | {"quants": _nibbles(halves).swapaxes(2, 3).reshape(-1, 128)}
    planes["mins"] = blocks["mins"]
    planes["sub_scales"], planes["sub_mins"] = _six_bits(blocks["small"])
    if kind == "Q5_K":
        planes["high"] = _bits(blocks["high"])
    return planes | {"quants": _nibbles(blocks["quants"].reshape(-1, 4, 2, 16)).reshape(-1, 128)}


def _nibbles(pairs: np.ndarray) -> np.ndarray:
    """(…, 2, 16): 32 bytes, of which the low nibbles are 32 columns and the high ones are 32 others -> (…, 2, 16): of the first
    columns and of the others, byte j with columns j and j + 16."""
    first, second = pairs[..., 0, :], pairs[..., 1, :]
    return np.stack(((first & 15) | (second << 4), (first >> 4) | (second & 240)), axis=-2)


def _six_bits(small: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, 12): eight scales and eight minima. Those of groups 0 to 3 are the lower six bits of bytes 0 to 7; of groups 4 to 7
    the lower four bits lie in bytes 8 to 11 and the upper two above the others."""
    scales, mins, both = small[:, :4], small[:, 4:8], small[:, 8:]
    return (
        np.concatenate((scales & 63, (both & 15) | (scales >> 6 << 4)), axis=1),
        np.concatenate((mins & 63, (both >> 4) | (mins >> 6 << 4)), axis=1),
    )


def _bits(high: np.ndarray) -> np.ndarray:
    """(n, 32): bit g of byte c is of column c of group g -> (n, 32): of group g byte j has in bit i column 4·i + j."""
    square = np.ascontiguousarray(high.reshape(-1, 8, 4).swapaxes(1, 2)).view("<u8")  # per j, byte i and bit g
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        square = _swapped(square, shift, mask)
    return square.view(np.uint8).reshape(-1, 4, 8).swapaxes(1, 2).reshape(-1, 32)


def _pairs(high: np.ndarray) -> np.ndarray:
    """(n, 64): per 128 columns, bits 2·g and 2·g + 1 of byte c are of column c of group g -> (n, 64): of group g byte 4·v + j
    has in bits 2·i and 2·i + 1 column 16·v + 4·i + j."""
    square = np.ascontiguousarray(high.reshape(-1, 2, 2, 4, 4).swapaxes(3, 4)).view("<u4")  # per v and j, byte i and pair g
    for shift, mask in ((6, 0x00CC00CC), (12, 0x0000F0F0)):
        square = _swapped(square, shift, mask)
    return square.view(np.uint8).reshape(-1, 2, 2, 4, 4).transpose(0, 1, 4, 2, 3).reshape(-1, 64)


def _swapped(words: np.ndarray, shift: int, mask: int) -> np.ndarray:
    """Bits under the mask change places with those `shift` above them: one step of transposing a square of bits."""
    differ = (words ^ (words >> shift)) & words.dtype.type(mask)
    return words ^ differ ^ (differ << shift)
