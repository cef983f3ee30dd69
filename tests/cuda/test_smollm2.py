"""SmolLM2 on a card, unpacked to bf16 and with the matrices packed as its file has them, beside transformers in float32 on the
dequantised weights: by the rule that tests/golden holds the CPU backend to. Skipped where there is no card."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the backend is PyTorch's")
pytest.importorskip("triton", reason="Triton has no package for this system")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from nano_vllm.backends import cuda  # noqa: E402
from nano_vllm.backends.cuda.kernels.packed import Packed  # noqa: E402
from nano_vllm.formats import pack  # noqa: E402
from nano_vllm.model.program import lower  # noqa: E402
from tests.backends import tiny  # noqa: E402
from tests.golden.test_smollm2_reference import CASES, STEPS, STORED, generate, model  # noqa: E402, F401

BLOCKS = list(range(8))


def unpacked(weights) -> dict:
    tensors = {name: weights[name] for name in weights}
    return {n: pack(n, t.unpack(), "bf16" if len(t.info.shape) == 2 else "f32") for n, t in tensors.items()}


@pytest.fixture(params=["bf16", "packed"])
def session(model, request):  # noqa: F811
    weights = model.weights if request.param == "packed" else unpacked(model.weights)
    made = cuda.open(lower(model.spec), weights, tiny.plan("cuda", "bf16", num_blocks=64, dtype="bf16"))
    kinds = {isinstance(matrix, Packed) for matrix in made.runner.weights.matrices.values()}
    assert kinds == {request.param == "packed"}
    yield made
    made.close()


def in_one_step(session, case) -> np.ndarray:
    """(STEPS, vocabulary) logits that the case's tokens were taken from, all tokens in a step."""
    ids = np.array(case["prompt_ids"] + case["ids"][:-1])
    return session.submit(tiny.batch([(ids, 0, BLOCKS)])).result().logits[-STEPS:].copy()


def one_by_one(session, case) -> np.ndarray:
    """The same, but each answer's token in a step of its own."""
    parts = [(np.array(case["prompt_ids"]), 0)]
    parts += [(np.array([token]), len(case["prompt_ids"]) + i) for i, token in enumerate(case["ids"][:-1])]
    steps = [session.submit(tiny.batch([(ids, first, BLOCKS)], "last")).result().logits.copy() for ids, first in parts]
    return np.concatenate(steps)


@pytest.mark.parametrize("logits", [in_one_step, one_by_one])
def test_the_likeliest_two_are_kept_apart_as_by_llama_cpp(session, logits):
    steps, errors = np.arange(STEPS), []
    for case in CASES:
        found = logits(session, case)
        errors.append(found[steps, case["ids"]] - found[steps, case["seconds"]] - np.array(case["gaps"]))
    error = np.sqrt(np.mean(np.concatenate(errors) ** 2))
    print(f"gaps are off by {error:.4f} (rms); llama.cpp's by {STORED['llama_cpp_gap_error']:.4f}")
    assert error <= STORED["llama_cpp_gap_error"]


def test_answers_first_differ_where_two_tokens_are_nearly_alike(session):
    for ids, case in zip(generate(session), CASES):
        differs = np.flatnonzero(ids != np.array(case["ids"]))
        if len(differs):
            gap = case["gaps"][int(differs[0])]
            print(f"{case['prompt']!r} first differs at token {differs[0]}, where the two likeliest logits are {gap} apart")
            assert gap <= 0.3
