"""Keeps what a user wrote from becoming a control token.

Every text that comes from outside gets a mark, a character that occurs nowhere else, wherever it spells a control token, and at
an end where it could spell one together with the template's text. After rendering, only control tokens without a mark inside are
the template's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# Noncharacters (never assigned, never exchanged) first, then private-use characters.
MARKS = [*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xE000, 0xE100)), *map(chr, range(0xF0000, 0xF1000))]
STRUCTURE = frozenset({"role", "type", "id", "tool_call_id"})  # templates compare these; no text is next to them by chance
FREE = frozenset({"content", "text", "reasoning_content", "reasoning", "arguments", "thinking"})


def strings(value) -> Iterator[str]:
    """All strings in nested lists and dicts, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings(item)


class Guard:
    """Marks texts, and splits what was rendered.

    Args:
        shapes: of the tokenizer's control tokens.
        texts: everything the rendering will see, so that the mark occurs in none of it.
    """

    def __init__(self, shapes: Shapes, texts: Iterable[str]) -> None:
        self.shapes, texts = shapes, list(texts)
        used = set().union(*map(set, texts))
        spelled = "".join(t for t in texts if "\\u" in t)
        self.mark = next(m for m in MARKS if m not in used and _escape(m) not in spelled)
        self.used = False

    def protect(self, value, key: str = ""):
        """value with every text in it marked where it must be; other types as they are."""
        if isinstance(value, str):
            return self._text(value, key)
        if isinstance(value, dict):
            return {self._inside(k) if isinstance(k, str) else k: self.protect(v, k) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(v, key) for v in value]
        return value

    def _text(self, text: str, key: str) -> str:
        marked = self._inside(text)
        if key in STRUCTURE or not text or text.isspace():
            return marked
        starts = self.shapes.could_end(text) or (key in FREE and self.shapes.could_be_inside(text))
        ends = self.shapes.could_begin(text)
        self.used |= starts or ends
        return self.mark * starts + marked + self.mark * ends

    def _inside(self, text: str) -> str:
        if self.shapes.here is None:
            return text
        marked = self.shapes.here.sub(lambda m: self.mark * (m[0] in self.shapes.single) + m[0] + self.mark, text)
        self.used |= marked != text
        return marked

    def clean(self, text: str) -> str:
        """text without marks, however a template may have written them."""
        return text.replace(self.mark, "").replace(_escape(self.mark), "") if self.used else text

    def split(self, text: str) -> list[tuple[str, bool]]:
        """(text without marks, whether it is a control token of the template's) in turn."""
        out: list[tuple[str, bool]] = []
        parts = self.shapes.cutter(self.mark).split(text) if self.shapes.controls else [text]
        for n, part in enumerate(parts):
            plain = part if n % 2 else self.clean(part)
            if plain:
                out.append((plain, n % 2 == 1))
        return out


class Shapes:
    """What control tokens look like: made once per tokenizer."""

    def __init__(self, controls: Iterable[str]) -> None:
        self.controls = sorted({c for c in controls if c}, key=len, reverse=True)
        self.single = frozenset(c for c in self.controls if len(c) == 1)
        self.begin = {c[:n] for c in self.controls for n in range(1, len(c))}
        self.end = {c[n:] for c in self.controls for n in range(1, len(c))}
        self.longest = len(self.controls[0]) if self.controls else 0
        self.here = None
        self._cutters: dict[str, re.Pattern] = {}
        if self.controls:
            firsts = "".join(sorted({re.escape(c[0]) for c in self.controls}))
            any_of = "|".join(map(re.escape, self.controls))
            self.here = re.compile(f"(?=[{firsts}])(?={any_of}).", re.DOTALL)

    def could_begin(self, text: str) -> bool:
        """Whether a control token may begin at the end of text and go on after it."""
        return any(text[-n:] in self.begin for n in range(1, min(len(text), self.longest) + 1))

    def could_end(self, text: str) -> bool:
        """Whether a control token that began before text may end in it."""
        return any(text[:n] in self.end for n in range(1, min(len(text), self.longest) + 1))

    def could_be_inside(self, text: str) -> bool:
        return len(text) < self.longest and any(text in c for c in self.controls)

    def cutter(self, mark: str) -> re.Pattern:
        """Finds control tokens, the leftmost first and of those the longest; a single character only without a mark before it."""
        if mark not in self._cutters:
            each = [(f"(?<!{re.escape(mark)})" if c in self.single else "") + re.escape(c) for c in self.controls]
            self._cutters[mark] = re.compile("(" + "|".join(each) + ")")
        return self._cutters[mark]


def _escape(mark: str) -> str:
    """The mark as JSON in ASCII spells it."""
    code = ord(mark)
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
