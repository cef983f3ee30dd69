"""`nano-vllm generate`: raw text in, its continuation out; several prompts run as one batch."""

from __future__ import annotations

import argparse
import time

from . import _flags

HELP = "continue raw texts, without chat template; several run as one batch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="prompt", help="a text to continue; without any, stdin is the text")
    _flags.add_generation(parser)


def main(args: argparse.Namespace) -> int:
    """Prints each continuation on lines of its own, in the order of the prompts."""
    from . import _meter, _model, _text

    given = _model.checked(args)
    prompts = args.prompts or [_text.prompt(None)]
    with _model.loaded(args) as llm:
        meter = _meter.Meter.of(llm)
        if len(prompts) == 1:
            answer = _meter.Answer(llm, llm.stream(prompts[0], _model.params(llm, given)), meter)
            answer.show()
            print()
        else:
            begun = time.perf_counter()
            outputs = llm.generate(prompts, _model.params(llm, given))
            meter.batch(outputs, time.perf_counter() - begun)
            for output in outputs:
                print(output.text)
        meter.tell()
    return 0
