"""`nano-vllm generate`: raw text in, its continuation out; several prompts run as one batch."""

from __future__ import annotations

import argparse
import sys

from . import _flags

HELP = "continue raw texts, no chat template; several run as one batch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="prompt", help="a text to continue; without any, stdin is the text")
    _flags.add_generation(parser)


def main(args: argparse.Namespace) -> int:
    """Prints each continuation on lines of its own, in the order of the prompts; 1 where one of them failed."""
    from . import _meter, _model, _text

    given = _model.checked(args)
    prompts = args.prompts or [_text.prompt(None)]
    code = 0
    with _model.loaded(args) as llm:
        meter = _meter.Meter.of(llm.stats())
        if len(prompts) == 1:
            answer = _meter.Answer(llm, llm.stream(prompts[0], _model.params(llm, given)), meter)
            answer.show()
            print()
        else:
            before = llm.stats()["steps"]
            outputs = llm.generate(prompts, _model.params(llm, given))
            meter.add([_meter.Counted.of(output) for output in outputs], llm.stats()["steps"] - before)
            for number, output in enumerate(outputs, 1):
                print(output.text, flush=True)
                if output.error is not None:
                    print(f"nano-vllm: prompt {number} failed: {' '.join(str(output.error).split())}", file=sys.stderr)
                    code = 1
        meter.tell()
    return code
