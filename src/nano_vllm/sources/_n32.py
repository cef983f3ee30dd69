"""The packed layout "n32", in which the CPU kernels read matrices: canonical planes into it and back, in NumPy.

native/matrix.h describes the layout and native/pack.cpp writes it; here is its definition for all who have no native module.
Outputs lie in blocks of 32, the last one padded; every block is one forward stream over the columns.
"""

from __future__ import annotations

import numpy as np

from ..formats import Tensor, TensorInfo

NAME = "n32"
BLOCK = 32  # outputs of a block
STEP = 32  # columns of a step of quants
SUPER = 256
HIGH = {"q4_k": 0, "q5_k": 1, "q6_k": 2}  # vectors of 64 bytes that a half step has above its nibbles
HALF = 2 * BLOCK  # bytes of 32 float16
FLIP = np.uint8(0x80)  # q8 is kept as q + 128
PLAIN = {"f32": ("<f4", 4), "f16": ("<f2", 2), "bf16": ("<u2", 2)}
FORMATS = (*PLAIN, "q8", "q4", *HIGH)


def block_bytes(info: TensorInfo) -> int:
    """Bytes of a block of 32 outputs of a matrix."""
    columns = info.shape[1]
    match info.format:
        case "f32" | "f16":
            return columns * BLOCK * PLAIN[info.format][1]
        case "bf16":
            return (columns + 1) // 2 * 2 * BLOCK * 2
        case "q8":
            return columns // STEP * (STEP * BLOCK + HALF)
        case "q4":
            return columns // info.group * (info.group // STEP * 512 + (2 if info.minimum else 1) * HALF)
    return columns // SUPER * (SUPER // STEP * _step_bytes(info.format) + _tail_bytes(info.format))


def nbytes(info: TensorInfo) -> int:
    """Bytes of a packed matrix (N, K)."""
    return block_bytes(info) * -(-info.shape[0] // BLOCK)


def pack(tensor: Tensor) -> np.ndarray:
    """A matrix's planes -> (blocks, bytes of a block) uint8."""
    info, planes = tensor.info, {name: _blocks(np.asarray(plane)) for name, plane in tensor.planes.items()}
    if info.format in PLAIN:
        packed = _pack_values(info, planes["values"])
    elif info.format in HIGH:
        packed = _pack_super(info, planes)
    else:
        vectors, flip = (8, FLIP) if info.format == "q8" else (4, np.uint8(0))
        parts = [_steps(planes["quants"].view(np.uint8) ^ flip, vectors, info.group), _halves(planes["scales"])]
        packed = np.concatenate(parts + ([_halves(planes["mins"])] if info.minimum else []), axis=-1)
    return packed.reshape(len(packed), -1)


def unpack(info: TensorInfo, packed: np.ndarray) -> Tensor:
    """The matrix `info` from its packed bytes, uint8 of any shape: exactly the planes that were packed."""
    blocks = packed.reshape(-(-info.shape[0] // BLOCK), -1)
    if info.format in PLAIN:
        planes = {"values": _unpack_values(info, blocks)}
    elif info.format in HIGH:
        planes = _unpack_super(info, blocks)
    else:
        vectors, flip = (8, FLIP) if info.format == "q8" else (4, np.uint8(0))
        groups = blocks.reshape(len(blocks), info.shape[1] // info.group, -1)
        cut = info.group // STEP * vectors * 128
        planes = {"quants": _unsteps(groups[..., :cut], vectors) ^ flip, "scales": _unhalves(groups[..., cut : cut + HALF])}
        if info.format == "q8":
            planes["quants"] = planes["quants"].view(np.int8)
        if info.minimum:
            planes["mins"] = _unhalves(groups[..., cut + HALF :])
    count = info.shape[0]
    return Tensor(info, {name: np.ascontiguousarray(plane[:count]) for name, plane in planes.items()})


def _step_bytes(format: str) -> int:
    return 512 + HIGH[format] * 128


def _tail_bytes(format: str) -> int:
    """Of a super-block's small scales and minima, d and dmin."""
    return 512 + HALF * (1 if format == "q6_k" else 2)


def _blocks(plane: np.ndarray) -> np.ndarray:
    """(N, …) -> (blocks, 32, …), missing outputs zeros."""
    count = len(plane)
    blocks = -(-count // BLOCK)
    if count % BLOCK:
        plane = np.concatenate([plane, np.zeros((blocks * BLOCK - count, *plane.shape[1:]), plane.dtype)])
    return plane.reshape(blocks, BLOCK, *plane.shape[1:])


def _steps(quants: np.ndarray, vectors: int, group: int) -> np.ndarray:
    """(B, 32, bytes of a row) -> (B, groups, bytes): per step two halves × `vectors` × 16 outputs × four bytes."""
    b, _, row = quants.shape
    each = vectors * 4  # bytes that a step has of a row
    steps = quants.reshape(b, 2, 16, row // each, vectors, 4).transpose(0, 3, 1, 4, 2, 5)
    per_group = group // STEP
    return steps.reshape(b, row // each // per_group, per_group * each * BLOCK)


def _unsteps(steps: np.ndarray, vectors: int) -> np.ndarray:
    """(B, groups, bytes) as `_steps` leaves them -> (B · 32, bytes of a row)."""
    b, groups, size = steps.shape
    count = groups * size // (vectors * 4 * BLOCK)
    return steps.reshape(b, count, 2, vectors, 16, 4).transpose(0, 2, 4, 1, 3, 5).reshape(b * BLOCK, -1)


def _halves(scales: np.ndarray) -> np.ndarray:
    """(B, 32, groups) float16 -> (B, groups, 64) uint8."""
    return np.ascontiguousarray(scales.transpose(0, 2, 1)).view(np.uint8)


def _unhalves(halves: np.ndarray) -> np.ndarray:
    """(B, groups, 64) uint8 -> (B · 32, groups) float16."""
    return np.ascontiguousarray(halves).view("<f2").transpose(0, 2, 1).reshape(-1, halves.shape[1])


def _small(scales: np.ndarray) -> np.ndarray:
    """(B, 32, K / group) one-byte scales, `count` to a super-block -> (B, super-blocks, count · 32) uint8."""
    b, _, small = scales.shape
    return scales.view(np.uint8).transpose(0, 2, 1).reshape(b, -1, small * BLOCK)


def _pack_super(info: TensorInfo, planes: dict[str, np.ndarray]) -> np.ndarray:
    b, supers = len(planes["quants"]), info.shape[1] // SUPER
    steps = _steps(planes["quants"], 4, STEP)  # (B, steps, 512)
    if HIGH[info.format]:
        steps = np.concatenate([steps, _steps(planes["high"], HIGH[info.format], STEP)], axis=-1)
    names = ("sub_scales",) if info.format == "q6_k" else ("sub_scales", "sub_mins")
    small = [_small(planes[name]).reshape(b, supers, -1) for name in names]
    wide = [_halves(planes[name]) for name in ("scales", "mins") if name in planes]
    return np.concatenate([steps.reshape(b, supers, -1), *small, *wide], axis=-1)


def _unpack_super(info: TensorInfo, blocks: np.ndarray) -> dict[str, np.ndarray]:
    b, supers, vectors = len(blocks), info.shape[1] // SUPER, HIGH[info.format]
    streams = blocks.reshape(b, supers, -1)
    cut = SUPER // STEP * _step_bytes(info.format)
    steps = streams[..., :cut].reshape(b, -1, _step_bytes(info.format))
    planes = {"quants": _unsteps(steps[..., :512], 4)}
    if vectors:
        planes["high"] = _unsteps(steps[..., 512:], vectors)
    names = ("sub_scales",) if info.format == "q6_k" else ("sub_scales", "sub_mins")
    count = 16 // len(names)  # small scales of a super-block
    for i, name in enumerate(names):
        small = streams[..., cut + i * count * BLOCK : cut + (i + 1) * count * BLOCK].reshape(b, supers * count, BLOCK)
        planes[name] = small.transpose(0, 2, 1).reshape(b * BLOCK, -1)
    for i, name in enumerate(("scales",) if info.format == "q6_k" else ("scales", "mins")):
        planes[name] = _unhalves(streams[..., cut + 512 + i * HALF : cut + 512 + (i + 1) * HALF])
    if info.format == "q6_k":
        planes["sub_scales"] = planes["sub_scales"].view(np.int8)
    return planes


def _pack_values(info: TensorInfo, values: np.ndarray) -> np.ndarray:
    if info.format == "bf16":  # pairs of columns in a word, the even one in its upper half
        if values.shape[2] % 2:
            values = np.concatenate([values, np.zeros((*values.shape[:2], 1), values.dtype)], axis=2)
        pairs = values.reshape(*values.shape[:2], -1, 2)[..., ::-1]
        return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).view(np.uint8)
    return np.ascontiguousarray(values.transpose(0, 2, 1)).view(np.uint8)


def _unpack_values(info: TensorInfo, blocks: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(blocks).view(PLAIN[info.format][0])
    if info.format == "bf16":
        pairs = values.reshape(len(blocks), -1, BLOCK, 2).transpose(0, 2, 1, 3)[..., ::-1]
        return pairs.reshape(len(blocks) * BLOCK, -1)[:, : info.shape[1]]
    return values.reshape(len(blocks), -1, BLOCK).transpose(0, 2, 1).reshape(len(blocks) * BLOCK, -1)
