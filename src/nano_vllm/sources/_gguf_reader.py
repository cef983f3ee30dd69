"""Values of a GGUF header, one after the other. Long lists of strings are cut in bulk, not one by one."""

from __future__ import annotations

import os
import struct
from array import array
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import ModelFileError

FIRST_READ = 8 << 20  # bytes; holds most headers whole
STRING, ARRAY = 8, 9
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}


def malformed(path: Path, why: str) -> ModelFileError:
    return ModelFileError(f"{path} is not a sound GGUF file", why, "Fetch or convert it again.")


class Reader:
    """The header's bytes, read further as they are asked for, never past the file's end."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.data = file.read(min(self.size, FIRST_READ))
        self.position = 0

    def need(self, count: int) -> None:
        """The next `count` bytes are in `data`, or the file is cut short."""
        end = self.position + count
        if end > self.size:
            raise malformed(self.path, f"it is cut short: byte {end} is needed, and it has {self.size}")
        while end > len(self.data):
            more = self.file.read(max(end - len(self.data), min(len(self.data), self.size - len(self.data))))
            if not more:
                raise malformed(self.path, f"it became shorter than {self.size} bytes while it was read")
            self.data += more

    def take(self, count: int) -> bytes:
        self.need(count)
        start, self.position = self.position, self.position + count
        return self.data[start : self.position]

    def unpack(self, layout: str) -> tuple:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self, limit: int | None = None) -> str:
        (length,) = self.unpack("<Q")
        if limit is not None and length > limit:
            raise malformed(self.path, f"a name is {length} bytes long")
        return self.text(self.take(length))

    def text(self, raw: bytes | memoryview) -> str:
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise malformed(self.path, f"a text before byte {self.position} is not UTF-8 ({error.reason})") from None

    def value(self, key: str) -> object:
        (kind,) = self.unpack("<I")
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.numbers(key, kind, 1)[0].item()
        kind, count = self.unpack("<IQ")
        if kind == ARRAY:
            raise malformed(self.path, f"the value of {key!r} is an array of arrays")
        return self.strings(count) if kind == STRING else self.numbers(key, kind, count)

    def numbers(self, key: str, kind: int, count: int) -> np.ndarray:
        if kind not in NUMBERS:
            raise malformed(self.path, f"the value of {key!r} has the unknown type {kind}")
        layout = np.dtype(NUMBERS[kind])
        raw = self.take(count * layout.itemsize)
        return np.frombuffer(raw, np.uint8) != 0 if layout == np.bool_ else np.frombuffer(raw, layout)

    def strings(self, count: int) -> list[str]:
        """Where each text begins is found first; then all are decoded and cut in one go."""
        self.need(8 * count)
        if not count:
            return []
        begin = self.position
        starts = np.array(self._walk(count, self._glance(count)), np.int64) - begin
        lengths = np.diff(starts, append=self.position - begin) - 8
        raw = np.frombuffer(self.data, np.uint8, self.position - begin, begin).copy()
        # lengths become zeros; where no text has a zero of its own, runs of eight zeros are exactly the cuts
        for byte in range((int(lengths.max()).bit_length() + 7) // 8):
            raw[starts + byte] = 0
        if len(raw) - np.count_nonzero(raw) == 8 * count:
            return self.text(memoryview(raw)[8:]).split("\0" * 8)
        return [self.text(self.data[begin + s + 8 : begin + s + 8 + n]) for s, n in zip(starts.tolist(), lengths.tolist())]

    def _glance(self, count: int) -> np.ndarray:
        """Positions of as many of the first lengths as can be told at once: a byte that is not zero and seven that are.

        Each is believed only if the one before it says that it is there, so a text full of zeros ends the glance early.
        """
        window = np.frombuffer(self.data[self.position : self.position + 64 * count], np.uint8)
        zero = window == 0
        alike = ~zero[:-7]
        for byte in range(1, 8):
            alike &= zero[byte : len(zero) - 7 + byte]
        starts = np.flatnonzero(alike)[:count]
        sound = np.diff(starts) == window[starts[:-1]] + np.int64(8)
        good = len(starts) if sound.all() else int(sound.argmin()) + 1
        return starts[:good] + self.position if len(starts) and starts[0] == 0 else starts[:0]

    def _walk(self, count: int, starts: np.ndarray) -> array:
        """The other positions one by one, as each length says where the next is; `position` ends behind the last text."""
        found, read = array("q", starts.tobytes()), struct.Struct("<Q").unpack_from
        position = self.position
        if found:  # the last one's own text is still to be passed
            position = found.pop()
        while len(found) < count:
            try:
                for _ in range(count - len(found)):
                    (length,) = read(self.data, position)
                    found.append(position)
                    position += 8 + length
            except (struct.error, OverflowError):  # beyond what is read so far
                self.position = position
                self.need(8)
        self.position = position
        self.need(0)
        return found
