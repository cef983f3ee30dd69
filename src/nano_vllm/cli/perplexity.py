"""`nano-vllm perplexity`: how well a model predicts a text; the measure of what a format or a backend costs."""

from __future__ import annotations

import argparse
import sys
import time

from . import _flags

HELP = "perplexity of a text file, comparable with llama.cpp's"
FIELDS = (
    "model",
    "tokenizer",
    "revision",
    "backend",
    "kv_cache_dtype",
    "block_size",
    "max_num_batched_tokens",
    "threads",
    "isa",
    "cache_dir",
    "log_level",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a UTF-8 text; - is stdin")
    parser.add_argument("--window", type=_flags.number(int), default=512, metavar="N", help="tokens per window (default 512)")
    _flags.add(parser, "model and backend", _flags.model_flags(*FIELDS))


def progress(done: int, total: int, value: float) -> None:
    """One line that is overwritten, where stderr is a terminal."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rwindow {done} of {total}, perplexity {value:.4f} ", end=end, file=sys.stderr, flush=True)


def main(args: argparse.Namespace) -> int:
    """Prints value ± standard error on stdout."""
    from .. import perplexity
    from ..loading import load
    from ..options import options
    from . import _meter, _text

    text = _text.read_file(args.file)
    loaded = load(options(**_flags.asked(args, _flags.model_flags(*FIELDS))))
    session = loaded.engine.session
    meter = _meter.Meter(session.weight_bytes, session.kv_bytes_per_token)
    try:
        begun = time.perf_counter()
        found = perplexity.of_text(loaded, text, args.window, progress)
        seconds = time.perf_counter() - begun
    finally:
        loaded.close()
    print(
        f"perplexity {found.value:.4f} ± {found.stderr:.4f} "
        f"({found.tokens:,} tokens scored in {found.windows} windows of {args.window})",
        flush=True,
    )
    meter.add([_meter.Counted(found.windows * (args.window - 1), 0, 0, seconds, seconds)], found.steps)
    meter.tell()
    return 0
