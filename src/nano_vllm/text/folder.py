"""Codec of a Hugging Face folder: tokenizer.json through the `tokenizers` library, with what tokenizer_config.json adds."""

from __future__ import annotations

import json
import re
import threading

from ..errors import ModelFileError, ModelNotFound, UnsupportedModel
from .files import Files
from .pretokenizers import byte_level
from .spm import SPACE

TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
CONFIGS = ("special_tokens_map.json", "tokenizer_config.json", "chat_template.json")
ALL = (TOKENIZER, *CONFIGS, TEMPLATE)  # what a model's file must carry along
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _json(name: str, text: bytes) -> dict:
    try:
        content = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{name} cannot be read", str(error)) from None
    if not isinstance(content, dict):
        raise ModelFileError(f"{name} is not an object", f"it holds {type(content).__name__}")
    return content


def read_config(files: Files) -> dict:
    """tokenizer_config.json; names it lacks from special_tokens_map.json, the template from chat_template.jinja if there."""
    config: dict = {}
    for name in CONFIGS:
        if (text := files.read(name)) is not None:
            config |= {k: v for k, v in _json(name, text).items() if v is not None}
    if (text := files.read(TEMPLATE)) is not None:
        try:
            config["chat_template"] = text.decode("utf-8")
        except ValueError as error:
            raise ModelFileError(f"{TEMPLATE} cannot be read", str(error)) from None
    return config


def _template(config: dict) -> str | None:
    """The template; of several with names the one called "default"."""
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
    return source.get("default") if isinstance(source, dict) else source


def open_folder(files: Files, name: str, config: dict) -> dict:
    """Arguments of `Tokenizer` from a tokenizer.json, called `name`, and the content of tokenizer_config.json.

    BOS and EOS around a text are what tokenizer.json's post-processor says, as in transformers 5, not the config's add_bos_token.
    """
    from tokenizers import Tokenizer

    text = files.read(name)
    if text is None:
        raise ModelNotFound(f"no {name} in {files.where}", "", "Give a folder that has one, or use --tokenizer.")
    try:
        core = Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{name} of {files.where} is not a tokenizer", str(error)) from None
    core.no_truncation()
    core.no_padding()
    codec = FolderCodec(core)
    named = {}
    for name in NAMED:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[name] = text
    bos, eos = (core.token_to_id(named[n]) if n in named else None for n in ("bos_token", "eos_token"))
    prefix, suffix = _around(core)
    return {
        "codec": codec,
        "special_tokens": {t.content: i for i, t in codec.added.items() if t.special},
        "prefix": prefix,
        "suffix": suffix,
        "bos_id": bos,
        "eos_id": eos,
        "eos_ids": frozenset() if eos is None else frozenset({eos}),
        "chat_template": _template(config),
        "template_variables": named,
    }


def _around(core) -> tuple[list[int], list[int]]:
    """Ids that the post-processor puts before and after a text."""
    bare, full = core.encode("a", add_special_tokens=False).ids, core.encode("a", add_special_tokens=True).ids
    start = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), 0)
    return full[:start], full[start + len(bare) :]


def _spelling(decoder: dict | None) -> tuple[str, bool]:
    """How tokens are spelled, "bytes" or "pieces", and whether decoding drops a leading space; from tokenizer.json's decoder."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [s["type"] for s in steps]
    unknown = set(kinds) - {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if unknown:
        raise UnsupportedModel(f"decoder {sorted(unknown)[0]!r} of tokenizer.json is not supported")
    if "ByteLevel" in kinds:
        return "bytes", False
    strips = any(
        s["type"] == "Strip" and s.get("start") or s["type"] == "Metaspace" and s.get("prepend_scheme", "always") != "never"
        for s in steps
    )
    return "pieces", strips


class FolderCodec:
    """Encodes through `tokenizers`; spells tokens by the kind of its decoder. One thread at a time encodes."""

    def __init__(self, core) -> None:
        self._core, self._lock = core, threading.Lock()
        self._kind, self.prefix = _spelling(json.loads(core.decoder.__getstate__()) if core.decoder is not None else None)
        self.added = core.get_added_tokens_decoder()
        self.size = max(core.get_vocab_size(with_added_tokens=True), max(self.added, default=-1) + 1)
        self._special = frozenset(i for i, t in self.added.items() if t.special)
        self._inner = None

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids of text, without what the post-processor adds."""
        return self._run(self._core, text, parse_special)

    def encode_segments(self, segments: list[str | int]) -> list[int]:
        """Ids of plain texts and special ids in turn; white space that a special token strips is stripped from its neighbours."""
        out: list[int] = []
        for n, segment in enumerate(segments):
            if isinstance(segment, int):
                out.append(segment)
                continue
            before, after = (
                self.added.get(segments[k]) if 0 <= k < len(segments) and isinstance(segments[k], int) else None
                for k in (n - 1, n + 1)
            )
            text = segment.lstrip() if before is not None and before.rstrip else segment
            text = text.rstrip() if after is not None and after.lstrip else text
            if text:
                out += self._run(self._core if n == 0 else self._inside(), text, False)
        return out

    def bytes_of(self, token: int) -> bytes:
        """Bytes of a token; an id that the vocabulary skips has none."""
        if token in self.added:
            return self.added[token].content.encode()
        text = self._core.id_to_token(token)
        if text is None:
            return b""
        if self._kind == "bytes":
            return byte_level(text)
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text):
            return bytes([int(text[3:5], 16)])
        return text.replace(SPACE, " ").encode()

    def _run(self, core, text: str, parse_special: bool) -> list[int]:
        with self._lock:
            core.encode_special_tokens = not parse_special
            ids = core.encode(text, add_special_tokens=False).ids
        if parse_special or self._special.isdisjoint(ids):
            return ids
        out: list[int] = []
        for i in ids:
            apart = [core.token_to_id(c) for c in core.id_to_token(i)] if i in self._special else [i]
            out += [a for a in apart if a is not None and (a not in self._special)]
        return out

    def _inside(self):
        """The tokenizer for text that does not begin the prompt: "first" puts a space before the beginning alone."""
        if self._inner is None:
            whole = self._core.to_str()
            self._inner = self._core
            if re.search(r'"prepend_scheme":\s*"first"', whole):
                from tokenizers import Tokenizer

                self._inner = Tokenizer.from_str(re.sub(r'("prepend_scheme":\s*)"first"', r'\1"never"', whole))
        return self._inner
