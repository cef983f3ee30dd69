"""Same request, same bits: the logits of every step are equal alone, batched, cached, chunked and preempted, on one thread and
several, and on every instruction set: lanes are outputs everywhere, so the sets agree with each other, too.

One sha256 per request over the float32 logits of all its steps; SmolLM2 on the CPU backend. Everything is compared with one
run, on the widest set.
"""

from __future__ import annotations

import hashlib
import queue
import random

import pytest

from nano_vllm import LLM, SamplingParams, _native
from nano_vllm.memory.machine import usable_cpus

THREADS = min(2, usable_cpus())
ISAS = _native.instruction_sets()
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
    for group in [range(len(asked))] if together else [[i] for i in range(len(asked))]:
        updates: queue.SimpleQueue = queue.SimpleQueue()
        requests = [
            llm._thread.engine.make_request(
                asked[i], params, updates.put, observe=lambda row, i=i: digests[i].update(row.tobytes())
            )
            for i in group
        ]
        llm._thread.submit(requests)
        ends: list[str] = []
        while len(ends) < len(requests):
            if (reason := updates.get(timeout=300).finish_reason) is not None:
                ends.append(reason)
        assert ends == ["length"] * len(requests) and all(r.output_length == new for r in requests)
    return [d.hexdigest() for d in digests]


@pytest.fixture(scope="module")
def expected(smollm2_path) -> list[str]:
    """Each request alone, no prefix cache, whole prompt in one chunk."""
    options = {"threads": THREADS, "enable_prefix_caching": False, "max_num_batched_tokens": 2048}
    with LLM(str(smollm2_path), backend="cpu", **options) as llm:
        return hashes(llm, prompts(), together=False)


@pytest.fixture(scope="module")
def expected_long(smollm2_path) -> str:
    """1,500 tokens in one chunk."""
    with LLM(str(smollm2_path), backend="cpu", threads=THREADS, max_num_batched_tokens=2048) as llm:
        return hashes(llm, [LONG], together=False, new=2)[0]


VARIANTS = {
    "batch of all": {},
    "one thread": {"threads": 1},
    "chunk of 16": {"max_num_batched_tokens": 16},
    "chunk of 100, one thread": {"max_num_batched_tokens": 100, "threads": 1},
    "preempted": {"num_blocks": 40},
} | {f"block of {size}": {"block_size": size} for size in (32, 64, 128, 256, 512, 1024)}


def opened(path, isa: str, **options) -> LLM:
    return LLM(str(path), **({"backend": "cpu", "isa": isa, "threads": THREADS} | options))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("isa", ISAS)
def test_same_bits(isa, variant, smollm2_path, expected):
    with opened(smollm2_path, isa, **VARIANTS[variant]) as llm:
        assert hashes(llm, prompts() * (2 if variant == "batch of all" else 1), together=True)[: len(expected)] == expected
        if variant == "preempted":
            assert llm.stats()["preemptions"] > 0


@pytest.mark.parametrize("isa", ISAS)
def test_same_bits_cold_and_warm_cache(isa, smollm2_path, expected):
    with opened(smollm2_path, isa) as llm:
        assert hashes(llm, prompts(), together=False) == expected
        cold = llm.stats()["prefix_hit_tokens"]
        assert hashes(llm, prompts(), together=False) == expected
        assert llm.stats()["prefix_hit_tokens"] - cold > 1000


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 2048, "threads": 1}, {"block_size": 1024}], ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_same_bits_of_a_long_prompt(isa, options, smollm2_path, expected_long):
    """1,500 tokens, whole or in chunks of 512, and again as a cache hit."""
    with opened(smollm2_path, isa, **options) as llm:
        assert hashes(llm, [LONG, LONG], together=False, new=2) == [expected_long] * 2


def test_a_converted_file_has_the_same_bits(expected, smollm2_path, tmp_path):
    """The matrices lie in a `.nano` file as the kernels read them, and are used there."""
    from nano_vllm.conversion import convert_model

    with LLM(convert_model(smollm2_path, tmp_path / "m.nano"), num_blocks=300, threads=THREADS) as llm:
        assert hashes(llm, prompts(), together=True) == expected
