"""Ids -> text as it becomes certain: half characters and what may become a stop string are held back.

The stop rule reads the text one character after another: the stop string that ends first wins, and of those that end at the same
character the longest. So the result does not depend on how ids are cut into pushes, and nothing is held longer than it must be.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from ..errors import PromptError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class StopString:
    """Knuth, Morris and Pratt's matcher for one stop string: constant time per character."""

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0
        self.fallback = [0] * (len(text) + 1)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self.fallback[length]
            length += text[i] == text[length]
            self.fallback[i + 1] = length

    def read(self, character: str) -> bool:
        """Whether the stop string ends with this character. `matched`: how much of it the text ends with now."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self.fallback[self.matched]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)


class Detokenizer:
    """Text of ids that continue a prompt: a leading space is text, unlike in `Tokenizer.decode`.

    Ids beyond the vocabulary (models may pad their head) have no text.

    Args:
        stop: strings that end the text.
        include_stop: the stop string that ended the text is part of it.
        skip_special_tokens: control tokens have no text.
        stop_after: stop strings are looked for in the text of the ids after the first `stop_after` (min_tokens).

    Attributes:
        stopped: the stop string that ended the text, or None.
        stop_token_index: ids up to and including the one that completed it; None while there is none.
        token_count: ids read so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        stop_after: int = 0,
    ) -> None:
        if isinstance(stop, str) or any(not isinstance(s, str) or not s for s in stop):
            raise PromptError("stop strings must be a list of texts that are not empty", f"got {stop!r}")
        self._tokenizer, self._include, self._special = tokenizer, include_stop, not skip_special_tokens
        self._stop_after = stop_after
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [StopString(s) for s in stop]
        self._held = ""
        self._pieces: list[str] = []
        self.stopped: str | None = None
        self.stop_token_index: int | None = None
        self.token_count = 0

    @property
    def text(self) -> str:
        """All that was given out."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def push(self, ids: list[int]) -> str:
        """Reads ids and returns the text that is now certain; "" after a stop string."""
        out = []
        for token in ids:
            if self.stopped is not None:
                break
            self.token_count += 1
            known = 0 <= token < self._tokenizer.vocab_size
            out.append(self._read(self._decoder.decode(self._tokenizer.token_bytes(int(token), self._special)) if known else ""))
        return self._give("".join(out))

    def finish(self) -> str:
        """Returns what was held back: the ids have ended. Half a character becomes U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._read(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return self._give(text)

    def _give(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _read(self, fresh: str) -> str:
        """The certain part of held and fresh text; the rest is held."""
        if not self._stops or not fresh or self.token_count <= self._stop_after:
            return fresh
        window = self._held + fresh
        for end, character in enumerate(fresh, len(self._held) + 1):
            found = [s.text for s in self._stops if s.read(character)]
            if found:
                self.stopped = max(found, key=len)
                self.stop_token_index, self._held = self.token_count, ""
                return window[: end if self._include else end - len(self.stopped)]
        keep = len(window) - max(s.matched for s in self._stops)
        self._held = window[keep:]
        return window[:keep]
