"""From what the user typed to a path: alias, folder, .nano or .gguf file, or Hugging Face id."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from .. import registry
from ..errors import ModelNotFound
from ..options import Options
from . import catalog
from .nearest import ENDINGS, missing
from .safetensors import INDEX, SINGLE

WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model"]
UNWANTED = ["*/*", "consolidated*.safetensors"]  # other precisions and other libraries' copies of the same weights
PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
REPOSITORY = re.compile(rf"({PART}/{PART})(?:[:/](.+\.gguf))?", re.ASCII)


def resolve(model: str, options: Options | None = None) -> Path:
    """The folder, .nano or .gguf file that `model` means. An alias wins over a folder of its name (write ./name for that).

    A Hugging Face id is `org/name` for a folder of safetensors, `org/name:file.gguf` or `org/name/file.gguf` for a file of
    that repository; `name/file.gguf` is a path. The Hugging Face cache is tried first and without a network; HF_HOME and
    HF_HUB_OFFLINE hold.

    Raises:
        ModelNotFound: nothing answers to the name, or it cannot be fetched; with the mend.
    """
    if model in catalog.ALIASES:
        return catalog.fetch(model, options)
    model = os.fspath(model)
    try:
        path = Path(model).expanduser()
        if path.is_file():
            return path
        if model and path.is_dir():  # an empty name would be the current folder
            return _inside(path)
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder that may not be searched, ~ of nobody
        if isinstance(error, ModelNotFound):
            raise
        why = getattr(error, "strerror", None) or str(error)
        raise ModelNotFound(f"no model {model!r:.200}", why, "Check the path and its permissions.") from None
    found = REPOSITORY.fullmatch(model)
    if found and not (found[2] is None and model.endswith(ENDINGS)):
        try:
            revision = options.revision if options else None
            return _hub_file(found[1], found[2], revision) if found[2] else _hub_folder(found[1], revision)
        except ModelNotFound as error:
            if not Path(path.parts[0]).is_dir():
                raise
            why, mend = missing(model, path)  # it may as well have been meant as a path
            raise ModelNotFound(error.what, f"{error.why}; and {why}", mend or error.mend) from None
    if _means_a_path(model):
        why, mend = missing(model, path)
    else:
        why = "it is no alias, no path that exists, and no Hugging Face id"
        mend = registry.nearest(model, catalog.ALIASES)
    forms = f"Give a folder, a .nano or .gguf file, org/name of Hugging Face, or an alias: {', '.join(catalog.ALIASES)}."
    raise ModelNotFound(f"no model {model!r}", why, mend or forms)


def _means_a_path(model: str) -> bool:
    """Not what could be a misspelt alias or Hugging Face id."""
    return model.endswith(ENDINGS) or (":" not in model and any(mark in model for mark in {"/", os.sep, "~"}))


def _inside(folder: Path) -> Path:
    """The folder itself, or its one .gguf or .nano file where it has no config.json."""
    if (folder / "config.json").is_file():
        return folder
    files = sorted(path for path in folder.iterdir() if path.suffix in ENDINGS)
    if len(files) == 1:
        return files[0]
    why = (
        f"it holds {len(files)} model files: {', '.join(f.name for f in files[:5])}"
        if files
        else "neither config.json nor a .gguf or .nano file"
    )
    raise ModelNotFound(f"{folder} does not say which model it holds", why, "Name the file." if files else "Check the path.")


def _hub_folder(repository: str, revision: str | None) -> Path:
    """A snapshot with all shards, from the cache if it is whole there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(local: bool) -> Path:
        asked = {"revision": revision, "allow_patterns": WANTED, "ignore_patterns": UNWANTED, "local_files_only": local}
        return Path(snapshot_download(repository, **asked))

    try:
        folder = snapshot(local=True)
        if not _lacking(folder):
            return folder
    except (LocalEntryNotFoundError, ValueError):
        pass
    try:
        folder = snapshot(local=False)
    except Exception as error:  # of the hub, of its HTTP client, of the file system: they have no common base
        raise _not_fetched(repository, error) from None
    if lacking := _lacking(folder):  # without a network the hub hands out what it has
        why = f"{lacking} is neither in the cache nor could it be fetched"
        mend = f"Check the network and HF_HUB_OFFLINE. Of a repository of GGUF files name one: {repository}:FILE.gguf."
        raise ModelNotFound(f"cannot fetch {repository} from Hugging Face", why, mend)
    return folder


def _lacking(folder: Path) -> str:
    """The first file that the folder should have and has not; a cache may hold a part of a repository."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if (folder / SINGLE).is_file():
        return ""
    try:
        shards = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        return next((shard for shard in shards if not (folder / shard).is_file()), "")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return f"{SINGLE} or a sound {INDEX}"


def _hub_file(repository: str, file: str, revision: str | None) -> Path:
    """One file of a repository, from the cache if it is there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, file, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        pass
    try:
        return Path(hf_hub_download(repository, file, revision=revision))
    except Exception as error:  # as above
        raise _not_fetched(f"{repository}:{file}", error) from None


def _not_fetched(what: str, error: Exception) -> ModelNotFound:
    """The hub's error with the mend that fits it."""
    from huggingface_hub import errors

    known = [  # most particular first: some are subclasses of those below
        (errors.GatedRepoError, "it is gated", "Accept its terms on huggingface.co and set HF_TOKEN."),
        (
            errors.RepositoryNotFoundError,
            "there is no such repository, or it is private",
            "Check the name; for a private one set HF_TOKEN.",
        ),
        (errors.RevisionNotFoundError, "it has no such revision", "Check --revision."),
        (
            errors.OfflineModeIsEnabled,
            "it is not in the cache, and HF_HUB_OFFLINE is set",
            "Unset HF_HUB_OFFLINE, or give a local path.",
        ),
        (
            errors.LocalEntryNotFoundError,
            "it is not in the cache, and the network cannot be reached",
            "Check it and HF_HUB_OFFLINE, or give a local path.",
        ),
        (errors.EntryNotFoundError, "the repository has no such file", "Check the file's name."),
        (errors.HFValidationError, str(error), "Check the name."),
    ]
    for kind, why, mend in known:
        if isinstance(error, kind):
            return ModelNotFound(f"cannot fetch {what} from Hugging Face", why, mend)
    why = str(error).strip().partition("\n")[0] or type(error).__name__
    return ModelNotFound(f"cannot fetch {what} from Hugging Face", why, "Check the network, or give a local path.")
