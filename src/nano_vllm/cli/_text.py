"""What a command reads: prompt, stdin, files."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from ..errors import OptionError


def decode(data: bytes, name: str) -> str:
    """UTF-8 text; anything else is refused, because silently replaced characters change what the model reads."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"byte {error.start} cannot be decoded"
        raise OptionError(f"{name} is not UTF-8 text", why, "Convert it first (iconv).") from None


def argument(text: str, name: str) -> str:
    """An argument of the command line as UTF-8, whatever the locale says that its bytes are."""
    try:
        return decode(os.fsencode(text), name)
    except UnicodeEncodeError:  # text that did not come from bytes
        return text


def read_file(path: str) -> str:
    """The text of a file; "-" is stdin."""
    if path == "-":
        return decode(sys.stdin.buffer.read(), "stdin")
    try:
        return decode(Path(path).read_bytes(), path)
    except OSError as error:
        raise OptionError(f"cannot read {path!r}", error.strerror or str(error), "Give a text file, or - for stdin.") from None


def read_stdin() -> str:
    """What is piped or redirected into the command, without its last newline; "" where stdin is a terminal or nothing."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # no stdin at all
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return ""
    return decode(sys.stdin.buffer.read(), "stdin").removesuffix("\n")


def prompt(given: str | None) -> str:
    """Argument, stdin, or both joined by a blank line (argument first)."""
    parts = [part for part in (given and argument(given, "the prompt"), read_stdin()) if part]
    if not parts:
        raise OptionError("no prompt", "", 'Give one as an argument ("..."), or pipe it in.')
    return "\n\n".join(parts)
