"""Writes docs/cli.md from the commands' own flags: `python docs/write_cli.py` (or `make docs`). A test compares the two."""

from __future__ import annotations

from pathlib import Path

from nano_vllm import cli, registry
from nano_vllm.cli import _flags
from nano_vllm.options import Options
from nano_vllm.sampling.params import SamplingParams

INTRODUCTION = """\
# Command line

Written by `docs/write_cli.py` from what the commands say of themselves; `nano-vllm COMMAND --help` prints the same.

Answers go to stdout, everything else to stderr. `run`, `chat`, `generate` and `perplexity` end with one line on stderr:

- prompt tokens, and how many of those that had to be computed were computed per second until the first token;
- output tokens, and how many per second after the first, with the bytes that these steps read: all weights once a step, and the
  keys and values of every earlier token;
- the time from the prompt's arrival to its first token, and the most memory the process has had (by the kernel's count).

A terminal too narrow for the line gets it in fewer words (`in`, `out`, `t/s`), with the same figures in the same order.

Exit codes: 0, 1 something failed, 2 wrongly asked (one sentence says what to do), 130 stopped by Ctrl-C, 141 the reader of the
output left. `--log-level debug` shows where an error was raised, before its sentence.

What is not given comes from the model's generation_config, then from the defaults below. Environment variables: `NANO_VLLM_CACHE`
(`--cache-dir`), `NANO_VLLM_LOG_LEVEL` (`--log-level`), `NANO_VLLM_ISA` (`--isa`); a flag wins.
"""


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def table(flags: list[_flags.Flag]) -> str:
    """Flags of a dataclass as a table."""
    rows = ["| flag | default | |", "|---|---|---|"]
    for flag in flags:
        no = f", `--no-{flag.name[2:]}`" if flag.kind == "bool" else ""
        short = f"`{_flags.SHORT[flag.field]}`, " if flag.field in _flags.SHORT else ""
        rows.append(f"| {short}`{flag.name}`{no} | {cell(flag.default)} | {cell(flag.help)} |")
    return "\n".join(rows)


def command(name: str) -> str:
    """A command's usage, its own arguments, and which of the shared flags it takes."""
    parser = cli.parser(name)
    shared = {flag.name: (cls, flag) for cls in (Options, SamplingParams) for flag in _flags.flags(cls)}
    own, taken = [], {"Options": [], "SamplingParams": []}
    for action in parser._actions:
        flag = next((f for f in action.option_strings if f in shared), None)
        if flag:
            taken["SamplingParams" if flag == "--seed" else shared[flag][0].__name__].append(flag)
        elif action.dest != "help":
            value = f" {action.metavar}" if action.option_strings and action.metavar else ""
            own.append(f"- `{', '.join(action.option_strings) or action.metavar or action.dest}{value}`: {action.help}")
    every = {"Options": len(_flags.model_flags()), "SamplingParams": len(_flags.sampling_flags())}
    words = {"Options": "model and engine options", "SamplingParams": "sampling options"}
    lines = [f"## {name}", "", f"`{parser.usage}`", "", f"{parser.description[0].upper()}{parser.description[1:]}.", "", *own]
    for kind, flags in taken.items():
        if len(flags) == every[kind]:
            lines.append(f"- all {words[kind]}")
        elif flags:
            lines.append(f"- of the {words[kind]}: {', '.join(f'`{flag}`' for flag in flags)}")
    return "\n".join(lines)


def page() -> str:
    """The text of docs/cli.md."""
    parts = [INTRODUCTION.rstrip()]
    parts += [command(name) for name in registry.names("cli")]
    parts += [
        "## Model and engine options",
        "The keywords of `LLM(…)` are the same, with underscores.",
        table(_flags.model_flags()),
    ]
    sampling = "The fields of `SamplingParams`. `run` and `chat` leave `--max-tokens` open: up to the context."
    parts += ["## Sampling options", sampling, table(_flags.sampling_flags())]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(page(), "utf-8")
