"""What storing costs: perplexity of the licence text by file format and cache type, beside llama.cpp on the same files.

    python benchmarks/formats.py [--models m1-q8_0 FILE.gguf …] [--cache f16 …] [--windows N]

Windows of 512 tokens, second halves scored, as in fidelity.py. The Q8_0, Q4_0 and Q4_K_M files are requantised from SmolLM2's
Q4_1 (cpu/models.py): their lines compare engines and caches, not formats as
a quantiser would make them from the original weights. llama.cpp keeps keys and values in f16. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from cpu.models import KNOWN, prepare
from fidelity import WINDOW, Engines, losses, windows_of
from licence_text import licence_text

from nano_vllm import perplexity, registry
from nano_vllm.backends import cpu
from nano_vllm.errors import NanoVLLMError
from nano_vllm.options import cache_dir, options

MODELS = ("m1-q8_0", "m1-q4_0", "m1-q4_1", "m1-q4_k_m")


def ours(engines: Engines, dtype: str, windows: np.ndarray) -> str:
    try:
        session = registry.load("backends", "cpu").open(engines.program, engines.opened.weights, engines.plan("cpu", dtype))
    except NanoVLLMError as error:
        print(error)
        return "refused"
    try:
        return f"{perplexity.perplexity(session, windows.reshape(-1), WINDOW).value:.4f}"
    finally:
        session.close()


def theirs(engines: Engines, windows: np.ndarray) -> str:
    try:
        logits_of = engines.llama_cpp()
    except ImportError:
        return "not there"
    return f"{math.exp(np.concatenate([losses(logits_of(window), window) for window in windows]).mean()):.4f}"


def main(args: argparse.Namespace) -> None:
    windows = None
    for name in args.models:
        path = prepare(name, args.folder)
        engines = Engines(options(model=str(path), max_model_len=WINDOW))
        if windows is None:  # all files have one vocabulary
            ids = engines.tokenizer.encode(licence_text().decode(), parse_special=False)
            windows = windows_of(np.array(ids, np.int32), args.windows)
            print(f"\n{'perplexity':<16}{'MB':>7}" + "".join(f"{dtype:>11}" for dtype in args.cache) + f"{'llama.cpp':>11}")
        print(f"{name if name in KNOWN else path.name:<16}{path.stat().st_size / 1e6:>7.1f}", end="", flush=True)
        for dtype in args.cache:
            print(f"{ours(engines, dtype, windows):>11}", end="", flush=True)
        print(f"{theirs(engines, windows):>11}", flush=True)
        engines.opened.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, types = parser.add_argument, list(cpu.CACHE_TYPES)
    add("--models", nargs="+", default=list(MODELS), help=f"of {', '.join(KNOWN)}, or GGUF files of one vocabulary")
    add("--cache", nargs="+", default=types, choices=types, help="types of the cache (default all)")
    add("--windows", type=int, default=37, metavar="N", help="how many windows, spread over the text (default all 37)")
    add("--folder", type=Path, default=cache_dir() / "benchmarks", help="where the files that it makes are kept")
    main(parser.parse_args())
