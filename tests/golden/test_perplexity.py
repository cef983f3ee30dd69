"""Perplexity of SmolLM2 (Q4_1) on the licence text: windows of 512, second halves scored, beside what transformers (float32,
dequantised weights) and llama.cpp (the file itself) have on the same windows (make_smollm2_perplexity.py).
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from nano_vllm import perplexity
from nano_vllm.loading import load
from nano_vllm.options import options

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from licence_text import FOLDER, licence_text  # noqa: E402

STORED = json.loads((Path(__file__).parents[1] / "fixtures" / "smollm2_perplexity.json").read_text())

WINDOW = 512
OTHER_LLAMA_CPP = 15.876  # with flash_attn=True, which the script leaves off

needs_text = pytest.mark.skipif(not FOLDER.is_dir(), reason="the text is made of files that Debian has")


def opened(backend: str, path: Path):
    return load(options(model=str(path), backend=backend, max_model_len=WINDOW, num_blocks=WINDOW // 16))


@needs_text
def test_cpu_is_within_half_a_percent_of_llama_cpp(smollm2_path):
    loaded = opened("cpu", smollm2_path)
    try:
        found = perplexity.of_text(loaded, licence_text().decode(), WINDOW)
    finally:
        loaded.close()
    assert (found.windows, found.tokens) == (STORED["windows"], STORED["tokens"])
    peers = [value for name, value in STORED["perplexity"].items() if name.startswith("llama_cpp")]
    for theirs in (*peers, OTHER_LLAMA_CPP):
        assert abs(found.value / theirs - 1) <= 0.005


@needs_text
def test_reference_is_transformers(smollm2_path):
    """Every third window, each by itself. For all, `nano-vllm perplexity FILE --backend reference` takes minutes.

    The bound is a hundredth of the whole text's perplexity, as a part of the loss.
    """
    loaded, theirs = opened("reference", smollm2_path), STORED["window_losses"]["transformers"]
    bound = 0.01 / STORED["perplexity"]["transformers"]
    try:
        ids = np.array(loaded.tokenizer.encode(licence_text().decode(), parse_special=False))
        assert len(ids) // WINDOW == len(theirs) == STORED["windows"]
        for w in range(0, len(theirs), 3):
            found = perplexity.perplexity(loaded.engine.session, ids[w * WINDOW : (w + 1) * WINDOW], WINDOW)
            assert abs(math.log(found.value) - theirs[w]) <= bound, f"window {w}"
    finally:
        loaded.close()


def test_the_whole_texts_perplexity_is_that_of_its_windows():
    """So that the test above, window by window, speaks of the whole text."""
    for name, losses in STORED["window_losses"].items():
        assert math.exp(sum(losses) / len(losses)) == pytest.approx(STORED["perplexity"][name], abs=1e-4)
