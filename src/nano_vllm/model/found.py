"""What lies at a path: a model's config, the entries of its tensors and how its source names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .. import registry
from ..errors import UnsupportedModel
from ..sources import gguf, gguf_config, nano, safetensors
from ..text.files import Files, Folder

Entry = gguf.GGUFTensor | safetensors.StoredTensor | nano.NanoTensor


@dataclass(frozen=True)
class Found:
    """What a source says of a model: its architecture's module, and how its tensors are called."""

    module: ModuleType
    config: dict
    tensors: Mapping[str, Entry]
    rename: Callable[[str], str | None]
    generation_config: dict
    metadata: dict | None = None
    files: Files | None = None
    interleaved: bool = False


def find(path: Path) -> Found:
    """The model of a folder, or of a file by how it begins. Raises as `weights.open_model`."""
    if path.is_dir():
        return _open_folder(path)
    return _open_nano(path) if nano.is_nano(path) else _open_gguf(path)


def _open_folder(path: Path) -> Found:
    config = safetensors.read_json(path / "config.json")
    module = _architecture_of(config)
    generation = path / "generation_config.json"
    generation_config = safetensors.read_json(generation) if generation.is_file() else {}
    return Found(module, config, safetensors.read_folder(path), module.rename, generation_config, files=Folder(path))


def _open_gguf(path: Path) -> Found:
    header = gguf.read_header(path)
    module, interleaved = architecture([gguf_config.architecture(header)]), "GGUF_INTERLEAVED_ROPE"
    config = gguf_config.config(header)
    return Found(
        module, config, header.tensors, gguf_config.rename, {}, header.metadata, interleaved=getattr(module, interleaved, False)
    )


def _open_nano(path: Path) -> Found:
    header = nano.read_header(path)
    module, metadata = _architecture_of(header.config), header.metadata()
    return Found(module, header.config, header.tensors, lambda name: name, header.generation_config, metadata, header)


def _architecture_of(config: dict) -> ModuleType:
    return architecture([*_names(config.get("architectures")), *_names(config.get("model_type"))])


def architecture(names: list[str]) -> ModuleType:
    """The module in architectures/ that answers to the first name that any answers to."""
    modules = registry.modules("architectures").values()
    for name in names:
        for module in modules:
            if name in module.NAMES:
                return module
    known = ", ".join(sorted(name for module in modules for name in module.NAMES))
    said = f"the architecture {' or '.join(map(repr, names))} is not supported" if names else "the config names no architecture"
    raise UnsupportedModel(said, f"supported are {known}")


def _names(value: object) -> list[str]:
    return [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str)]


def source(entry: Entry) -> ModuleType:
    """The module that reads an entry."""
    return {gguf.GGUFTensor: gguf, nano.NanoTensor: nano, safetensors.StoredTensor: safetensors}[type(entry)]
