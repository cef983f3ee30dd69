"""Fields become flags: the only place that does it, so a flag has the same name and meaning in every command."""

from __future__ import annotations

import argparse
import re
from dataclasses import MISSING, dataclass, fields, replace

SHORT = {"model": "-m"}


@dataclass(frozen=True)
class Flag:
    """One field as a flag.

    Attributes:
        kind: the field's annotation without None: bool, int, float, str, or "tuple[…, ...]".
        default: as text for the help; "" where leaving the flag out has a meaning that `help` tells.
    """

    field: str
    kind: str
    default: str
    help: str

    @property
    def name(self) -> str:
        return "--" + self.field.replace("_", "-")


def documented(cls: type) -> dict[str, str]:
    """Field name -> text, from the class's docstring section "Attributes:"; names that share a line share its text."""
    section = re.split(r"^\s*Attributes:\s*$", cls.__doc__ or "", maxsplit=1, flags=re.MULTILINE)[-1]
    found: dict[str, str] = {}
    current: list[str] = []
    known = {f.name for f in fields(cls)}
    for line in section.splitlines():
        head, colon, text = line.strip().partition(": ")
        listed = [name.strip() for name in head.split(",")]
        if colon and known.issuperset(listed):
            current = listed
            found.update(dict.fromkeys(listed, text))
        else:
            for name in current:
                found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def flags(cls: type, only: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> list[Flag]:
    """The flags of a dataclass, in its fields' order; `only` and `without` name fields."""
    texts, made = documented(cls), []
    for f in fields(cls):
        if f.name in without or (only and f.name not in only):
            continue
        kind = str(f.type).replace(" | None", "")
        default = f.default if f.default is not MISSING else ""
        if kind == "bool":
            default = "on" if default else "off"
        made.append(Flag(f.name, kind, "" if default in (None, "", ()) else str(default), texts.get(f.name, "")))
    return made


def number(kind: type):
    """A converter whose error says what was read."""

    def convert(text: str):
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None

    return convert


def add(parser: argparse.ArgumentParser, title: str, made: list[Flag]) -> None:
    """Adds the flags as a group. A flag that is not given leaves no attribute: defaults stay the dataclass's."""
    group = parser.add_argument_group(title)
    for flag in made:
        names = [SHORT[flag.field], flag.name] if flag.field in SHORT else [flag.name]
        shown = flag.help + (f" (default {flag.default})" if flag.default else "")
        how: dict = {"dest": flag.field, "default": argparse.SUPPRESS, "help": shown.replace("%", "%%")}
        if flag.kind == "bool":
            how["action"] = argparse.BooleanOptionalAction
        elif flag.kind.startswith("tuple"):
            how.update(action="append", type=number(int) if "int" in flag.kind else str, metavar="X")
            how["help"] += " May be given several times."
        else:
            how["type"] = {"int": number(int), "float": number(float)}.get(flag.kind, str)
            how["metavar"] = {"int": "N", "float": "X"}.get(flag.kind, "TEXT")
        group.add_argument(*names, **how)


def asked(args: argparse.Namespace, made: list[Flag]) -> dict:
    """What was given on the command line, as keywords of the dataclass."""
    given = {flag.field: getattr(args, flag.field) for flag in made if hasattr(args, flag.field)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def model_flags(*only: str) -> list[Flag]:
    """Flags of Options. `--seed` is left to the request's parameters: a command runs requests of its own only."""
    from ..options import Options

    return flags(Options, only=only, without=("seed",))


def sampling_flags() -> list[Flag]:
    """Flags of SamplingParams."""
    from ..sampling.params import SamplingParams

    return flags(SamplingParams)


def add_generation(parser: argparse.ArgumentParser, up_to_context: bool = False) -> None:
    """Flags of a command that loads a model and generates.

    Args:
        up_to_context: the command's answers end where the context does, unless --max-tokens is given.
    """
    sampling = sampling_flags()
    if up_to_context:
        text = "of the answer, at least 1; default as many as the context holds."
        sampling = [replace(flag, default="", help=text) if flag.field == "max_tokens" else flag for flag in sampling]
    add(parser, "model and engine", model_flags())
    add(parser, "sampling", sampling)
