"""The vocabulary in GGUF metadata: texts, types, and which tokens are control or end tokens. Rules are llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import ModelFileError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

# Texts that end a turn or a text in some published model. A token with such a text is an end token and a control token even
# where the file does not say so. The second group ends a file in models trained to fill in the middle.
END_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> "
    "_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜>".split()
)
END_FILE_TEXTS = frozenset(
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>".split()
)
FILL_TEXTS = frozenset(
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> "
    "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>".split()
)


@dataclass(frozen=True)
class Vocabulary:
    """Attributes:
    texts: text of each id, as the file spells it.
    ids: text -> id.
    control: ids that never stand for text: control tokens and the unknown token.
    literal: ids of user-defined tokens, whose text is plain and which are cut out of any text before all else.
    byte: ids of single-byte tokens spelled <0xNN>.
    blank: ids of unused tokens and of types nobody knows; they decode to nothing.
    bos, eos, unk, pad: ids or None.
    end: ids that end an answer.
    """

    texts: list[str]
    ids: dict[str, int]
    control: frozenset[int]
    literal: frozenset[int]
    byte: frozenset[int]
    blank: frozenset[int]
    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None
    end: frozenset[int]


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(type(text) is str for text in value)


def _numbers(kinds: str) -> Callable[[object], bool]:
    """Whether a value is a list of numbers; `kinds`: NumPy's letters of the types it may have."""
    return lambda value: isinstance(value, (list, np.ndarray)) and np.asarray(value).dtype.kind in kinds


TYPES: dict[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(("ggml.model", "ggml.pre", "chat_template"), ("a text", lambda value: type(value) is str)),
    **dict.fromkeys(("ggml.tokens", "ggml.merges"), ("a list of texts", _texts)),
    "ggml.token_type": ("a list of whole numbers", _numbers("iu")),
    "ggml.scores": ("a list of numbers", _numbers("iuf")),
    **dict.fromkeys(
        [f"ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding")],
        ("a whole number", lambda value: type(value) is int),
    ),
    **dict.fromkeys(
        [f"ggml.add_{name}" for name in ("bos_token", "eos_token", "space_prefix")],
        ("true or false", lambda value: type(value) is bool),
    ),
}


def check_types(metadata: dict) -> None:
    """ModelFileError naming the first key whose value is not of the type that readers of the file rely on."""
    for name, (kind, fits) in TYPES.items():
        value = metadata.get(f"tokenizer.{name}")
        if value is not None and not fits(value):
            raise ModelFileError(f"the key 'tokenizer.{name}' must be {kind}", f"it is a {type(value).__name__}")


def _id(metadata: dict, name: str, size: int, default: int | None = None) -> int | None:
    """The id under `tokenizer.ggml.<name>_token_id`; one outside the vocabulary counts as absent."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    value = default if value is None or not 0 <= value < size else value
    return value if value is not None and value < size else None


def read(metadata: dict, sentencepiece: bool) -> Vocabulary:
    """Vocabulary of a file's metadata. ModelFileError where the lists are missing, unequal or have a text twice.

    End ids: the file's eos, eot and eom, and every token whose text is in `END_TEXTS` or `END_FILE_TEXTS`.
    """
    texts = metadata.get("tokenizer.ggml.tokens")
    if texts is None or len(texts) == 0:
        raise ModelFileError("the file has no vocabulary", "tokenizer.ggml.tokens is missing or empty")
    texts = [t or f"[EMPTY_{i}]" for i, t in enumerate(texts)]
    size = len(texts)
    ids = {t: i for i, t in enumerate(texts)}
    if len(ids) != size:
        raise ModelFileError("the vocabulary has a token twice", f"{size} tokens, {len(ids)} of them different")
    types = metadata.get("tokenizer.ggml.token_type")
    if types is not None and len(types) < size:
        raise ModelFileError("the vocabulary lacks token types", f"{size} tokens, {len(types)} types")
    types = np.full(size, NORMAL) if types is None else np.asarray(types)[:size]
    by_type: dict[int, set[int]] = {t: set() for t in (UNKNOWN, CONTROL, USER_DEFINED, BYTE)}
    blank: set[int] = set()
    for i in np.flatnonzero(types != NORMAL).tolist():
        by_type.get(int(types[i]), blank).add(i)
    end = {ids[t] for t in END_TEXTS | END_FILE_TEXTS if t in ids}
    fill = {ids[t] for t in FILL_TEXTS if t in ids}
    control = by_type[CONTROL] | by_type[UNKNOWN] | end | fill
    defaults = (1, 2, 0) if sentencepiece else (None, None, None)
    bos, eos, unk = (_id(metadata, n, size, d) for n, d in zip(("bos", "eos", "unknown"), defaults))
    named = {_id(metadata, n, size) for n in ("eot", "eom")} | {eos}
    return Vocabulary(
        texts,
        ids,
        frozenset(control),
        frozenset(by_type[USER_DEFINED] - control),
        frozenset(by_type[BYTE]),
        frozenset(blank - control),
        bos,
        eos,
        unk,
        _id(metadata, "padding", size),
        frozenset(end | {i for i in named if i is not None}),
    )
