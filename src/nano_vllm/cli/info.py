"""`nano-vllm info`: what a model is and what would be decided for it, from its headers alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import fields

from ..errors import NanoVLLMError, OptionError
from . import _flags, _terminal

HELP = "what a model holds, what is planned for it, what each backend says"
WIDTH = 26
ALLOCATED = "taken when the model is loaded"
RESERVED = "reserved; a block takes memory only when it is first used"  # as tests/golden/test_llm.py holds the backends to


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "alias, Hugging Face id, folder, .nano or .gguf file; the same as --model"
    parser.add_argument("name", nargs="?", metavar="model", help=text)
    parser.add_argument("--verify", action="store_true", help="read all of a .nano file and compare its checksums")
    _flags.add(parser, "model and engine", _flags.model_flags())


def line(name: str, text: str, value: str = "") -> None:
    """A name and a text, or a name, a value and the text that explains it; wrapped where stdout is a terminal."""
    head = f"{name:<{WIDTH}}" + (f"{value:<10} " if value else "")
    print(_terminal.hang(head, text, _terminal.columns(sys.stdout)))


def describe(opened) -> None:
    """Architecture, sizes, formats."""
    from ..memory.machine import format_bytes

    spec, infos = opened.spec, opened.weights.infos.values()
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    windows = Counter(layer.attention.window for layer in spec.layers if layer.attention.window)
    line("file", str(opened.path))
    line("architecture", f"{spec.architecture}: {len(spec.layers)} layers, hidden size {spec.hidden_size:,}")
    line("  attention", f"{attention.heads} heads of {attention.head_size} over {attention.kv_heads} of keys and values")
    for window, count in windows.items():
        line("  window", f"{window:,} tokens in {count} layers")
    line("  mlp", f"{mlp.size:,}, {mlp.activation}")
    line("  vocabulary", f"{spec.vocab_size:,}, {'head tied to the embedding' if spec.tied else 'a head of its own'}")
    line("context", f"{spec.context:,} tokens")
    line("parameters", f"{sum(_elements(info) for info in infos):,}")
    line("weights", format_bytes(sum(info.nbytes for info in infos)))
    for name, (count, nbytes) in sorted(formats(infos).items()):
        line(f"  {name}", f"{count} tensor{'s' * (count != 1)}, {format_bytes(nbytes)}")
    line("tokenizer", tokenizer(opened))


def _elements(info) -> int:
    count = 1
    for size in info.shape:
        count *= size
    return count


def formats(infos) -> dict[str, tuple[int, int]]:
    """Format, with group and minimum where it has them -> number of tensors, bytes."""
    found: dict[str, tuple[int, int]] = {}
    for info in infos:
        name = info.format + (f" groups of {info.group}" if info.group else "") + (" + min" if info.minimum else "")
        count, nbytes = found.get(name, (0, 0))
        found[name] = (count + 1, nbytes + info.nbytes)
    return found


def tokenizer(opened) -> str:
    """Kind and template, from the metadata: no tokenizer is built for it."""
    if opened.metadata is not None:
        from ..text.vocabulary import check_types

        check_types(opened.metadata)
        parts = [opened.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre")]
        template = opened.metadata.get("tokenizer.chat_template")
    else:
        from ..text.folder import read_config

        template = read_config(opened.files).get("chat_template")
        try:
            parts = [json.loads(opened.files.read("tokenizer.json") or b"{}")["model"]["type"]]
        except (ValueError, KeyError, TypeError):
            parts = []
    kind = ", ".join(str(part) for part in parts if part) or "none"
    return f"{kind}; {'has a chat template' if template else 'no chat template'}"


def verified(path) -> str:
    """That all of a .nano file is what was written. OptionError for what has no checksums, ModelFileError naming damage."""
    from ..sources import nano

    if not nano.is_nano(path):
        raise OptionError(f"{path} has no checksums", "only .nano files have them", "Leave out --verify, or convert the model.")
    header = nano.read_header(path)
    nano.verify(header)
    return f"of {len(header.tensors)} tensors and {len(header.parts)} texts are right"


def plan(options, program, infos) -> None:
    """The lines of the plan with their reasons, or why there is none."""
    from ..loading import choose_backend
    from ..memory.machine import format_bytes
    from ..memory.plan import Plan, kv_bytes_per_token, resolve

    print("\nplan")
    try:
        name, backend = choose_backend(options)
        device = backend.device(options, infos) if hasattr(backend, "device") else None
        made = resolve(options, program, name, backend.KV_DTYPE, device)
    except NanoVLLMError as error:
        return line("  none", str(error))
    for field in fields(Plan):
        value = getattr(made, field.name)
        alone = field.name == "tensor_parallel_size" and value == 1
        if field.name not in ("reasons", "share") and value not in ("", False) and not alone:
            shown = f"{value:,}" if isinstance(value, int) else str(value)
            line(f"  {field.name}", made.reasons.get(field.name, ""), shown)
    size = made.num_blocks * made.block_size * kv_bytes_per_token(program, made.kv_cache_dtype)
    line("  cache", ALLOCATED if made.share else RESERVED, format_bytes(size))
    if made.share:
        why = f"cache and {format_bytes(made.share.beside)} beside it, which is measured after loading"
        line("  device", f"{why}; at most {format_bytes(made.share.budget)}", format_bytes(made.device_bytes))


def backends(options) -> None:
    """What each backend says of this machine."""
    from .. import registry

    print("\nbackends")
    for name, backend in registry.modules("backends").items():
        probe = backend.probe(options)
        line(f"  {name}", f"{'usable' if probe.usable else 'not usable'}: {probe.reason}")
        if probe.mend:
            line("", probe.mend)
        for key, value in probe.details.items():
            line("", f"{key}: {value}")


def main(args: argparse.Namespace) -> int:
    """Prints to stdout. Reads headers only; fetches the model if it is not here."""
    from ..model.program import lower
    from ..model.weights import open_model
    from ..options import options
    from ..sources.resolve import resolve
    from . import _model

    asked = options(**_model.named(args))
    opened = open_model(resolve(asked.model, asked))
    try:
        describe(opened)
        if args.verify:
            line("checksums", verified(opened.path))
        plan(asked, lower(opened.spec), opened.weights.infos)
        backends(asked)
    finally:
        opened.close()
    return 0
