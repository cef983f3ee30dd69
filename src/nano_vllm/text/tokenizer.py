"""Tokenizer: text -> ids and back, from a GGUF file's metadata or a Hugging Face folder.

The ids are llama.cpp's for a GGUF file and Hugging Face's for a folder, with one exception on purpose: with `parse_special=False`
no text becomes a control token, even where the merges of the vocabulary would spell one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Protocol

from ..errors import PromptError
from .files import Files, Folder


class Codec(Protocol):
    """What differs between sources.

    Attributes:
        size: ids are below it.
        prefix: decoding a whole text drops one leading space, which encoding put there.
    """

    size: int
    prefix: bool

    def encode(self, text: str, parse_special: bool) -> list[int]: ...

    def encode_segments(self, segments: list[str | int]) -> list[int]: ...

    def bytes_of(self, token: int) -> bytes: ...


class Tokenizer:
    """Attributes:
    bos_id, eos_id: ids or None.
    eos_ids: ids that end an answer. GGUF: see `vocabulary.read`; folder: tokenizer_config's eos_token.
    special_tokens: text -> id of the control tokens.
    chat_template: source of the model's template, or None.
    template_variables: bos_token, eos_token, … -> text, as templates name them.
    """

    def __init__(
        self,
        codec: Codec,
        special_tokens: dict[str, int],
        *,
        prefix: list[int],
        suffix: list[int],
        bos_id: int | None,
        eos_id: int | None,
        eos_ids: frozenset[int],
        chat_template: str | None,
        template_variables: dict[str, str],
    ) -> None:
        self._codec, self._prefix, self._suffix = codec, prefix, suffix
        self.special_tokens = special_tokens
        self._special = frozenset(special_tokens.values())
        self.bos_id, self.eos_id, self.eos_ids = bos_id, eos_id, eos_ids
        self.chat_template, self.template_variables = chat_template, template_variables
        self._spelled: dict[int, bytes] = {}

    @classmethod
    def from_gguf(cls, metadata: dict) -> Tokenizer:
        """From a file's metadata (`tokenizer.*` keys; lists of str, arrays or scalars).

        Raises UnsupportedModel for an unknown model or pre-tokenizer, ModelFileError for lists that do not fit together.
        """
        from .gguf_codec import open_codec

        codec, vocab, add_bos, add_eos = open_codec(metadata)
        named = {"bos_token": vocab.bos, "eos_token": vocab.eos, "unk_token": vocab.unk, "pad_token": vocab.pad}
        return cls(
            codec,
            {vocab.texts[i]: i for i in sorted(vocab.control)},
            prefix=[vocab.bos] if add_bos and vocab.bos is not None else [],
            suffix=[vocab.eos] if add_eos and vocab.eos is not None else [],
            bos_id=vocab.bos,
            eos_id=vocab.eos,
            eos_ids=vocab.end,
            chat_template=metadata.get("tokenizer.chat_template"),
            template_variables={k: vocab.texts[i] for k, i in named.items() if i is not None},
        )

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """From a folder with tokenizer.json; tokenizer_config.json, special_tokens_map.json, chat_template.jinja are read too."""
        return cls.from_files(Folder(Path(path)))

    @classmethod
    def from_files(cls, files: Files) -> Tokenizer:
        """The same from wherever these files are.

        Raises ModelNotFound where tokenizer.json is missing, ModelFileError where it is broken; UnsupportedModel for an unknown
        decoder.
        """
        from .folder import TOKENIZER, open_folder, read_config

        return cls(**open_folder(files, TOKENIZER, read_config(files)))

    @classmethod
    def from_file(cls, tokenizer_json: str | Path) -> Tokenizer:
        """From a tokenizer.json alone. Raises as `from_files`."""
        from .folder import open_folder

        path = Path(tokenizer_json)
        return cls(**open_folder(Folder(path.parent), path.name, {}))

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return self._codec.size

    def is_special(self, token: int) -> bool:
        """Whether the id is a control token."""
        return token in self._special

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of text.

        Args:
            add_special_tokens: BOS and EOS around it, where the model wants them.
            parse_special: text that spells a control token becomes it; else it stays plain text. Tokens that the model's
                makers added as plain (user-defined, or special: false) are found either way.

        Raises PromptError for what is not text.
        """
        ids = self._codec.encode(_checked(text), parse_special)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_segments(self, segments: list[str | int]) -> list[int]:
        """Ids of plain texts and control tokens' ids in turn, as if their text stood in one; no text becomes a control token."""
        return self._codec.encode_segments([s if isinstance(s, int) else _checked(s) for s in segments])

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        """Exact bytes of a token, which may be a part of a character; b"" for a control token unless `special`.

        Raises PromptError for an id outside the vocabulary.
        """
        if token in self._special and not special:
            return b""
        spelled = self._spelled.get(token)
        if spelled is None:
            if not 0 <= token < self.vocab_size:
                raise PromptError(f"token id {token} is not in the vocabulary", f"ids go from 0 to {self.vocab_size - 1}")
            spelled = self._spelled[token] = self._codec.bytes_of(token)
        return spelled

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        """Text of ids as a whole text: the space that encoding puts before a text is dropped. Invalid UTF-8 becomes U+FFFD.

        Raises PromptError for an id outside the vocabulary, and for what is no id.
        """
        special, ids = not skip_special_tokens, list(ids) if isinstance(ids, Iterable) else [ids]
        for i in ids:
            if not isinstance(i, Integral):
                raise PromptError("ids must be a list of whole numbers", f"{i!r:.60} is of type {type(i).__name__}")
        text = b"".join([self.token_bytes(int(i), special) for i in ids]).decode("utf-8", "replace")
        return text[1:] if self._codec.prefix and text.startswith(" ") else text

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """Texts of the control tokens, the longest first."""
        return tuple(sorted(self.special_tokens, key=len, reverse=True))


def _checked(text: str) -> str:
    if not isinstance(text, str):
        raise PromptError("a prompt must be text", f"it is {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError("the text is not valid Unicode", f"half of a surrogate pair at character {error.start}") from None
    return text
