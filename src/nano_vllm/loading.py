"""From what the user named to a running engine: resolve, open, plan, load. LLM and AsyncLLM share it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from . import registry
from .engine.engine import Engine
from .errors import BackendUnavailable, ModelFileError, ModelNotFound, OptionError
from .memory.machine import trim
from .memory.plan import Plan, resolve
from .model.program import Program, lower
from .model.spec import Model
from .model.weights import OpenedModel, open_model
from .options import ENVIRONMENT, Options
from .sources.catalog import ALIASES
from .sources.resolve import resolve as resolve_path
from .text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A model that can answer."""

    options: Options
    spec: Model
    plan: Plan
    tokenizer: Tokenizer
    generation_config: dict
    engine: Engine

    def close(self) -> None:
        self.engine.session.close()
        trim()


def load(options: Options) -> Loaded:
    """Opens the model and its backend. Every error is typed and comes before memory is taken where that can be."""
    logging.getLogger("nano_vllm").setLevel(options.log_level.upper())
    name, backend = choose_backend(options)
    opened = open_model(resolve_path(options.model, options))
    try:
        program = lower(opened.spec)
        device = backend.device(options, opened.weights.infos) if hasattr(backend, "device") else None
        plan = resolve(options, program, name, backend.KV_DTYPE, device)
        tokenizer = open_tokenizer(options, opened, program)
        ends = eos_ids(opened, tokenizer, program.vocab_size)
        session = backend.open(program, opened.weights, plan)
    finally:
        opened.close()
    engine = Engine(
        session,
        plan,
        program.vocab_size,
        ends,
        tokenizer,
        options.seed,
        options.enable_prefix_caching,
        options.scheduler_policy,
    )
    recommended = ALIASES[options.model].generation_config if options.model in ALIASES else {}
    return Loaded(options, opened.spec, plan, tokenizer, recommended | opened.generation_config, engine)


def choose_backend(options: Options) -> tuple[str, ModuleType]:
    """The backend that was asked for, or the usable one of the highest RANK."""
    if options.backend != "auto":
        backend = registry.load("backends", options.backend)
        probe = backend.probe(options)
        if not probe.usable:
            raise BackendUnavailable(f"backend {options.backend!r} cannot run here", probe.reason, probe.mend)
        _check_read(options, options.backend, backend, [])
        return options.backend, backend
    reasons = []
    for name, backend in sorted(registry.modules("backends").items(), key=lambda item: -item[1].RANK):
        probe = backend.probe(options)
        if probe.usable:
            _check_read(options, name, backend, reasons)
            if reasons:
                log.warning("using backend %s: %s", name, "; ".join(reasons))
            return name, backend
        if probe.notable:
            reasons.append(f"{name}: {probe.reason}. {probe.mend}".rstrip())
    raise BackendUnavailable("no backend can run here", "; ".join(reasons))


def _check_read(options: Options, name: str, backend: ModuleType, passed: list[str]) -> None:
    """OptionError for an option of other backends that this one does not read; `passed`: why it was not one of those."""
    for option in sorted(set().union(*(b.OPTIONS for b in registry.modules("backends").values())) - backend.OPTIONS):
        if getattr(options, option) != getattr(Options, option):
            why = "; ".join([f"the {name} backend does not read it", *passed])
            variable = f" (or unset {ENVIRONMENT[option]})" if option in ENVIRONMENT else ""
            raise OptionError(f"option {option} = {getattr(options, option)!r} would be ignored", why, f"Leave it out{variable}.")


def open_tokenizer(options: Options, opened: OpenedModel, program: Program) -> Tokenizer:
    if options.tokenizer is not None:
        path = Path(os.path.expanduser(options.tokenizer))
        if not os.path.exists(path):
            name, mend = os.fspath(options.tokenizer), "Give a folder that has a tokenizer.json, or the file."
            raise ModelNotFound(f"no tokenizer {name!r:.200}", "this file or folder does not exist", mend)
        tokenizer = Tokenizer.from_folder(path) if path.is_dir() else Tokenizer.from_file(path)
    else:
        tokenizer = opened.tokenizer()
    if tokenizer.vocab_size > program.vocab_size:
        raise ModelFileError(
            "tokenizer and model do not belong together",
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, the embedding {program.vocab_size:,}",
            "Give the tokenizer that the model was trained with.",
        )
    return tokenizer


def eos_ids(opened: OpenedModel, tokenizer: Tokenizer, vocab_size: int) -> frozenset[int]:
    """End-of-text ids: the union of generation_config, config and the tokenizer's own (eos, eot, eom)."""
    found = set(tokenizer.eos_ids)
    for config in (opened.generation_config, opened.config):
        ids = config.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if any(type(i) is not int for i in ids):
            raise ModelFileError("config setting 'eos_token_id' must be a token id or a list of them", f"it is {ids!r:.60}")
        found.update(ids)
    return frozenset(i for i in found if 0 <= i < vocab_size)
