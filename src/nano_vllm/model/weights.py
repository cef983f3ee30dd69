"""Open a model by path: canonical names to tensors, each read when asked for.

Only headers are read at first, and they must account for every parameter of the spec exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

import numpy as np

from ..errors import ModelFileError, ModelNotFound, NanoVLLMError
from ..formats import Tensor, reorder
from ..sources import nano
from ..text.files import Files
from .found import Entry, find, source
from .spec import Model, parameters

SIZES = ("vocab_size", "hidden_size", "head_dim", "intermediate_size", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Place:
    """Where a tensor lies as the CPU kernels read it: a vector as float32, a matrix packed as native/matrix.h says (n32).

    Attributes:
        offset: bytes from the start of the file; a multiple of 64, from 64 KiB on of 4096.
        nbytes: of the packed tensor, the padding of its last block included.
    """

    path: Path
    offset: int
    nbytes: int


class Weights(Mapping[str, Tensor]):
    """Canonical name -> tensor. Nothing is kept: each look-up reads from the file.

    Attributes:
        infos: canonical name -> what the header says of it.
    """

    def __init__(self, entries: dict[str, Entry], path: Path, orders: dict[str, np.ndarray]) -> None:
        self._entries, self._path, self._orders = entries, path, orders
        self._files: dict[Path, BinaryIO] = {}
        self.infos = {name: source(entry).info(entry, name) for name, entry in entries.items()}

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = source(entry).read(self._file(entry), entry, name)
        return reorder(tensor, self._orders[name]) if name in self._orders else tensor

    def lines(self, name: str, first: int, count: int) -> Tensor:
        """Rows `first` to `first` + count of a tensor; only they are read. Where heads are put in order, whole heads."""
        entry = self._entries[name]
        tensor = source(entry).lines(self._file(entry), entry, name, first, count)
        return reorder(tensor, self._orders[name][first : first + count] - first) if name in self._orders else tensor

    def place(self, name: str) -> Place | None:
        """Where a tensor can be mapped or streamed from as it is; None where its source keeps it in another way."""
        entry = self._entries[name]
        return Place(self._path, entry.offset, entry.nbytes) if isinstance(entry, nano.NanoTensor) else None

    def _file(self, entry: Entry) -> BinaryIO:
        path = getattr(entry, "path", self._path)
        if path not in self._files:
            self._files[path] = open(path, "rb", buffering=0)
        return self._files[path]

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_files": {}}  # another process opens its own

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


@dataclass(frozen=True)
class OpenedModel:
    """A model whose headers are read and checked.

    Attributes:
        config: as in config.json; from a GGUF file's metadata in the same spelling.
        generation_config: of the folder; empty without one.
        metadata: of a GGUF file, also where a .nano file carries it; else None.
        path: the folder or file.
        files: what reads the tokenizer's files where there is no metadata.
    """

    spec: Model
    config: dict
    weights: Weights
    generation_config: dict
    metadata: dict | None
    path: Path
    files: Files | None = None

    def tokenizer(self):
        """The model's own `text.tokenizer.Tokenizer`."""
        from ..text.tokenizer import Tokenizer

        return Tokenizer.from_files(self.files) if self.metadata is None else Tokenizer.from_gguf(self.metadata)

    def close(self) -> None:
        self.weights.close()


def open_model(path: str | Path) -> OpenedModel:
    """Opens a .nano or .gguf file, or a folder with config.json and safetensors. No tensor is read, but both of a pair that may
    be one.

    Raises:
        ModelNotFound: there is nothing at `path`.
        ModelFileError: malformed, cut short, or a parameter is missing, doubled or of a wrong shape.
        UnsupportedModel: its architecture, a tensor's type or a setting is not supported.
    """
    path = Path(path)
    if not path.is_dir() and not path.is_file():
        raise ModelNotFound(f"there is no model at {path}", "the path does not exist", "Check it for a slip.")
    found = find(path)
    spec = _describe(path, found.module, found.config, found.tensors)
    spec, entries = _fill(path, spec, _renamed(path, found.tensors, found.rename))
    weights = Weights(entries, path, _orders(spec) if found.interleaved else {})
    return OpenedModel(spec, found.config, weights, found.generation_config, found.metadata, path, found.files)


def _describe(path: Path, module: ModuleType, config: dict, found: Mapping[str, Entry]) -> Model:
    """The spec; a size that no tensor of the file has is refused before anything is built from it."""
    largest = max((size for entry in found.values() for size in entry.shape), default=0)
    for key, limit in (*((key, largest) for key in SIZES), ("num_hidden_layers", len(found))):
        if isinstance(config.get(key), int) and config[key] > limit:
            raise ModelFileError(
                f"{path} does not have what its config says", f"{key} is {config[key]}, the tensors go to {limit}"
            )
    try:
        return module.describe(config)
    except NanoVLLMError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ModelFileError(f"the config of {path} has a setting that is missing or cannot be meant", why) from None


def _renamed(path: Path, found: Mapping[str, Entry], rename: Callable[[str], str | None]) -> dict[str, Entry]:
    """Canonical name -> entry; names that are not known, and two names for one parameter, are refused."""
    entries: dict[str, Entry] = {}
    for theirs, entry in found.items():
        try:
            name = rename(theirs)
        except KeyError:
            why = "leaving it out would change what the model says"
            raise ModelFileError(f"{path} has the tensor {theirs!r}, which its architecture does not know", why) from None
        if name in entries:
            raise ModelFileError(f"{path} fills {name!r} twice", f"with {entries[name].name!r} and {theirs!r}")
        if name is not None:
            entries[name] = entry
    return entries


def _fill(path: Path, spec: Model, entries: dict[str, Entry]) -> tuple[Model, dict[str, Entry]]:
    """The spec with its head settled, and its parameters in order, each with the one entry that fills it."""
    spec, entries = _settle_head(path, spec, entries)
    shapes = parameters(spec)
    for name, entry in entries.items():
        if name not in shapes:
            raise ModelFileError(
                f"{path} has the tensor {entry.name!r}, which its config has no place for", f"it would be {name!r}"
            )
        if entry.shape != shapes[name]:
            raise ModelFileError(f"the tensor {entry.name!r} of {path} has a wrong shape", f"{entry.shape}, not {shapes[name]}")
    for name in shapes:
        if name not in entries:
            raise ModelFileError(
                f"{path} has no tensor for {name!r}", f"{len(entries)} of {len(shapes)} are there", "Fetch it again."
            )
    return spec, {name: entries[name] for name in shapes}


def _settle_head(path: Path, spec: Model, entries: dict[str, Entry]) -> tuple[Model, dict[str, Entry]]:
    """Tied or not, as transformers decides it: by the config, unless the file has two different tensors.

    | config | embedding and head | only the embedding | only the head |
    |---|---|---|---|
    | tied | equal: one is dropped; different: not tied | it is both | it is both |
    | not tied | both | ModelFileError | ModelFileError |

    The last line is ours: transformers would go on with random numbers.
    """
    there = {name for name in ("embedding", "head") if name in entries}
    if spec.tied and there == {"embedding", "head"}:
        if not _equal(path, entries["embedding"], entries["head"]):
            return replace(spec, tied=False), entries
        return spec, {name: entry for name, entry in entries.items() if name != "head"}
    if spec.tied and there == {"head"}:
        return spec, {"embedding" if name == "head" else name: entry for name, entry in entries.items()}
    if not spec.tied and len(there) == 1:
        (name,) = {"embedding", "head"} - there
        why = f"the config says that embedding and head are not tied, and {entries[there.pop()].name!r} is there alone"
        mend = 'If the model ties them, set "tie_word_embeddings": true in its config.json; else fetch it again.'
        raise ModelFileError(f"{path} has no tensor for {name!r}", why, mend)
    return spec, entries


def _equal(path: Path, one: Entry, other: Entry) -> bool:
    """Same type, shape and bits; compared a piece at a time."""
    if one.shape != other.shape or one.nbytes != other.nbytes or source(one).info(one, "") != source(other).info(other, ""):
        return False
    piece = 1 << 22
    with open(getattr(one, "path", path), "rb") as a, open(getattr(other, "path", path), "rb") as b:
        a.seek(one.offset)
        b.seek(other.offset)
        counts = (min(piece, one.nbytes - first) for first in range(0, one.nbytes, piece))
        return all(a.read(count) == b.read(count) for count in counts)


def _orders(spec: Model) -> dict[str, np.ndarray]:
    """Canonical name -> order of rows, for the tensors whose heads rotate pairs side by side."""
    orders = {}
    for i, layer in enumerate(spec.layers):
        a = layer.attention
        for part, heads in (("q", a.heads), ("k", a.kv_heads)):
            orders[f"layers.{i}.attention.{part}"] = orders[f"layers.{i}.attention.{part}.bias"] = half_split(heads, a.head_size)
    return orders


@cache
def half_split(heads: int, head_size: int) -> np.ndarray:
    """(heads · head_size,) int64: which row of a matrix whose heads have rotated pairs side by side (0, 1), (2, 3), … is row i
    of one whose heads have them half a head apart, as Hugging Face does: (0, head_size / 2), (1, head_size / 2 + 1), …"""
    rows = np.arange(heads * head_size).reshape(heads, head_size // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)
