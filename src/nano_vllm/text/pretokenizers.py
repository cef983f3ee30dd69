"""Pre-tokenizers of GGUF files by the name in `tokenizer.ggml.pre`: how text falls into words before byte-pair merges.

A pre-tokenizer is a list of patterns. Each cuts the pieces that the one before it left: a match becomes a piece, and so does what
stands between matches. The patterns are the models' published ones, as llama.cpp reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedModel

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """Attributes:
    patterns: regular expressions, applied one after the other.
    ignore_merges: a word that is itself a token is that token, whatever the merges say.
    add_bos: what holds when the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
BY_NAME = {
    "default": DEFAULT,
    "gpt-2": PreTokenizer((GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", GPT2)),
    "qwen2": PreTokenizer((WORDS % r"\p{N}",)),
    "llama-bpe": PreTokenizer((WORDS % r"\p{N}{1,3}",), ignore_merges=True, add_bos=True),
}
BY_NAME["llama3"] = BY_NAME["llama-v3"] = BY_NAME["llama-bpe"]


def by_name(name: str | None) -> PreTokenizer:
    """The pre-tokenizer of that name; a file without one has the default. UnsupportedModel names an unknown one."""
    if not name:
        return DEFAULT
    if name not in BY_NAME:
        raise UnsupportedModel(
            f"pre-tokenizer {name!r} is not supported",
            f"supported are {', '.join(sorted(BY_NAME))}",
            "Use the model's Hugging Face folder, whose tokenizer.json says the rule itself.",
        )
    return BY_NAME[name]


def byte_characters() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies (GPT-2): printable Latin-1 is itself, the other bytes are U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(shown)]
    return {chr(b): b for b in shown} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


BYTE_OF = byte_characters()


def byte_level(text: str) -> bytes:
    """Bytes of a byte-level token; of one that has other characters its UTF-8."""
    try:
        return bytes([BYTE_OF[c] for c in text])
    except KeyError:
        return text.encode()
