"""Writing a `.nano` file: tensor by tensor into a file of another name, which gets its own once it is whole.

Where everything lies follows from names and formats, so a conversion that was broken off goes on where it stopped: a log beside
the file says which tensors are in it, and each is believed once its checksum was computed anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ..errors import ModelFileError
from ..formats import Tensor, TensorInfo
from . import _n32
from .nano import HEAD, LARGE_ALIGN, MAGIC, VERSION, boundary, digest, digest_of, stored_bytes


class Writer:
    """Attributes:
    done: names of the tensors that are in the file.

    Args:
        path: of the file to be.
        infos: what will be written, in the order of the file.
        source: says which model and which settings these tensors come from; what was begun from another is begun anew.

    Raises ModelFileError where the file cannot be written.
    """

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo], source: str) -> None:
        self.path, self.infos = path, dict(infos)
        self.places: dict[str, tuple[int, int]] = {}
        end = LARGE_ALIGN
        for name, info in self.infos.items():
            nbytes = stored_bytes(info)
            offset = -(-end // boundary(nbytes)) * boundary(nbytes)
            self.places[name] = offset, nbytes
            end = offset + nbytes
        self.end = end
        self.partial, self.log = path.with_name(path.name + ".partial"), path.with_name(path.name + ".partial.log")
        layout = [(name, asdict(info)) for name, info in self.infos.items()]
        first = json.dumps({"source": digest(json.dumps([source, layout]).encode())}) + "\n"
        try:
            self.done = self._resumed(first)
            self._file = open(self.partial, "r+b" if self.done else "w+b", buffering=0)
            self._log = open(self.log, "w", encoding="utf-8")
            self._log.write(first)
            for name, checksum in self.done.items():
                self._record(name, checksum)
        except OSError as error:
            raise self._failed(error) from None

    def write(self, name: str, pieces: Iterable[Tensor]) -> None:
        """A tensor, given as rows one after the other; of a matrix, all pieces but the last have whole blocks of 32 rows."""
        offset, nbytes = self.places[name]
        total, at = hashlib.blake2b(digest_size=16), offset
        try:
            for piece in pieces:
                content = _content(piece)
                total.update(content)
                self._file.seek(at)
                self._put(content)
                at += content.nbytes
            if at != offset + nbytes:
                raise ModelFileError(f"tensor {name!r} has the wrong size", f"{at - offset:,} bytes instead of {nbytes:,}")
            self.done[name] = total.hexdigest()
            self._record(name, self.done[name])
        except OSError as error:
            raise self._failed(error) from None

    def finish(self, config: dict, generation_config: dict, parts: Mapping[str, bytes], report: dict) -> None:
        """Adds the texts and the header, and gives the file its name, replacing what has it."""
        header: dict = {"layout": _n32.NAME, "config": config, "generation_config": generation_config, "report": report}
        header["tensors"] = {name: self._entry(name, info) for name, info in self.infos.items()}
        header["parts"], end = {}, self.end
        try:
            for name, content in parts.items():
                offset = -(-end // boundary(len(content))) * boundary(len(content))
                self._file.seek(offset)
                self._put(np.frombuffer(content, np.uint8))
                header["parts"][name] = {"offset": offset, "nbytes": len(content), "blake2b": digest(content)}
                end = offset + len(content)
            text = json.dumps(header, separators=(",", ":")).encode()
            self._file.seek(end)
            self._put(np.frombuffer(text, np.uint8))
            self._file.truncate(end + len(text))
            self._file.seek(0)
            checksum = hashlib.blake2b(text, digest_size=16).digest()
            self._put(np.frombuffer(HEAD.pack(MAGIC, VERSION, 0, end, len(text), checksum), np.uint8))
            os.fsync(self._file.fileno())
            self.close()
            os.replace(self.partial, self.path)
            self.log.unlink()
        except OSError as error:
            raise self._failed(error) from None

    def close(self) -> None:
        """What is written so far stays, for the next attempt."""
        self._file.close()
        self._log.close()

    def _put(self, content: np.ndarray) -> None:
        view = memoryview(content.reshape(-1))
        while len(view):
            view = view[self._file.write(view) :]

    def _record(self, name: str, checksum: str) -> None:
        self._log.write(json.dumps({"name": name, "blake2b": checksum}) + "\n")
        self._log.flush()

    def _entry(self, name: str, info: TensorInfo) -> dict:
        offset, nbytes = self.places[name]
        made = {"shape": list(info.shape), "format": info.format, "group": info.group, "minimum": info.minimum}
        return made | {"offset": offset, "nbytes": nbytes, "blake2b": self.done[name]}

    def _resumed(self, first: str) -> dict[str, str]:
        """Name -> checksum of the tensors that an attempt before this one left, of the same source, and sound."""
        if not self.log.is_file() or not self.partial.is_file():
            return {}
        with open(self.log, encoding="utf-8", errors="replace") as log, open(self.partial, "rb", buffering=0) as file:
            if log.readline() != first:
                return {}
            found = {}
            for line in log:
                try:
                    entry = json.loads(line)
                    name, checksum = entry["name"], entry["blake2b"]
                    if digest_of(file, *self.places[name], name) == checksum:
                        found[name] = checksum
                except (ValueError, KeyError, TypeError, ModelFileError):  # a line half written, a tensor cut short
                    continue
        return found

    def _failed(self, error: OSError) -> ModelFileError:
        return ModelFileError(f"cannot write {self.path}", error.strerror or str(error), "Check the folder and the free space.")


def _content(piece: Tensor) -> np.ndarray:
    """A tensor's rows as they lie in the file."""
    if len(piece.info.shape) == 1:
        return np.ascontiguousarray(piece.planes["values"], "<f4").view(np.uint8)
    return np.ascontiguousarray(_n32.pack(piece))
