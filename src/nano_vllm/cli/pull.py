"""`nano-vllm pull`: fetches a model, so that later commands need no network."""

from __future__ import annotations

import argparse

from . import _flags

HELP = "fetch a model into the cache folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="alias (smollm2) or Hugging Face id")
    _flags.add(parser, "where and what", _flags.model_flags("revision", "cache_dir", "log_level"))


def main(args: argparse.Namespace) -> int:
    """Prints the path of the file or folder; a progress bar goes to stderr where that is a terminal."""
    from ..options import options
    from ..sources import catalog
    from ..sources.resolve import resolve

    asked = options(**_flags.asked(args, _flags.model_flags("revision", "cache_dir", "log_level")))
    if args.name in catalog.ALIASES:
        catalog.discard_damaged(args.name, asked)
    print(resolve(args.name, asked))
    return 0
