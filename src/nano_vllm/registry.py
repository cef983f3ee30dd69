"""Folders as registries: a file dropped into `formats/`, `architectures/`, `policies/`, … is found by its name."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache
from types import ModuleType


@cache
def names(folder: str) -> tuple[str, ...]:
    """Names of the modules in `nano_vllm/<folder>/`, sorted; nothing is imported but the folder's package."""
    package = importlib.import_module(f"nano_vllm.{folder}")
    return tuple(sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")))


def load(folder: str, name: str) -> ModuleType:
    """The module `nano_vllm/<folder>/<name>`; KeyError's text lists what was found."""
    if name not in names(folder):
        raise KeyError(f"no {name!r} in {folder}; found: {', '.join(names(folder))}")
    return importlib.import_module(f"nano_vllm.{folder}.{name}")


def modules(folder: str) -> dict[str, ModuleType]:
    """All modules of a folder by name."""
    return {name: load(folder, name) for name in names(folder)}


def nearest(word: str, known) -> str:
    """`Did you mean 'x'?`, the mend of an unknown name, or an empty string. A name that `word` begins is nearest."""
    begun = [name for name in known if name.startswith(word)]
    close = begun or difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else ""
