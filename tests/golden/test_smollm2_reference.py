"""SmolLM2, greedy, five prompts: the tokens of transformers in float32 on the dequantised weights (make_smollm2_greedy.py)."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from nano_vllm import registry
from nano_vllm.model.program import lower
from nano_vllm.model.weights import open_model

from ..backends import tiny

STORED = json.loads((Path(__file__).parents[1] / "fixtures" / "smollm2_greedy.json").read_text())
CASES = STORED["cases"]
STEPS = 64


@pytest.fixture(scope="module")
def model(smollm2_path):
    assert sha256(smollm2_path.read_bytes()).hexdigest() == STORED["sha256"], "the fixture is of another file"
    opened = open_model(smollm2_path)
    yield opened
    opened.close()


def opened(backend: str, kv: str, model):
    return registry.load("backends", backend).open(lower(model.spec), model.weights, tiny.plan(backend, kv, num_blocks=64))


def generate(session) -> np.ndarray:
    """(prompts, STEPS) ids of all prompts at once, through the cache, as a session of 64 blocks draws them."""
    blocks = [list(range(8 * i, 8 * i + 8)) for i in range(len(CASES))]
    parts, drawn = ([(np.array(case["prompt_ids"]), 0, b) for case, b in zip(CASES, blocks)], [])
    for _ in range(STEPS):
        ids = session.submit(tiny.batch(parts, "last", want_logits=False)).result().ids.copy()
        drawn.append(ids)
        parts = [(np.array([i]), first + len(given), b) for i, (given, first, b) in zip(ids, parts)]
    return np.stack(drawn, axis=1)


def test_reference_gives_transformers_tokens(model):
    session = opened("reference", "f32", model)
    for ids, case in zip(generate(session), CASES):
        assert ids.tolist() == case["ids"], case["prompt"]
    session.close()


def test_cpu_first_differs_where_two_tokens_are_nearly_alike(model):
    """llama.cpp's own rounding of this file turns gaps of up to 0.22 on such prompts."""
    session = opened("cpu", "f16", model)
    for ids, case in zip(generate(session), CASES):
        differs = np.flatnonzero(ids != np.array(case["ids"]))
        if len(differs):
            step = int(differs[0])
            gap = case["gaps"][step]
            print(f"{case['prompt']!r} first differs at token {step}, where the two likeliest logits are {gap} apart")
            assert gap <= 0.3
    session.close()


def test_cpu_keeps_the_likeliest_two_apart_as_llama_cpp_does(model):
    """Both round activations to int8, and such errors are as good as random: theirs is the budget for ours."""
    session = registry.load("backends", "cpu").open(lower(model.spec), model.weights, tiny.plan("cpu", "f16"))
    steps, errors = np.arange(STEPS), []
    for case in CASES:
        ids = np.array(case["prompt_ids"] + case["ids"][:-1])
        logits = session.submit(tiny.batch([(ids, 0, list(range(8)))])).result().logits[-STEPS:]
        errors.append(logits[steps, case["ids"]] - logits[steps, case["seconds"]] - np.array(case["gaps"]))
    session.close()
    assert np.sqrt(np.mean(np.concatenate(errors) ** 2)) <= STORED["llama_cpp_gap_error"]


def test_prompts_are_encoded_as_by_llama_cpp(model):
    tokenizer = model.tokenizer()
    for case in CASES:
        assert list(tokenizer.encode(case["prompt"])) == case["prompt_ids"]
