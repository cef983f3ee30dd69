"""The benchmark's arithmetic on made-up figures, and the files that it writes against the gguf package."""

from __future__ import annotations

import io
import json
import sys
from xml.etree import ElementTree

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from benchmarks.cpu import __main__ as main
from benchmarks.cpu import engines, models, plot, report
from nano_vllm.bench import workloads
from nano_vllm.model.weights import open_model

from .models import numbers, write_gguf

SIZES = workloads.Sizes()
LINES = {line.key: line for line in workloads.lines(SIZES, list(workloads.GROUPS))}
SHAPE = models.Shape(hidden=256, mlp=96, layers=2, heads=4, kv_heads=2, head_size=32, vocabulary=60)
FACTS = {"weight_bytes": 90e6, "kv_bytes_per_token": 50_000, "layers": 10**8, "head": 512 * 10**8, "logits_sha256": "abc"}
CEILINGS = {"bytes_per_s": 20e9, "int8_per_s": 400e9}


def result(**changes) -> dict:
    made = {
        "model": "m1-q4_1", "megabytes": 98.0, "engines": ["nano-vllm", "llama.cpp", "OpenVINO"], "facts": FACTS, "absent": {},
        "hits": {"fresh": 0, "shared": 3},
        "figures": {
            "decode": {"nano-vllm": [190.0, 200.0, 1.0], "llama.cpp": [100.0, 80.0, 120.0], "OpenVINO": [50.0]},
            "first_token": {"nano-vllm": [60.0], "llama.cpp": [90.0], "OpenVINO": []},
            "prefill_512": {"nano-vllm": [1000.0], "llama.cpp": [500.0], "OpenVINO": [2000.0]},
        },
    }  # fmt: skip
    return made | changes


def test_a_table_has_medians_ratios_and_fractions():
    wanted = [LINES[key] for key in ("decode", "first_token", "prefill_512")]
    rows = report.table(result(), wanted, CEILINGS, SIZES).splitlines()
    # 190 tok/s × (90 MB + 192 tokens × 50 kB) = 18.9 GB/s of 20
    assert rows[1].split() == "decode, one stream, tok/s 190.0 100.0 1.90 50.0 3.80 18.9 GB/s, 95 % of the bandwidth".split()
    assert rows[2].split() == "first token of 128, ms 60.0 90.0 1.50 – –".split()
    # 1000 tok/s × (100 M + 51.2 G / 512) = 200 G/s of 400
    assert (
        rows[3].split() == "prefill 512, tok/s 1,000 500.0 2.00 2,000 0.50 200 G multiply-adds/s, 50 % of the int8 peak".split()
    )
    assert "prompts 0, in them 3" in rows[4] and rows[5].endswith("abc")


def test_what_is_absent_is_told():
    why = {"OpenVINO": f"not installed (openvino): {engines.INSTALL['OpenVINO']}"}
    figures = {"decode": {"nano-vllm": [10.0], "llama.cpp": [5.0]}}
    text = report.table(result(absent=why, figures=figures), [LINES["decode"]], CEILINGS, SIZES)
    assert text.splitlines()[1].split()[4:] == ["10.0", "5.00", "2.00", "–", "–", *"1.0 GB/s, 5 % of the bandwidth".split()]
    assert "OpenVINO: not installed" in text and "pip install openvino-genai" in text


def test_the_best_peer_is_of_any_file_of_the_model():
    figures = {"decode": {"nano-vllm": [500.0], "llama.cpp": [160.0]}, "first_token": {"OpenVINO": [30.0]}}
    other = result(model="m1-q4_0", figures=figures)
    alone = result(model="m2-q8_0")
    text = report.beside_the_best([result(), other, alone], [LINES["decode"], LINES["first_token"]])
    first, second = text.splitlines()[1:]
    assert first.split() == "m1-q4_1: decode, one stream 1.19 × llama.cpp on m1-q4_0, 160.0 tok/s".split()
    assert second.split() == "m1-q4_1: first token of 128 0.50 × OpenVINO on m1-q4_0, 30.0 ms".split()
    assert report.beside_the_best([alone], [LINES["decode"]]) == ""


def test_figures_of_phases():
    one = [{"seconds": 1.5, "first_s": 0.23, "tokens": 128}]
    two = [{"seconds": 2.0, "first_s": 1.0, "tokens": 32}, {"seconds": 3.0, "first_s": 0.5, "tokens": 480}]
    wanted = {"decode": 100.0, "first_token": 230.0, "prefill_512": 512 / 1.5, "batch_32": 128 / 1.5, "scaling_8": 128 / 1.5}
    for key, value in wanted.items():
        assert workloads.figure(LINES[key], one) == pytest.approx(value)
    assert workloads.figure(LINES["shared_after_one"], two) == 5.0


def test_prompts_are_fresh_and_lengths_are_not():
    rng = np.random.default_rng(5)
    for line in LINES.values():
        first, second = (workloads.draw(line.run, SIZES, rng, repeat) for repeat in (0, 1))
        lengths = [[(len(ids), new) for ids, new in phase] for phase in first]
        assert lengths == [[(len(ids), new) for ids, new in phase] for phase in second]
        assert first[0][0][0][:16] != second[0][0][0][:16]
        assert max(a + b for phase in lengths for a, b in phase) <= SIZES.longest_request
    (alone,), rest = workloads.draw("shared_after_one", SIZES, rng, 0)
    assert len(rest) == 15 and all(ids[:1024] == alone[0][:1024] and ids[1024:] != alone[0][1024:] for ids, _ in rest)
    batch = workloads.draw("batch", SIZES, rng, 0)[0]
    assert len(batch) == 32 and len({tuple(ids[:16]) for ids, _ in batch}) == 32


class Told:
    """A worker that tells made-up seconds, and fails at its `fails`-th phase."""

    def __init__(self, engine: str, seconds: float, fails: int = 10**9) -> None:
        self.engine, self.seconds, self.fails, self.absent, self.phases = engine, seconds, fails, None, []

    def __call__(self, phase) -> dict | None:
        self.phases.append(phase)
        if len(self.phases) >= self.fails:
            self.absent = "failed"
            return None
        return {"seconds": self.seconds, "first_s": self.seconds / 2, "tokens": 128, "prefix_hits": 7}


def test_engines_take_turns_on_the_same_prompts_and_one_that_fails_is_left_out():
    ours, theirs, broken = Told("nano-vllm", 1.0), Told("llama.cpp", 2.0), Told("OpenVINO", 3.0, fails=3)
    wanted = [LINES[key] for key in ("decode", "first_token", "shared_after_one")]
    figures, hits = main.run_all([ours, theirs, broken], wanted, SIZES.with_repeats(2))
    assert figures["first_token"] == {"nano-vllm": [500.0] * 2, "llama.cpp": [1000.0] * 2, "OpenVINO": [1500.0]}
    assert figures["shared_after_one"] == {"nano-vllm": [2.0] * 2, "llama.cpp": [4.0] * 2, "OpenVINO": []}
    assert ours.phases == theirs.phases and len(ours.phases) == 3 + 2 * 3 and len(broken.phases) == 3
    assert hits == {"fresh": 7 * (3 + 3 + 2), "shared": 7 * 2 * (6 + 6) // 2}


def test_a_worker_says_what_is_missing_and_what_failed(monkeypatch, capsys):
    settings = {"model": "m", "threads": 1, "longest": 9, "requests": 1}
    monkeypatch.setitem(sys.modules, "openvino", None)
    engines.work("OpenVINO", settings)
    assert json.loads(capsys.readouterr().out) == {"absent": f"not installed (openvino): {engines.INSTALL['OpenVINO']}"}

    class Broken:
        def __init__(self, **settings) -> None:
            self.asked = settings

        def run(self, phase: list) -> dict:
            return {"tokens": 10 // phase[0][1]}

    monkeypatch.setitem(engines.ENGINES, "broken", Broken)
    monkeypatch.setattr(sys, "stdin", io.StringIO("[[[1], 2]]\n[[[1], 0]]\n"))
    engines.work("broken", settings)
    ready, answer, failed = map(json.loads, capsys.readouterr().out.splitlines())
    assert ready == {"ready": True} and answer == {"tokens": 5} and "ZeroDivisionError" in failed["absent"]


def test_an_engine_is_asked_for_its_groups_alone():
    ours, server = Told("nano-vllm", 1.0), Told("llama-server", 2.0)
    wanted = [LINES[key] for key in ("decode", "prefill_512", "scaling_1")]
    assert [line.group for line in wanted] == ["latency", "prefill", "scaling"]
    figures, _ = main.run_all([ours, server], wanted, SIZES.with_repeats(1))
    assert figures["scaling_1"] == {"nano-vllm": [128.0], "llama-server": [64.0]}
    assert figures["decode"]["llama-server"] == figures["prefill_512"]["llama-server"] == []
    assert (len(ours.phases), len(server.phases)) == (6, 2)


def test_a_plot_has_its_points_in_order():
    figures = {f"scaling_{n}": {"nano-vllm": [n * 10.0, n * 12.0, n * 11.0], "<peer>": [20.0 + n]} for n in (1, 8, 2)}
    curves = report.curves(result(figures=figures))
    assert curves["nano-vllm"] == [(1, 11.0), (2, 22.0), (8, 88.0)]
    root = ElementTree.fromstring(plot.svg(curves, "a & b"))
    space = "{http://www.w3.org/2000/svg}"
    ours, peer = [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()] for line in root.iter(f"{space}polyline")
    ]
    assert [x for x, _ in ours] == sorted(x for x, _ in ours) == [x for x, _ in peer]
    distances = np.diff([x for x, _ in ours])  # one doubling, then two
    assert distances[1] == pytest.approx(2 * distances[0], abs=0.2)
    base = plot.HEIGHT - plot.BOTTOM
    assert (base - ours[2][1]) / (base - ours[0][1]) == pytest.approx(8, rel=0.02)
    assert all(plot.TOP <= y <= base for _, y in ours + peer)
    words = [t.text for t in root.iter(f"{space}text")]
    assert {"a & b", "<peer>", "1", "2", "8", "0", "100"} <= set(words)


def test_grid_steps():
    assert [plot.step(most) for most in (5, 88, 100, 1700, 0.3)] == pytest.approx([1, 20, 20, 500, 0.1])


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "v.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([chr(ord("a") + i) for i in range(20)])
    writer.add_token_types([gguf.TokenType.NORMAL] * 20)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    models.finish(writer)
    return path


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
def test_random_files(kind, vocabulary, tmp_path):
    path = tmp_path / "random.gguf"
    models.write_random(path, kind, vocabulary, SHAPE)
    reader = gguf.GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    assert set(tensors) == set(SHAPE.tensors())
    for name, shape in SHAPE.tensors().items():
        tensor = tensors[name]
        assert tuple(tensor.shape[::-1]) == shape
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if len(shape) == 1:
            assert (values == 1).all()
        else:
            embedding = name == "token_embd.weight" and kind == "Q4_0"
            assert tensor.tensor_type == (Type.Q6_K if embedding else Type[kind])
            assert np.isfinite(values).all() and values.std() == pytest.approx(0.02, rel=0.25)
            # nibbles are −8 to 7: half a step below 0 on average
            assert values.mean() == pytest.approx(-0.5 * 0.02 / 4.6 if tensor.tensor_type == Type.Q4_0 else 0, abs=1e-3)
            assert len(np.unique(values[0])) > 10 and not np.array_equal(values[0], values[1])
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == len(set(tokens)) == SHAPE.vocabulary
    layer = 256 * 128 * 2 + 256 * 64 * 2 + 3 * 256 * 96
    assert models.multiply_adds(path) == (2 * layer, 60 * 256)
    open_model(path)  # raises where a parameter is missing or of a wrong shape


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_requantised_files(kind, tmp_path):
    source, target = write_gguf(tmp_path / "source.gguf", numbers()), tmp_path / "target.gguf"
    models.requantise(source, target, kind)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(target)
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert new.name == old.name and list(new.shape) == list(old.shape)
        matrix = old.name.startswith("blk.") and len(old.shape) == 2
        assert new.tensor_type == (Type[kind] if matrix else old.tensor_type)
        a, b = (gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in (old, new))
        # half a step of the largest block; 4 bits reach 7 steps on one side only, a step short; and the scale's own rounding
        steps = (1 / 8 if kind == "Q4_0" else 1 / 254) + 2**-11
        assert np.abs(a - b).max() <= (np.abs(a).max() * steps if matrix else 0)
    skip = {"general.file_type", "GGUF.kv_count"}
    for key in before.fields.keys() - skip:
        assert after.fields[key].contents() == before.fields[key].contents(), key
