"""Time to import the package, and to build the default model's tokenizer: what every start waits for."""

from __future__ import annotations

import subprocess
import sys
import time

from nano_vllm.sources.catalog import fetch
from nano_vllm.sources.gguf import read_header
from nano_vllm.text.tokenizer import Tokenizer

IMPORT = "import time; begun = time.perf_counter(); import nano_vllm{}; print(time.perf_counter() - begun)"


def imported(more: str) -> float:
    """Seconds, in a process of its own."""
    return float(subprocess.run([sys.executable, "-c", IMPORT.format(more)], capture_output=True, text=True, check=True).stdout)


def built(metadata: dict) -> float:
    begun = time.perf_counter()
    Tokenizer.from_gguf(metadata)
    return time.perf_counter() - begun


def main() -> None:
    metadata = read_header(fetch("smollm2")).metadata
    for name, seconds in (
        ("import nano_vllm", lambda: imported("")),
        ("import nano_vllm; nano_vllm.LLM", lambda: imported("; nano_vllm.LLM")),
        ("tokenizer of the default model", lambda: built(metadata)),
    ):
        times = sorted(seconds() for _ in range(9))
        print(f"{name:<34}best {times[0] * 1e3:4.0f} ms, median {times[4] * 1e3:4.0f} ms")


if __name__ == "__main__":
    main()
