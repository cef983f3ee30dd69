"""A model into a `.nano` file: piece by piece, so that no tensor is in memory as a whole more than once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import OptionError
from ..formats import Tensor, TensorInfo, describe, pack
from ..model.weights import OpenedModel, open_model
from ..options import Options, options
from ..sources import nano
from ..sources.catalog import ALIASES
from ..sources.nano_writer import Writer
from ..sources.resolve import resolve
from ..text.folder import ALL
from ..version import version

PIECE = 1 << 24  # numbers of a tensor that are read at once


def convert_model(input_path: str, output_path: str | os.PathLike, *, force: bool = False, progress: bool = False) -> Path:
    """Writes a model as a `.nano` file, which opens by being mapped. Its numbers stay as they are.

    A file of that name comes into being once it is whole; what an attempt before left is taken up where it was sound.

    Args:
        input_path: alias, Hugging Face id, folder, .gguf or .nano file.
        force: replace `output_path` if it is there.
        progress: show a bar on stderr.

    Raises:
        OptionError: `output_path` is there, or is the model itself.
        ModelFileError: the model is damaged, or the file cannot be written.
    """
    asked, output = options(model=os.fspath(input_path)), Path(output_path).expanduser()
    source = resolve(asked.model, asked)
    _check_output(source, output, force)
    opened = open_model(source)
    try:
        infos = {name: stored_info(info) for name, info in opened.weights.infos.items()}
        writer = Writer(output, infos, json.dumps([_identity(source)]))
        try:
            with _bar(infos, progress) as bar:
                for name, info in infos.items():
                    if name not in writer.done:
                        writer.write(name, _pieces(opened, name, info))
                    bar.update(info.nbytes)
            config = opened.config | {"tie_word_embeddings": opened.spec.tied}
            report = {"made_by": f"nano-vllm {version()}", "from": source.name}
            writer.finish(config, generation_config(asked, opened), parts(opened), report)
        finally:
            writer.close()
    finally:
        opened.close()
    return output


def stored_info(info: TensorInfo) -> TensorInfo:
    """How a tensor that is not quantised anew is kept: a matrix as it is, a vector in float32."""
    return describe(info.name, info.shape, "f32") if len(info.shape) == 1 else info


def _pieces(opened: OpenedModel, name: str, info: TensorInfo) -> Iterator[Tensor]:
    """A tensor, rows after rows: whole blocks of 32, and whole heads, as `Weights.lines` wants them."""
    if len(info.shape) == 1:
        yield pack(name, opened.weights[name].unpack(), "f32")
        return
    rows, columns = info.shape
    least = int(np.lcm(32, opened.spec.layers[0].attention.head_size))
    some = max(1, PIECE // columns // least) * least
    for first in range(0, rows, some):
        yield opened.weights.lines(name, first, min(some, rows - first))


def generation_config(asked: Options, opened: OpenedModel) -> dict:
    """The model's, and what an alias recommends where the model says nothing."""
    return (ALIASES[asked.model].generation_config if asked.model in ALIASES else {}) | opened.generation_config


def parts(opened: OpenedModel) -> dict[str, bytes]:
    """Tokenizer and template: texts that the file carries along."""
    if opened.metadata is not None:
        metadata = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in opened.metadata.items()}
        return {nano.METADATA: json.dumps(metadata, ensure_ascii=False).encode()}
    return {name: content for name in ALL if (content := opened.files.read(name))}


def _identity(source: Path) -> list:
    """Changes with the model's files."""
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


def _check_output(source: Path, output: Path, force: bool) -> None:
    if output.suffix != ".nano":
        raise OptionError(f"{output} is not the name of a .nano file", "", f"Write it to {output.with_suffix('.nano').name}.")
    if not output.exists():
        return
    if output.is_dir() or output.samefile(source):
        what = "a folder" if output.is_dir() else "the model itself"
        raise OptionError(f"{output} cannot be written", f"it is {what}", "Give another name.")
    if not force:
        raise OptionError(f"{output} is there already", "", "Give another name, or --force (force=True) to replace it.")


def _bar(infos: dict[str, TensorInfo], shown: bool):
    from tqdm import tqdm

    return tqdm(total=sum(info.nbytes for info in infos.values()), unit="B", unit_scale=True, disable=not shown, desc="convert")
