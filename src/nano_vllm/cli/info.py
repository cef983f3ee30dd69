"""`nano-vllm info`: what a model is and what would be decided for it, from its header alone."""

from __future__ import annotations

import argparse

from . import _flags

HELP = "what a model holds, what is planned for it, and what each backend says"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="model", help="alias, Hugging Face id, folder or .gguf file; the same as --model")
    _flags.add(parser, "model and engine", _flags.model_flags())
