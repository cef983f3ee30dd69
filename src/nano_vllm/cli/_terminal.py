"""How wide what is printed may be."""

from __future__ import annotations

import os
import textwrap


def columns(stream) -> int | None:
    """Columns of the terminal that a stream writes to; None where it is none, or does not tell: nothing is fitted there."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else None
    except (OSError, ValueError):  # no descriptor, as of a test's or a notebook's stream
        return None


def hang(head: str, text: str, width: int | None) -> str:
    """`head` and behind it `text`, whose further lines begin below its first.

    Where a word, such as a path, is wider than the room that `head` leaves, the text begins a line of its own and the word stays
    whole: one that the terminal breaks can still be copied.
    """
    if width is None:
        return (head + text).rstrip()
    crowded = any(len(word) > width - len(head) for word in text.split())
    indent = " " * (4 if crowded else len(head))
    how = {"initial_indent": indent, "subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.fill(text, width, **how)
    return head.rstrip() + "\n" + lines if crowded else (head + lines[len(indent) :]).rstrip()
