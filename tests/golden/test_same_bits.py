"""Same request, same bits: the logits of every step are equal alone, batched, cached, chunked and preempted.

One sha256 per request over the float32 logits of all its steps; SmolLM2 on the CPU backend.
"""

from __future__ import annotations

import hashlib
import random

import pytest

from nano_vllm import LLM, SamplingParams, _native

NEW = 6


def prompts() -> list[list[int]]:
    """Lengths around block and split borders, some with a common beginning; the last has 1,500 tokens."""
    rng = random.Random(0)
    common = [rng.randrange(20, 40000) for _ in range(300)]
    lengths = [1, 15, 16, 17, 31, 32, 33, 64, 100, 255, 256, 257]
    made = [[rng.randrange(20, 40000) for _ in range(n)] for n in lengths]
    made += [common[:n] + [rng.randrange(20, 40000) for _ in range(m)] for n, m in [(64, 3), (64, 9), (300, 1), (256, 40)]]
    return made


LONG = [random.Random(1).randrange(20, 40000) for _ in range(1500)]


def hashes(llm: LLM, asked: list[list[int]], together: bool, new: int = NEW) -> list[str]:
    """sha256 of all logits of each request."""
    digests = [hashlib.sha256() for _ in asked]
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)

    def start(i: int, box: list) -> None:
        observe = lambda row: digests[i].update(row.tobytes())  # noqa: E731
        requests.append(llm._loaded.engine.make_request(asked[i], params, box.append, observe=observe))

    boxes = [[] for _ in asked]
    for group in [range(len(asked))] if together else [[i] for i in range(len(asked))]:
        requests: list = []
        for i in group:
            start(i, boxes[i])
        llm._thread.submit(requests)
        while llm._thread.call(lambda engine: engine.busy):
            pass
    for box in boxes:
        assert [u.finish_reason for u in box][-1] == "length" and sum(len(u.ids) for u in box) == new
    return [d.hexdigest() for d in digests]


@pytest.fixture(scope="module")
def expected(smollm2_path) -> list[str]:
    """Each request alone, two threads, no prefix cache, whole prompt in one chunk."""
    with LLM(str(smollm2_path), backend="cpu", threads=2, enable_prefix_caching=False, max_num_batched_tokens=2048) as llm:
        return hashes(llm, prompts(), together=False)


VARIANTS = {
    "batch of all": {},
    "one thread": {"threads": 1},
    "chunk of 16": {"max_num_batched_tokens": 16},
    "chunk of 100": {"max_num_batched_tokens": 100},
    "block of 1024": {"block_size": 1024},
    "preempted": {"num_blocks": 40},
} | {f"block of {size}": {"block_size": size} for size in (32, 64, 128, 256, 512)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_bits(variant, smollm2_path, expected):
    with LLM(str(smollm2_path), backend="cpu", **VARIANTS[variant]) as llm:
        assert hashes(llm, prompts() * (2 if variant == "batch of all" else 1), together=True)[: len(expected)] == expected
        if variant == "preempted":
            assert llm.stats()["preemptions"] > 0


def test_same_bits_cold_and_warm_cache(smollm2_path, expected):
    with LLM(str(smollm2_path), backend="cpu") as llm:
        assert hashes(llm, prompts(), together=False) == expected
        assert hashes(llm, prompts(), together=False) == expected
        assert llm.stats()["prefix_hit_tokens"] > 1000


def test_same_bits_of_a_long_prompt(smollm2_path):
    """1,500 tokens: whole, in chunks, and as a cache hit."""
    seen = set()
    for options in ({"max_num_batched_tokens": 2048, "threads": 1}, {"max_num_batched_tokens": 256}, {"block_size": 1024}):
        with LLM(str(smollm2_path), backend="cpu", **options) as llm:
            seen.update(hashes(llm, [LONG, LONG], together=False, new=2))
    assert len(seen) == 1


@pytest.mark.parametrize("isa", _native.instruction_sets())
def test_same_bits_on_every_instruction_set(isa, smollm2_path, expected):
    """Alone and batched on each set; and since lanes are outputs everywhere, the sets agree with each other, too."""
    some = [3, 7, 10]
    with LLM(str(smollm2_path), backend="cpu", isa=isa, max_num_batched_tokens=64) as llm:
        assert hashes(llm, [prompts()[i] for i in some], together=True) == [expected[i] for i in some]
