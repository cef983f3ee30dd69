"""Safetensors folders as Hugging Face publishes them: one file, or shards with an index.

Layout: https://huggingface.co/docs/safetensors/index#format. Only headers are read until a tensor is asked for.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import ModelFileError, UnsupportedModel
from ..formats import Tensor, TensorInfo, describe
from .gguf import fill, rows_of

HEADER_LIMIT = 100_000_000  # bytes, the format's own
FORMATS = {"F32": ("f32", "<f4"), "F16": ("f16", "<f2"), "BF16": ("bf16", "<u2")}
ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2}
ITEM_BYTES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """An entry of a file's header.

    Attributes:
        dtype: safetensors' name of the type.
        offset: bytes from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path


def malformed(path: Path, why: str) -> ModelFileError:
    return ModelFileError(f"{path} is not a sound file", why, "Fetch it again.")


def read_json(path: Path) -> dict:
    """A JSON object from a file; keys that are there twice are refused."""
    try:
        return parse(path, path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"cannot read {path}", error.strerror or str(error), "Check that the folder is complete.") from None


def parse(path: Path, text: bytes) -> dict:
    def unique(pairs: list[tuple[str, object]]) -> dict:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise malformed(path, f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
        return found

    try:
        content = json.loads(text, object_pairs_hook=unique)
    except ModelFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise malformed(path, f"it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise malformed(path, "it is not a JSON object")
    return content


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Name -> where it lies. ModelFileError where an entry lies outside the file, in another, or does not fit its shape."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise malformed(path, f"its header has {length} bytes, the file {size}: it was cut short or is none")
            header = parse(path, file.read(length))
    except OSError as error:
        raise ModelFileError(f"cannot read {path}", error.strerror or str(error), "Check that the folder is complete.") from None
    header.pop("__metadata__", None)
    found = {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}
    end, before = 0, ""
    for tensor in sorted(found.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset < end:
            raise malformed(path, f"the tensors {before!r} and {tensor.name!r} overlap")
        end, before = tensor.offset + tensor.nbytes, tensor.name
    return found


def _entry(path: Path, name: str, entry: object, start: int, size: int) -> StoredTensor:
    def counts(key: str, length: int | None) -> tuple[int, ...]:
        values = entry.get(key) if isinstance(entry, dict) else None
        if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values) or length not in (None, len(values)):
            raise malformed(path, f"the tensor {name!r} has no sound {key!r}")
        return tuple(values)

    shape, (first, last) = counts("shape", None), counts("data_offsets", 2)
    dtype = str(entry.get("dtype"))
    if last > size - start:
        raise malformed(path, f"the tensor {name!r} ends at byte {start + last}, the file at {size}: it was cut short")
    if first > last or (dtype in ITEM_BYTES and last - first != math.prod(shape) * ITEM_BYTES[dtype]):
        raise malformed(path, f"the tensor {name!r} of shape {shape} and type {dtype} cannot have {last - first} bytes")
    return StoredTensor(name, dtype, shape, start + first, last - first, path)


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's model. Only files that the index names are opened, and all of them must be there.

    Raises:
        ModelFileError: no model file, a shard is missing, lacks a tensor that the index says it has, or has another's.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        there = sorted(p.name for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".gguf"))
        why = f"neither {SINGLE} nor {INDEX} is there" + (f"; there are {', '.join(there[:5])}" if there else "")
        raise ModelFileError(f"{folder} has no model", why, "Fetch it again, with all its files, as safetensors.")
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise malformed(folder / INDEX, "it has no 'weight_map'")
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(map(str, index.values()))):
        if Path(shard).name != shard:
            raise malformed(folder / INDEX, f"it names the file {shard!r}, which is not in the folder")
        named = [name for name, where in index.items() if where == shard]
        if not (folder / shard).is_file():
            why = f"the index says it has the tensor {named[0]!r} and {len(named) - 1} more"
            raise ModelFileError(f"{folder / shard} is missing", why, "Fetch it again.")
        tensors = read_header(folder / shard)
        for name in named:
            if name not in tensors:
                raise malformed(folder / shard, f"the index says that it has the tensor {name!r}, and it has not")
        for name in tensors:
            if name in found:
                raise malformed(folder / shard, f"the tensor {name!r} is in {found[name].path.name}, too")
        found |= tensors
    return found


def info(tensor: StoredTensor, name: str) -> TensorInfo:
    """What its planes will be, under our name for it. UnsupportedModel for a type without a format."""
    if tensor.dtype not in FORMATS:
        why = f"the tensor {tensor.name!r} in {tensor.path.name} has it; supported are {', '.join(FORMATS)}"
        raise UnsupportedModel(f"tensor type {tensor.dtype} is not supported", why)
    return describe(name, tensor.shape, FORMATS[tensor.dtype][0])


def read(file: BinaryIO, tensor: StoredTensor, name: str) -> Tensor:
    """The tensor's plane, read from `file` (its file, opened unbuffered) as it is."""
    file.seek(tensor.offset)
    values = np.empty(tensor.shape, FORMATS[tensor.dtype][1])
    return Tensor(info(tensor, name), {"values": fill(file, values, tensor.name)})


def lines(file: BinaryIO, tensor: StoredTensor, name: str, first: int, count: int) -> Tensor:
    """Rows `first` to `first` + count of a tensor; only they are read."""
    return read(file, rows_of(tensor, first, count), name)
