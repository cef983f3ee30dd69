"""Time to read the header of a GGUF file with 150,000 tokens and as many merges (or of the files that are named)."""

from __future__ import annotations

import random
import struct
import sys
import tempfile
import time
from pathlib import Path

from nano_vllm.sources.gguf import read_header

COUNT = 150_000


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def sample(path: Path) -> None:
    """A header like that of a byte-level BPE vocabulary: mostly ASCII, with the letters that stand for spaces and bytes."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstĠé", k=draw.randint(1, 12))) for _ in range(2 * COUNT)]
    entries = []
    for key, values in (("tokenizer.ggml.tokens", words[:COUNT]), ("tokenizer.ggml.merges", words[COUNT:])):
        entries.append(text(key) + struct.pack("<IIQ", 9, 8, COUNT) + b"".join(map(text, values)))
    entries.append(text("tokenizer.ggml.token_type") + struct.pack(f"<IIQ{COUNT}i", 9, 5, COUNT, *[1] * COUNT))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.gguf"
        sample(made)
        for path in map(Path, sys.argv[1:] or [made]):
            times = []
            for _ in range(9):
                begun = time.perf_counter()
                read_header(path)
                times.append(time.perf_counter() - begun)
            print(f"{path.name}: best {min(times) * 1e3:.0f} ms, median {sorted(times)[4] * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
