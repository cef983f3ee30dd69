"""Where a tokenizer's text files come from: a folder, or a model file that carries them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import ModelFileError


class Files(Protocol):
    """Attributes:
    where: for errors, what they are read from.
    """

    @property
    def where(self) -> str: ...

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none of that name."""


@dataclass(frozen=True)
class Folder:
    path: Path

    @property
    def where(self) -> str:
        return str(self.path)

    def read(self, name: str) -> bytes | None:
        """ModelFileError for a file that is there and cannot be read."""
        path = self.path / name
        if not path.is_file():
            return None
        try:
            return path.read_bytes()
        except OSError as error:
            raise ModelFileError(f"{name} cannot be read", error.strerror or str(error)) from None
