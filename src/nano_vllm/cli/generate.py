"""`nano-vllm generate`: raw text in, its continuation out; several prompts run as one batch."""

from __future__ import annotations

import argparse
import sys

from . import _flags

HELP = "continue raw texts, no chat template; several run as one batch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="prompt",
        help="texts to continue; several answers have headings; without any, stdin is the text",
    )
    _flags.add_generation(parser)


def heading(number: int, prompt: str) -> str:
    """The line before one of several continuations, as `head` and `tail` write it before one of several files."""
    words = " ".join(prompt.split())
    return f"==> {number}: {words if len(words) <= 60 else words[:59] + '…'} <=="


def main(args: argparse.Namespace) -> int:
    """Prints the continuation, or those of several prompts in their order with a heading each; 1 where one of them failed."""
    from . import _meter, _model, _text

    given = _model.checked(args)
    prompts = [_text.argument(text, f"prompt {i}") for i, text in enumerate(args.prompts, 1)] or [_text.prompt(None)]
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
            for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), 1):
                print("\n" * (number > 1) + heading(number, prompt), output.text, sep="\n", flush=True)
                if output.error is not None:
                    print(f"nano-vllm: prompt {number} failed: {' '.join(str(output.error).split())}", file=sys.stderr)
                    code = 1
        meter.tell()
    return code
