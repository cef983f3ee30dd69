"""GGUF files: header and tensors. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.

Every count and length is checked against the bytes that are left before anything is allocated for it, and sizes are Python
ints, which do not wrap; so memory is bounded by the file's size. Any malformed file is a ModelFileError.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import ModelFileError, ModelNotFound, UnsupportedModel
from ..formats import Tensor, TensorInfo, describe
from . import _gguf_super
from ._gguf_reader import Reader, malformed

PIECE = 1 << 20  # weights unwoven at a time, so that a large tensor is not in memory twice
NAME_LIMIT = 65535  # bytes of a key
TENSOR_BYTES = 32  # least that an entry of the tensor directory takes
ENTRY_BYTES = 13  # least that a key with its value takes

PLAIN = {"F32": ("f32", "<f4"), "F16": ("f16", "<f2"), "BF16": ("bf16", "<u2")}
BLOCKS = {  # ggml's blocks of 32 weights: format, minimum, layout
    "Q8_0": ("q8", False, np.dtype([("scales", "<f2"), ("quants", "i1", 32)])),
    "Q4_0": ("q4", False, np.dtype([("scales", "<f2"), ("quants", "u1", 16)])),
    "Q4_1": ("q4", True, np.dtype([("scales", "<f2"), ("mins", "<f2"), ("quants", "u1", 16)])),
    # What llama.cpp puts into Q4_K_M files for rows that are no multiple of 256.
    "Q5_0": ("q8", False, np.dtype([("scales", "<f2"), ("high", "u1", 4), ("quants", "u1", 16)])),
}
SUPER = {"Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k"}  # super-blocks of 256 weights: format
SUPPORTED = (*PLAIN, *BLOCKS, *SUPER)
TYPES = dict(enumerate("F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS".split()))
TYPES |= dict(enumerate("IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16".split(), start=18))
TYPES |= {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}


@dataclass(frozen=True)
class GGUFTensor:
    """An entry of the tensor directory.

    Attributes:
        type: ggml's name of the type, one of SUPPORTED.
        shape: outermost first (the file has it innermost first).
        offset: bytes from the start of the file.
        nbytes: in the file; our planes take as many, of super-blocks up to three hundredths more, of Q5_0 17 for 11.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """All of a file but its tensors' data.

    Attributes:
        metadata: key -> int, float, bool, str, list[str], or a numpy array of numbers.
        size: of the file in bytes.
    """

    path: Path
    version: int
    metadata: dict[str, object]
    tensors: dict[str, GGUFTensor]
    size: int


def read_header(path: str | os.PathLike) -> GGUFHeader:
    """Metadata and tensor directory of a file, without its data.

    Raises:
        ModelNotFound: the file cannot be opened.
        ModelFileError: malformed or cut short.
        UnsupportedModel: big endian, or a tensor of a type that is not supported.
    """
    path = Path(path)
    try:
        file = open(path, "rb", buffering=0)
    except OSError as error:
        raise ModelNotFound(f"cannot open {path}", error.strerror or str(error), "Check the path and its permissions.") from None
    with file:
        reader = Reader(path, file)
        version, tensor_count, entry_count = _start(reader)
        metadata: dict[str, object] = {}
        for _ in range(entry_count):
            key = reader.string(NAME_LIMIT)
            if key in metadata:
                raise malformed(path, f"the key {key!r} is there twice")
            metadata[key] = reader.value(key)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise malformed(path, f"general.alignment is {alignment!r}, not a power of two")
        directory = _directory(reader, tensor_count)
        start = -(-reader.position // alignment) * alignment
        return GGUFHeader(path, version, metadata, _placed(reader, directory, start, alignment), reader.size)


def _start(reader: Reader) -> tuple[int, int, int]:
    """Version, number of tensors, number of metadata entries."""
    if reader.size < 24 or reader.take(4) != b"GGUF":
        raise malformed(reader.path, "it does not begin with the letters GGUF and a header")
    (version,) = reader.unpack("<I")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedModel(f"{reader.path} is big endian", f"its version reads {version:#x}", "Convert it to little endian.")
    if version not in (2, 3):
        raise malformed(reader.path, f"its version is {version}; 2 and 3 can be read")
    tensor_count, entry_count = reader.unpack("<QQ")
    left = reader.size - reader.position
    if tensor_count * TENSOR_BYTES + entry_count * ENTRY_BYTES > left:
        raise malformed(reader.path, f"it says {tensor_count} tensors and {entry_count} keys, but has {left} bytes left")
    return version, tensor_count, entry_count


def _directory(reader: Reader, count: int) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Name -> type, shape, offset from the start of the data; shapes are not yet held against the file's size."""
    found: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for _ in range(count):
        name = reader.string(NAME_LIMIT)
        if name in found:
            raise malformed(reader.path, f"the tensor {name!r} is there twice")
        (dimensions,) = reader.unpack("<I")
        if not 1 <= dimensions <= 4:
            raise malformed(reader.path, f"the tensor {name!r} has {dimensions} dimensions")
        shape = reader.unpack(f"<{dimensions}Q")[::-1]
        if 0 in shape:
            raise malformed(reader.path, f"the tensor {name!r} has the shape {shape}")
        number, offset = reader.unpack("<IQ")
        kind = TYPES.get(number, f"number {number}")
        if kind not in SUPPORTED:
            why = f"{reader.path.name} has the tensor {name!r} in it; supported are {', '.join(SUPPORTED)}"
            raise UnsupportedModel(f"tensor type {kind} is not supported", why, "Take the model's Q8_0, Q4_K_M or F16 file.")
        found[name] = (kind, shape, offset)
    return found


def _placed(reader: Reader, directory: dict, start: int, alignment: int) -> dict[str, GGUFTensor]:
    """The directory with absolute offsets; every tensor lies inside the file and none in another."""
    tensors = {}
    for name, (kind, shape, offset) in directory.items():
        size = math.prod(shape)
        columns, layout = _layout(kind)
        if shape[-1] % columns:
            why = f"the {kind} tensor {name!r} has rows of {shape[-1]}, not of whole blocks of {columns}"
            raise malformed(reader.path, why)
        nbytes = size // columns * layout.itemsize
        if offset % alignment:
            raise malformed(reader.path, f"the tensor {name!r} is not aligned to {alignment} bytes")
        if start + offset + nbytes > reader.size:
            why = f"the tensor {name!r} ends at byte {start + offset + nbytes}, the file at {reader.size}: it was cut short"
            raise malformed(reader.path, why)
        tensors[name] = GGUFTensor(name, kind, shape, start + offset, nbytes)
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < end:
            raise malformed(reader.path, f"the tensors {before!r} and {tensor.name!r} overlap")
        end, before = tensor.offset + tensor.nbytes, tensor.name
    return tensors


def _layout(kind: str) -> tuple[int, np.dtype]:
    """Weights in a block of a type, and how it lies in the file."""
    if kind in SUPER:
        return 256, _gguf_super.LAYOUTS[kind]
    return (32, BLOCKS[kind][2]) if kind in BLOCKS else (1, np.dtype(PLAIN[kind][1]))


def info(tensor: GGUFTensor, name: str) -> TensorInfo:
    """What its planes will be, under our name for it."""
    if tensor.type in PLAIN:
        return describe(name, tensor.shape, PLAIN[tensor.type][0])
    if tensor.type in SUPER:
        return describe(name, tensor.shape, SUPER[tensor.type], 256)
    format, minimum, _ = BLOCKS[tensor.type]
    return describe(name, tensor.shape, format, 32, minimum)


def read(file: BinaryIO, tensor: GGUFTensor, name: str) -> Tensor:
    """The tensor's planes, read from `file` (opened unbuffered); bits are moved, never converted, but Q5_0 widened to bytes."""
    file.seek(tensor.offset)
    if tensor.type in PLAIN:
        return Tensor(info(tensor, name), {"values": fill(file, np.empty(tensor.shape, PLAIN[tensor.type][1]), tensor.name)})
    columns, layout = _layout(tensor.type)
    count, some = tensor.nbytes // layout.itemsize, PIECE // columns
    planes: dict[str, np.ndarray] = {}
    for first in range(0, count, some):
        blocks = fill(file, np.empty(min(some, count - first), layout), tensor.name)
        for field, part in _unwoven(tensor.type, blocks).items():
            if not first:
                planes[field] = np.empty((count, *part.shape[1:]), part.dtype)
            planes[field][first : first + len(part)] = part
    return Tensor(info(tensor, name), {field: plane.reshape(*tensor.shape[:-1], -1) for field, plane in planes.items()})


def lines(file: BinaryIO, tensor: GGUFTensor, name: str, first: int, count: int) -> Tensor:
    """Rows `first` to `first` + count of a tensor; only they are read."""
    return read(file, rows_of(tensor, first, count), name)


def rows_of(entry, first: int, count: int):
    """The entry of some rows of a tensor whose rows lie one after the other."""
    row = entry.nbytes // entry.shape[0]
    return replace(entry, shape=(count, *entry.shape[1:]), offset=entry.offset + first * row, nbytes=count * row)


def _unwoven(kind: str, blocks: np.ndarray) -> dict[str, np.ndarray]:
    """(n,) blocks as they lie in the file -> plane -> (n, numbers of a block) or (n,)."""
    if kind in SUPER:
        return _gguf_super.unwoven(kind, blocks)
    if kind == "Q5_0":  # column c has bit c of `high` above its nibble, and counts from −16
        low = np.concatenate((blocks["quants"] & 15, blocks["quants"] >> 4), axis=1)
        high = np.unpackbits(blocks["high"], axis=1, bitorder="little") << 4
        return {"scales": blocks["scales"], "quants": (low | high).astype(np.int8) - np.int8(16)}
    return {field: blocks[field] for field in blocks.dtype.names}


def fill(file: BinaryIO, values: np.ndarray, name: str) -> np.ndarray:
    """Reads the next bytes of `file` into `values`. ModelFileError naming the tensor when they end early."""
    view = memoryview(values.reshape(-1).view(np.uint8))
    while len(view):
        count = file.readinto(view)
        if not count:
            raise ModelFileError(
                f"the tensor {name!r} is cut short", f"{file.name} ended {len(view)} bytes early", "Fetch it again."
            )
        view = view[count:]
    return values
