"""`nano-vllm convert`: a model into a `.nano` file."""

from __future__ import annotations

import argparse
import sys

HELP = "write a model as a .nano file, which opens by being mapped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="alias, Hugging Face id, folder, .gguf or .nano file")
    parser.add_argument("destination", help="the .nano file; it comes into being once it is whole")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")


def main(args: argparse.Namespace) -> int:
    """Prints the path of the file; a progress bar goes to stderr where that is a terminal."""
    from ..conversion import convert_model

    print(convert_model(args.source, args.destination, force=args.force, progress=sys.stderr.isatty()))
    return 0
