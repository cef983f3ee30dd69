"""What to say of a path that does not exist: how much of it does, and which names beside it are like it."""

from __future__ import annotations

import difflib
import os
from itertools import islice
from pathlib import Path

MOST = 10_000  # names of a folder that are looked at
SHOWN = 3
ENDINGS = (".gguf", ".nano")


def missing(typed: str, path: Path) -> tuple[str, str]:
    """Why there is nothing at `path`, and as the mend the nearest names of its folder, written as `typed` was; or no mend."""
    if path.is_symlink():
        return f"it is a link to {os.readlink(path)}, which does not exist", ""
    if path.exists():
        return "it is neither a file nor a folder", ""
    kind = "file" if path.suffix in ENDINGS else "file or folder"
    above = next((folder for folder in reversed(path.parents) if not folder.is_dir()), None)
    if above is not None:
        return f"this {kind} does not exist, since {above} is no folder" if above.exists() else f"there is no folder {above}", ""
    models, folders = _names(path.parent)
    known = {_bare(name): name for name in (models if kind == "file" else folders + models)}
    near = [known[name] for name in difflib.get_close_matches(_bare(path.name), known, n=SHOWN, cutoff=0.5)]
    mend = f"Did you mean {_listed(typed, near, ' or ')}?" if near else ""
    if models and not near:
        mend = f"Its folder holds {_listed(typed, models, ', ')}."
    return f"this {kind} does not exist", mend


def _bare(name: str) -> str:
    """What two names are compared by: their common ending would make all alike."""
    return name.casefold().removesuffix(".gguf").removesuffix(".nano")


def _names(folder: Path) -> tuple[list[str], list[str]]:
    """Names of a folder's model files, and of the folders in it."""
    models, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, MOST):
                if entry.is_dir():
                    folders.append(entry.name)
                elif entry.name.endswith(ENDINGS) and entry.is_file():
                    models.append(entry.name)
    except OSError:  # a folder that may not be read
        pass
    return sorted(models), sorted(folders)


def _listed(typed: str, names: list[str], between: str) -> str:
    shown = [repr(str(Path(typed).with_name(name))) for name in names[:SHOWN]]
    return between.join(shown) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
