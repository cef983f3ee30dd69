"""The command line: one file per command.

A command is a file in this folder with HELP (one line), `add_arguments(parser)` and `main(args) -> int` (the exit code).
Only the command that is asked for is imported, and a command imports what is heavy when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys

from .. import registry
from ..errors import NanoVLLMError, OptionError, UnknownOption

INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + the signal's number, as shells report it


class Parser(argparse.ArgumentParser):
    """An argument parser that raises OptionError instead of printing its usage and leaving."""

    def error(self, message: str):
        raise OptionError(message.removeprefix("argument "), "", f"See {self.prog} --help.")


def usage() -> str:
    """The text of `nano-vllm --help`."""
    commands = "\n".join(f"  {name:<12}{module.HELP}" for name, module in registry.modules("cli").items())
    return (
        "usage: nano-vllm COMMAND [options]\n\n"
        f"commands:\n{commands}\n\n"
        "  nano-vllm COMMAND --help    a command's options\n"
        "  nano-vllm --version         the version"
    )


def parser(command: str) -> Parser:
    """The parser of one command."""
    module = registry.load("cli", command)
    made = Parser(prog=f"nano-vllm {command}", description=module.HELP, allow_abbrev=False)
    module.add_arguments(made)
    words = ["[options]"]
    for action in made._actions:
        if not action.option_strings:
            name = action.metavar or action.dest
            words.append({"?": f"[{name}]", "*": f"[{name} ...]"}.get(action.nargs, name))
    made.usage = " ".join([made.prog, *words])
    return made


def parse(command: str, argv: list[str]) -> argparse.Namespace:
    """Arguments of `command`; an unknown flag raises UnknownOption naming the nearest one."""
    made = parser(command)
    args, unknown = made.parse_known_args(argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        if not flag.startswith("-"):
            raise OptionError(f"one argument too many, {flag!r}", "", "Put a text of several words in quotes.")
        flags = [f for action in made._actions for f in action.option_strings]
        if flag in flags and "--" in argv:
            raise OptionError(f"{flag} stands behind --", "what follows -- is text", "Put the options before it.")
        mend = registry.nearest(flag, flags) or f"See nano-vllm {command} --help."
        raise UnknownOption(f"{command} has no option {flag}", "", mend)
    return args


def _dispatch(argv: list[str]) -> int:
    if argv[:1] == ["help"] and argv[1:]:
        argv = [argv[1], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        from ..version import version

        print(f"nano-vllm {version()}")
        return 0
    command, known = argv[0], registry.names("cli")
    if command not in known:
        mend = registry.nearest(command, known) or f"Commands are: {', '.join(known)}."
        raise UnknownOption(f"no command {command!r}", "", mend)
    args = parse(command, argv[1:])
    import logging

    logging.basicConfig(format="nano-vllm: %(message)s")
    code = registry.load("cli", command).main(args)
    sys.stdout.flush()
    return code


def _debugging(argv: list[str]) -> bool:
    """Whether tracebacks are wanted: --log-level debug, or the same from the environment. Must not raise."""
    from .. import options

    for i, word in enumerate(argv):
        if word.startswith("--log-level"):
            return "debug" in (word, *argv[i + 1 : i + 2]) or word.endswith("=debug")
    try:
        return options.options().log_level == "debug"
    except NanoVLLMError:
        return False


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, 1 failed, 2 wrongly asked, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`>&-`): nobody wants to read it
            setattr(sys, name, open(os.devnull, "w"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the answer
    try:
        return _dispatch(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left (`| head`). What is still buffered must not raise again when Python closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except NanoVLLMError as error:
        if _debugging(argv):
            print(_raised(error), file=sys.stderr)
        print(f"nano-vllm: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if _debugging(argv):
            raise
        text = " ".join(str(error).split())
        print(f"nano-vllm: {type(error).__name__}: {text} (--log-level debug shows where)", file=sys.stderr)
        return 1


def _raised(error: NanoVLLMError) -> str:
    """Where an expected error was raised, and what led to it, without its own text: that follows as the sentence it always is."""
    import traceback

    text, own = traceback.format_exception(error), traceback.format_exception_only(error)
    return "nano-vllm: debug: where the error below was raised\n" + "".join(text[: -len(own)]).rstrip()
