"""Perplexity of SmolLM2 (Q4_1) on the licence text: 37 windows of 512, second halves scored, beside what transformers (float32,
dequantised weights) and llama.cpp (the file itself) have on the same windows (make_smollm2_perplexity.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nano_vllm import perplexity
from nano_vllm.loading import load
from nano_vllm.options import options

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from licence_text import FOLDER, licence_text  # noqa: E402

STORED = json.loads((Path(__file__).parents[1] / "fixtures" / "smollm2_perplexity.json").read_text())

needs_text = pytest.mark.skipif(not FOLDER.is_dir(), reason="the text is made of files that Debian has")


def measure(backend: str, path: Path) -> perplexity.Perplexity:
    loaded = load(options(model=str(path), backend=backend, max_model_len=512, num_blocks=32))
    try:
        return perplexity.of_text(loaded, licence_text().decode(), 512)
    finally:
        loaded.close()


@needs_text
def test_cpu_is_within_half_a_percent_of_llama_cpp(smollm2_path):
    found = measure("cpu", smollm2_path)
    assert (found.windows, found.tokens) == (STORED["windows"], STORED["tokens"])
    assert abs(found.value / STORED["perplexity"]["llama_cpp"] - 1) <= 0.005


@needs_text
def test_reference_is_transformers(smollm2_path):
    found = measure("reference", smollm2_path)
    assert (found.windows, found.tokens) == (STORED["windows"], STORED["tokens"])
    assert abs(found.value - STORED["perplexity"]["transformers"]) <= 0.01
