"""benchmarks/gpu.py and its picture of a profile, without a card: a made-up trace, and an engine without a model."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import gpu, gpu_profile
from nano_vllm.bench.limits import Limits
from nano_vllm.engine.backend import Ceilings
from nano_vllm.model.program import lower
from nano_vllm.registry import load

COPY = "Memcpy DtoH (Device -> Pinned)"


def trace(steps: int, kernels: int, gap: float = 0.0) -> list[dict]:
    """Steps of 100 µs: kernels back to back, of which every second one overlaps the one before by half, then a gap, then 2 µs of
    a copy; a slow first step that is no part of steady decode; and what is not the device's."""
    found = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 10**6}, {"ph": "M", "name": "process_name"}]
    names = ("_few", "_attend", "nvjet_tst_128x64", "_rotate", "unheard_of", "_pick")
    begin = 5000.0
    found.append({"ph": "X", "cat": "kernel", "name": "_prefill", "ts": 10.0, "dur": 1.0})
    for _ in range(steps):
        each = (98 - gap) / kernels
        for k in range(kernels):
            ahead = each / 2 if k % 2 else 0
            what = {"ph": "X", "cat": "kernel", "name": names[k % len(names)]}
            found.append(what | {"ts": begin + k * each - ahead, "dur": each + ahead})
        found.append({"ph": "X", "cat": "gpu_memcpy", "name": COPY, "ts": begin + 98, "dur": 2.0})
        begin += 100
    return found


@pytest.fixture
def written(tmp_path):
    def make(name: str, events: list[dict]):
        path = tmp_path / name
        path.write_text(json.dumps({"traceEvents": events[::-1]}))
        return path

    return make


@pytest.mark.parametrize("gap", [0, 3, 50])
def test_the_share_of_time_in_which_nothing_runs(written, gap):
    events = gpu_profile.read(written("t.json", trace(40, 30, gap)))
    assert len(events) == 1 + 40 * 31 and events == sorted(events, key=lambda e: e.begin)
    assert gpu_profile.idle(events) == pytest.approx(gap, abs=1e-6)


def test_kinds_are_told_from_names():
    kinds = {"_attend": "attention", "_product": "products", "void cutlass::Kernel2": "products", "_normalize": "rows"}
    kinds |= {"_pick": "sampling", COPY: "copies", "unheard_of": "other"}
    assert {name: gpu_profile.Event(name, 0, 1).kind for name in kinds} == kinds


def test_a_trace_without_steady_decode_is_refused(written):
    with pytest.raises(ValueError, match="2 copies to the host"):
        gpu_profile.idle(gpu_profile.read(written("t.json", trace(2, 3))))


def test_the_picture_shows_three_steps_of_each_trace_and_is_small(written, tmp_path, capsys):
    """180 and 720 kernels a step: five and twenty for each of 36 layers."""
    target = tmp_path / "p.svg"
    paths = {"1 stream": written("a.json", trace(40, 180, 2)), "<256>": written("b.json", trace(40, 720))}
    gpu_profile.write(paths, target)
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("1 stream: the device does nothing for 2.00 %") and "0.00 %" in out[1]
    assert target.stat().st_size < 100_000
    root = ElementTree.parse(target).getroot()
    space = "{http://www.w3.org/2000/svg}"
    words = [t.text for t in root.iter(f"{space}text")]
    assert "1 stream: 100 µs a step; the device does nothing for 2.0 % of the time" in words
    assert {"nothing 2 %", "nothing 0 %", "copies 2 %", "µs", "0", "200"} <= set(words)
    paths = [p.get("d") for p in root.iter(f"{space}path") if p.get("fill")]
    assert sum(d.count("M") for d in paths) == 3 * (180 + 1 + 1) + 3 * (720 + 1)
    spans = [span for d in paths for span in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", d)]
    assert len(spans) == sum(d.count("M") for d in paths)
    for x, width in spans:
        assert gpu_profile.LEFT <= float(x) <= float(x) + float(width) <= gpu_profile.WIDTH - 20 + 0.02  # their rounding


def test_works_are_told_beside_their_limits(monkeypatch):
    """With runs of made-up seconds."""
    seen = []

    def run(engine, phase, temperature):
        seen.append((len(phase), sum(len(ids) for ids, _ in phase), {new for _, new in phase}, temperature))
        return {"seconds": 2.0, "first_s": 1.0, "tokens": sum(new for _, new in phase), "steps": 9, "prefix_hits": 0}

    monkeypatch.setattr(gpu, "run", run)
    engine, rng = type("Engine", (), {"vocab_size": 151936}), np.random.default_rng(0)
    found = {work: gpu.measure(engine, work, 0, rng) for work in gpu.FIGURES}
    assert found["W1"] == {"output tok/s": 133_966 / 2, "s": 2.0, "steps": 9}
    assert found["W2"] == {"first token ms": 2000.0, "decode tok/s": 511.0}
    assert found["W2x64"] == {"decode tok/s": 64 * 511.0}
    assert found["W3"]["prefill tok/s"] == 16 * 2048 / 2
    assert seen[0][:2] == (256, 142_827) and seen[0][3] == 0.6 and seen[-1][0] == 1024 and seen[-1][3] == 0.6
    one = [(1, 128, {8}, 0.0)] * 2 + [(1, 128, {1}, 0.0)] * 7 + [(1, 128, {512}, 0.0)] * 3
    assert seen[1:-1] == [*one, (64, 8192, {512}, 0.0), *[(16, 32768, {1}, 0.0)] * 4]
    limits = Limits(Ceilings(1e12, 1e12, "bf16"), 10**9, 10**5, 10**8, 10**8, 256, 8192)
    rows = gpu.summary("W1", [found["W1"], found["W1"] | {"output tok/s": 50_000.0}], limits)
    assert rows.startswith("W1, median of 2: output tok/s 58,491.50 (50,000 to 66,983) = ") and "s 2.00 (2.00 to 2.00)" in rows
    # 127 tokens read 1 ms of weights; 128 are multiplied in 12.9 ms
    assert gpu.shares("W2", found["W2"], limits)["first token ms"] == pytest.approx((12.9, 100 * 12.9 / 2000))
    # 511 steps read 1 ms of weights, and 64 · (128 + 256) keys on average; that many tokens are multiplied in 12.8 ms
    assert gpu.shares("W2x64", found["W2x64"], limits)["decode tok/s"][0] == pytest.approx(64 / 12.8e-3)


def test_limits_of_w1_are_those_of_arithmetic():
    """Qwen3-0.6B's shape at 4.26 TB/s and 756 TFLOP/s: K/V 3.24 s, weights 0.29 s, prompts 0.17 s for 133,966 tokens."""
    from nano_vllm.bench.limits import multiply_adds

    program = lower(load("architectures", "qwen3").describe(gpu.COMMON | gpu.SHAPES["0.6b"]))
    every, drawn = multiply_adds(program)
    weights = 2 * (every + drawn)
    assert weights == pytest.approx(1.19e9, rel=0.01)
    limits = Limits(Ceilings(4.26e12, 756e12 / 2, "bf16"), weights, 28 * 2 * 8 * 128 * 2, every, drawn, 256, 8192)
    shares = gpu.shares("W1", {"output tok/s": 36_000.0}, limits)["output tok/s"]
    assert shares[0] == pytest.approx(133_966 / (3.24 + 0.29 + 0.17), rel=0.01) and shares[1] == pytest.approx(99.5, abs=1)
