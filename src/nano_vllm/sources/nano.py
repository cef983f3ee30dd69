"""`.nano` files: the project's own, whose matrices lie as the CPU kernels read them, so that opening one is mapping it.

docs/nano-format.md describes them. The header is bounded by the file's size before it is read, and has a checksum; tensors have
one each, which `verify` compares. Any malformed file is a ModelFileError.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import ModelFileError, ModelNotFound, OptionError, UnsupportedModel
from ..formats import Tensor, TensorInfo, describe
from . import _n32
from .gguf import fill
from .safetensors import parse

MAGIC = b"NANO\r\n\x1a\n"  # a transfer that changes line ends changes it
VERSION = 1
HEAD = struct.Struct("<8sIIQQ16s")  # magic, version, zero, where the header begins, its bytes, its checksum
HEAD_BYTES = 64
ALIGN, LARGE, LARGE_ALIGN = 64, 1 << 16, 4096  # bytes: of small tensors, what is no more small, and its boundary
HEADER_LIMIT = 100_000_000  # bytes
PIECE = 1 << 20
METADATA = "metadata.json"


@dataclass(frozen=True)
class NanoTensor:
    """An entry of the header.

    Attributes:
        shape: (N,), stored as float32, or (N, K), packed.
        offset: bytes from the start of the file.
        nbytes: in the file, outputs padded to whole blocks of 32.
        digest: of the bytes in the file.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    group: int
    minimum: bool
    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Part:
    """A text file inside the file."""

    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True)
class NanoHeader:
    """All of a file but its tensors' data.

    Attributes:
        config: as in config.json.
        parts: name -> where it lies: tokenizer.json and what belongs to it, or the metadata of a GGUF file.
        report: how the file was made, and what it measured.
        size: of the file in bytes.
    """

    path: Path
    config: dict
    generation_config: dict
    tensors: dict[str, NanoTensor]
    parts: dict[str, Part]
    report: dict
    size: int

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def hash(self) -> str:
        """Of the model: config, names, formats and checksums of all tensors. Other weights have another hash."""
        entries = [(t.name, t.format, t.shape, t.group, t.minimum, t.digest) for t in self.tensors.values()]
        return digest(json.dumps([self.config, sorted(entries)], sort_keys=True).encode())

    def read(self, name: str) -> bytes | None:
        """A text file's content; None where the file has none of that name. ModelFileError where it is damaged."""
        part = self.parts.get(name)
        if part is None:
            return None
        with open(self.path, "rb", buffering=0) as file:
            file.seek(part.offset)
            content = fill(file, np.empty(part.nbytes, np.uint8), name).tobytes()
        if digest(content) != part.digest:
            raise malformed(self.path, f"the checksum of its {name} is wrong")
        return content

    def metadata(self) -> dict | None:
        """A GGUF file's metadata, lists as Python's; None of a model that came from a folder."""
        content = self.read(METADATA)
        return None if content is None else parse(self.path, content)


def digest(content: bytes | np.ndarray) -> str:
    """BLAKE2b of 16 bytes, as hexadecimal. About 1 GB/s, which no disk that it waits for exceeds by much; unlike a CRC it also
    tells models apart, and unlike SHA-256 it is as fast on processors without instructions for it."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def malformed(path: Path, why: str) -> ModelFileError:
    return ModelFileError(f"{path} is not a sound .nano file", why, "Convert or fetch it again.")


def is_nano(path: Path) -> bool:
    """Whether a file begins as one of this kind. False where it cannot be read: other sources say why."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: str | os.PathLike) -> NanoHeader:
    """Config, names and places of all that is in a file.

    Raises:
        ModelNotFound: the file cannot be opened.
        ModelFileError: malformed, damaged in its header, or cut short.
        UnsupportedModel: written by a newer version, or in another layout.
    """
    path = Path(path)
    try:
        file = open(path, "rb", buffering=0)
    except OSError as error:
        raise ModelNotFound(f"cannot open {path}", error.strerror or str(error), "Check the path and its permissions.") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        start, text = _header(path, file, size)
    header = parse(path, text)
    if header.get("layout") != _n32.NAME:
        raise UnsupportedModel(f"{path} is packed in the layout {header.get('layout')!r}", f"this version reads {_n32.NAME!r}")

    def object_of(key: str) -> dict:
        if not isinstance(header.get(key), dict):
            raise malformed(path, f"its header has no {key!r}")
        return header[key]

    tensors = {name: _tensor(path, name, entry) for name, entry in object_of("tensors").items()}
    parts = {name: Part(**_place(path, name, entry)) for name, entry in object_of("parts").items()}
    _check_places(path, [*tensors.items(), *parts.items()], start)
    config, generation_config, report = (object_of(key) for key in ("config", "generation_config", "report"))
    return NanoHeader(path, config, generation_config, tensors, parts, report, size)


def _header(path: Path, file: BinaryIO, size: int) -> tuple[int, bytes]:
    """Where the header begins, which is where tensors and texts end, and its bytes, whose checksum is right."""
    if size < HEAD_BYTES:
        raise malformed(path, f"it has {size} bytes, and its head alone {HEAD_BYTES}")
    magic, version, _, start, length, checksum = HEAD.unpack(fill(file, np.empty(HEAD.size, np.uint8), "head").tobytes())
    if magic != MAGIC:
        raise malformed(path, "it does not begin as one")
    if version != VERSION:
        why = f"it is of version {version}; this nano-vllm reads version {VERSION}"
        raise UnsupportedModel(f"{path} cannot be read", why, "Update nano-vllm, or convert the model again.")
    if start < HEAD_BYTES or length > HEADER_LIMIT or start + length > size:
        raise malformed(path, f"its header would end at byte {start + length:,}, the file has {size:,}: it was cut short")
    file.seek(start)
    text = fill(file, np.empty(length, np.uint8), "header").tobytes()
    if hashlib.blake2b(text, digest_size=16).digest() != checksum:
        raise malformed(path, "the checksum of its header is wrong")
    return start, text


def _place(path: Path, name: str, entry: object) -> dict:
    """offset, nbytes and digest of an entry."""
    numbers = [entry.get(key) if isinstance(entry, dict) else None for key in ("offset", "nbytes")]
    if any(type(n) is not int or n < 0 for n in numbers) or not isinstance(entry.get("blake2b"), str):
        raise malformed(path, f"the header does not say where {name!r} lies")
    return {"offset": numbers[0], "nbytes": numbers[1], "digest": entry["blake2b"]}


def _tensor(path: Path, name: str, entry: object) -> NanoTensor:
    place = _place(path, name, entry)
    shape, format, group, minimum = (entry.get(key) for key in ("shape", "format", "group", "minimum"))
    sound = isinstance(shape, list) and len(shape) in (1, 2) and all(type(n) is int and n > 0 for n in shape)
    if not sound or format not in (_n32.FORMATS if len(shape) == 2 else ("f32",)):
        raise malformed(path, f"the tensor {name!r} has the shape {shape!r:.60} and the format {format!r:.20}")
    if type(group) is not int or type(minimum) is not bool or (minimum and format != "q4"):
        raise malformed(path, f"the tensor {name!r} does not say its groups")
    tensor = NanoTensor(name, format, tuple(shape), group, minimum, **place)
    try:
        expected = stored_bytes(info(tensor, name))
    except OptionError as error:
        raise malformed(path, f"{error.what}: {error.why}") from None
    if tensor.nbytes != expected:
        raise malformed(path, f"the tensor {name!r} of shape {shape} has {expected:,} bytes, not {tensor.nbytes:,}")
    return tensor


def _check_places(path: Path, entries: list[tuple[str, NanoTensor | Part]], start: int) -> None:
    """Everything is aligned, lies before the header, and nothing in anything else."""
    end, before = HEAD_BYTES, "the head"
    for name, entry in sorted(entries, key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset % boundary(entry.nbytes):
            raise malformed(path, f"{name!r} does not begin at a multiple of {boundary(entry.nbytes)}")
        if entry.offset < end:
            raise malformed(path, f"{before!r} and {name!r} overlap")
        end, before = entry.offset + entry.nbytes, name
    if end > start:
        raise malformed(path, f"{before!r} ends at byte {end:,}, and the header begins at {start:,}")


def boundary(nbytes: int) -> int:
    """What the offset of so many bytes is a multiple of. Large ones begin a sector, so that they can be read past the cache."""
    return LARGE_ALIGN if nbytes >= LARGE else ALIGN


def stored_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor in the file."""
    return _n32.nbytes(info) if len(info.shape) == 2 else 4 * math.prod(info.shape)


def info(tensor: NanoTensor, name: str) -> TensorInfo:
    """What its planes will be."""
    return describe(name, tensor.shape, tensor.format, tensor.group, tensor.minimum)


def read(file: BinaryIO, tensor: NanoTensor, name: str) -> Tensor:
    """The tensor's planes, read from `file` (opened unbuffered) and taken out of their packing: no number changes."""
    file.seek(tensor.offset)
    if len(tensor.shape) == 1:
        return Tensor(info(tensor, name), {"values": fill(file, np.empty(tensor.shape, "<f4"), tensor.name)})
    return _n32.unpack(info(tensor, name), fill(file, np.empty(tensor.nbytes, np.uint8), tensor.name))


def lines(file: BinaryIO, tensor: NanoTensor, name: str, first: int, count: int) -> Tensor:
    """Rows `first` to `first` + count of a tensor; of a matrix whole blocks are read."""
    if len(tensor.shape) == 1:
        part = replace(tensor, shape=(count,), offset=tensor.offset + 4 * first, nbytes=4 * count)
        return read(file, part, name)
    begin = first // _n32.BLOCK * _n32.BLOCK
    rows = min(-(-(first + count) // _n32.BLOCK) * _n32.BLOCK, tensor.shape[0]) - begin
    block = _n32.block_bytes(info(tensor, name))
    offset, nbytes = tensor.offset + begin // _n32.BLOCK * block, -(-rows // _n32.BLOCK) * block
    whole = read(file, replace(tensor, shape=(rows, tensor.shape[1]), offset=offset, nbytes=nbytes), name)
    planes = {plane: values[first - begin : first - begin + count] for plane, values in whole.planes.items()}
    return Tensor(info(replace(tensor, shape=(count, tensor.shape[1])), name), planes)


def verify(header: NanoHeader) -> None:
    """Reads every byte and compares checksums. ModelFileError naming what is damaged."""
    with open(header.path, "rb", buffering=0) as file:
        for name, entry in (*header.tensors.items(), *header.parts.items()):
            if digest_of(file, entry.offset, entry.nbytes, name) != entry.digest:
                raise malformed(header.path, f"the checksum of {name!r} is wrong")


def digest_of(file: BinaryIO, offset: int, nbytes: int, name: str) -> str:
    """Of bytes in a file, read a piece at a time."""
    total, buffer = hashlib.blake2b(digest_size=16), np.empty(PIECE, np.uint8)
    file.seek(offset)
    for first in range(0, nbytes, PIECE):
        total.update(fill(file, buffer[: min(PIECE, nbytes - first)], name))
    return total.hexdigest()
