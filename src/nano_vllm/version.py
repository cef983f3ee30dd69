"""The package's version: the installed distribution's, or the source tree's."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path


def version() -> str:
    try:
        return metadata.version("nano-vllm")
    except metadata.PackageNotFoundError:
        for line in (Path(__file__).parents[2] / "pyproject.toml").read_text().splitlines():
            if line.startswith("version"):
                return line.split('"')[1]
        raise
