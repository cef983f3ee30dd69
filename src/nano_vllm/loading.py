"""From what the user named to an engine: resolve, open, plan, load."""

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


@dataclass
class Loaded:
    """A model that can answer, until `close`; `reopen` loads it again.

    Attributes:
        path: of its file or folder.
        ends: ids that end an answer.
        plan: of the engine; after `close`, of the last one.
        engine: None after `close`.
    """

    options: Options
    path: Path
    spec: Model
    tokenizer: Tokenizer
    generation_config: dict
    ends: frozenset[int]
    plan: Plan
    engine: Engine | None = None

    def close(self) -> None:
        """Frees weights, cache and buffers. Closing twice is no error."""
        if self.engine is not None:
            self.engine.session.close()
            self.engine = None  # it keeps books of every block
            trim()

    def reopen(self) -> None:
        """Loads the same file again, on the same backend; what fits is decided anew.

        Raises:
            ModelFileError: there is another model in its place.
            NanoVLLMError: as `load`. The model is closed then, and can be reopened later.
        """
        opened = open_model(self.path)
        try:
            if opened.spec != self.spec:
                why = "its layers or sizes are not those of the model that was loaded first"
                raise ModelFileError(f"{self.path} is another model now", why, "Put the first one back, or load this one anew.")
            program = lower(opened.spec)
            self._start(opened, program, _plan(self.options, self.plan.backend, opened, program))
        finally:
            opened.close()

    def _start(self, opened: OpenedModel, program: Program, plan: Plan) -> None:
        options, session = self.options, registry.load("backends", plan.backend).open(program, opened.weights, plan)
        self.plan = session.plan
        self.engine = Engine(
            session,
            program.vocab_size,
            self.ends,
            self.tokenizer,
            options.seed,
            options.enable_prefix_caching,
            options.scheduler_policy,
        )


def load(options: Options) -> Loaded:
    """Opens the model and its backend. Every error is typed and comes before memory is taken where that can be."""
    logging.getLogger("nano_vllm").setLevel(options.log_level.upper())
    name, _ = choose_backend(options)
    path = resolve_path(options.model, options)
    opened = open_model(path)
    try:
        program = lower(opened.spec)
        plan = _plan(options, name, opened, program)
        tokenizer = open_tokenizer(options, opened, program)
        ends = eos_ids(opened, tokenizer, program.vocab_size)
        recommended = ALIASES[options.model].generation_config if options.model in ALIASES else {}
        loaded = Loaded(options, path.absolute(), opened.spec, tokenizer, recommended | opened.generation_config, ends, plan)
        loaded._start(opened, program, plan)
    finally:
        opened.close()
    return loaded


def _plan(options: Options, name: str, opened: OpenedModel, program: Program) -> Plan:
    backend = registry.load("backends", name)
    device = backend.device(options, opened.weights.infos) if hasattr(backend, "device") else None
    return resolve(options, program, name, backend.KV_DTYPE, device)


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
