"""`nano-vllm run`: one prompt, one streamed answer."""

from __future__ import annotations

import argparse
import sys

from ..errors import OptionError
from . import INTERRUPTED, _flags

HELP = "answer a prompt, streaming; it is an argument, stdin, or both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; text from stdin follows it after a blank line")
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the model's chat template")
    _flags.add_generation(parser, up_to_context=True)


def stream(llm, args: argparse.Namespace, prompt: str, params):
    """The stream of pieces that the flags ask for."""
    if args.raw:
        return llm.stream(prompt, params)
    system = [{"role": "system", "content": args.system}] if args.system else []
    return llm.stream_chat([*system, {"role": "user", "content": prompt}], params)


def main(args: argparse.Namespace) -> int:
    """Answers up to the end of text or of the context, unless --max-tokens is given."""
    from . import _meter, _model, _text

    if args.raw and args.system:
        raise OptionError("--system needs the chat template", "--raw leaves it out", "Put the system text into the prompt.")
    given = _model.checked(args)
    prompt = _text.prompt(args.prompt)
    args.system = args.system and _text.argument(args.system, "the system message")
    with _model.loaded(args) as llm:
        meter = _meter.Meter.of(llm.stats())
        answer = _meter.Answer(llm, stream(llm, args, prompt, _model.params(llm, given, max_tokens=None)), meter)
        try:
            answer.show()
            code = 0
        except KeyboardInterrupt:
            code = INTERRUPTED
        if not answer.text.endswith("\n"):
            print()
        sys.stdout.flush()
        meter.tell()
    return code
