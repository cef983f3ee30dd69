"""`nano-vllm bench`: its workloads, what the machine would allow, and the command on a tiny model."""

from __future__ import annotations

import json
import math

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from nano_vllm import cli
from nano_vllm.backends import reference
from nano_vllm.bench import limits, running, table, workloads
from nano_vllm.engine.backend import Ceilings
from nano_vllm.engine.engine import Engine
from nano_vllm.errors import OptionError, PromptTooLong
from nano_vllm.model.program import lower
from nano_vllm.model.spec import parameters
from nano_vllm.model.weights import open_model

from .fake import VOCAB, FakeSession, make_plan
from .models import CONFIG, numbers, write_folder

SIZES = workloads.Sizes.of(4, 24, 8, 2)
LINES = {line.key: line for line in workloads.lines(SIZES, workloads.GROUPS)}


def test_the_mixed_workload_is_the_one_that_peers_were_measured_with():
    """Counted by the script that measured them: 133,966 tokens of answers and 142,827 of prompts."""
    phase = workloads.mixed(256, (100, 1024), (100, 1024), 0, 151936)
    assert sum(new for _, new in phase) == 133_966 and sum(len(ids) for ids, _ in phase) == 142_827
    assert phase[0][0][:4] == [6311, 6890, 663, 4242]  # of Random(0), after the first length
    again = workloads.mixed(256, (100, 1024), (100, 1024), 3, 151936)
    assert [(len(ids), new) for ids, new in again] == [(len(ids), new) for ids, new in phase]
    assert all(a[0][:16] != b[0][:16] for a, b in zip(phase, again))


def test_three_numbers_make_w1_to_w4():
    sizes = workloads.Sizes.of(256, 1024, 1024, 3)
    assert (sizes.batch, sizes.prompt_range, sizes.answer_range, sizes.queue) == (256, (100, 1024), (100, 1024), 1024)
    assert (sizes.prompt, sizes.new, sizes.prefill, sizes.prompts) == (128, 512, (2048,), 16)


@pytest.mark.parametrize("asked", [(1, 1, 2), (4, 24, 8), (3, 19, 19), (256, 1024, 1024)])
def test_requests_are_counted_and_none_is_longer_than_said(asked):
    sizes = workloads.Sizes.of(*asked, 1)
    for line in workloads.lines(sizes, workloads.GROUPS):
        phases = workloads.lengths(line.run, sizes)
        assert sum(len(phase) for phase in phases) == workloads.requests(line.run, sizes)
        assert all(new >= 1 for phase in phases for _, new in phase)
        assert max(len(ids) + new for phase in phases for ids, new in phase) <= sizes.longest_request


def engine(**plan) -> Engine:
    made = make_plan(num_blocks=400, **plan)
    return Engine(FakeSession(made), VOCAB)


def test_measured_figures_are_those_of_the_runs(monkeypatch):
    """With a clock that counts the engine's steps."""
    made, seen, ended = engine(max_num_seqs=4), [], []
    monkeypatch.setattr(running.time, "perf_counter", lambda: float(made.stats.steps))
    figures = running.measure(made, list(LINES.values()), SIZES, seen.append, lambda: ended.append(1))
    assert list(figures) == list(LINES) and all(len(values) == 2 for values in figures.values())
    assert seen == list(dict.fromkeys(line.run for line in LINES.values()))
    assert len(ended) == 2 * sum(workloads.requests(run, SIZES) for run in seen)
    assert figures["decode"] == [1.0, 1.0]  # a step each
    assert figures["first_token"] == [1000.0, 1000.0]
    batch = workloads.lengths("batch", SIZES)[0]
    assert figures["batch_4"][0] >= sum(new for _, new in batch) / (2 + max(new for _, new in batch))
    assert figures["queue_16"][0] < 4  # no more run at once
    made.check()


def test_no_prompt_is_found_again_but_those_that_share():
    made = engine(max_num_seqs=4)
    rng = workloads.np.random.default_rng(0)
    sizes = workloads.Sizes.of(4, 60, 8, 2)
    for run in ("one", "batch", "queue", "batch", "queue", "shared_after_one"):
        repeat = made.stats.steps  # another one each time
        told = [running.run(made, phase) for phase in workloads.draw(run, sizes, rng, repeat, VOCAB)]
        assert [t["prefix_hits"] for t in told] == ([0, 3 * 48] if run == "shared_after_one" else [0])


def test_what_an_engine_refuses_or_fails_is_raised():
    made = engine(max_model_len=32)
    with pytest.raises(PromptTooLong):
        running.run(made, [([1] * 40, 2)])
    made.session.fail_on = len(made.session.steps) + 1
    with pytest.raises(Exception, match="on fire"):
        running.run(made, [([1, 2, 3], 4)])


def test_multiply_adds_are_the_matrices(tmp_path):
    opened = open_model(write_folder(tmp_path / "m"))
    program, shapes = lower(opened.spec), parameters(opened.spec)
    opened.close()
    matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name != "embedding"}
    every, drawn = limits.multiply_adds(program)
    assert every + drawn == sum(matrices.values())
    # of the last layer, rows that are not drawn from need keys and values alone
    assert drawn == matrices["head"] + sum(
        n for name, n in matrices.items() if name.startswith(("layers.1.mlp", "layers.1.attention.out"))
    )


def test_limits_are_the_larger_of_reading_and_multiplying():
    slow_memory = limits.Limits(Ceilings(1e3, 1e9, "int8"), 1000, 10, 500, 50, 2, 64)
    slow_product = limits.Limits(Ceilings(1e9, 1e3, "int8"), 1000, 10, 500, 50, 2, 64)
    phase = [([0] * 100, 5), ([0] * 20, 1), ([0] * 10, 7)]
    # 130 tokens are three steps of 64; of 4 + 0 + 6 later tokens 2 run at once, the longest answer needs 6 steps
    keys = (4 * 100 + 1 + 2 + 3 + 4) + (6 * 10 + 1 + 2 + 3 + 4 + 5 + 6)
    assert slow_memory.prompts(phase) == 3.0 and slow_memory.answers(phase) == pytest.approx(6 + keys * 10 / 1e3)
    assert slow_product.prompts(phase) == pytest.approx((130 * 500 + 3 * 50) / 1e3)
    assert slow_product.answers(phase) == pytest.approx(10 * 550 / 1e3)
    line = LINES["batch_4"]
    assert slow_memory.figure(line, [phase]) == pytest.approx(13 / (9 + keys / 100))
    assert slow_memory.figure(LINES["first_token"], [phase]) == 3000.0
    assert slow_memory.figure(LINES["shared_together"], [phase]) is None
    assert limits.percent(line, 50, 200) == 25 and limits.percent(LINES["first_token"], 4, 1) == 25


def test_a_table_has_medians_spreads_and_limits():
    wanted = [LINES[key] for key in ("decode", "first_token", "shared_together")]
    figures = {"decode": [12_345.0, 9.5, 200.0], "first_token": [4.0], "shared_together": [1.0, 2.0]}
    rows = table.table(wanted, figures, {"decode": 400.0, "first_token": 1.0, "shared_together": None}).splitlines()
    assert rows[1].split() == "decode, one stream, tok/s 200.0 9.50 to 12,345 400.0 50 %".split()
    assert rows[2].split() == "first token of 24, ms 4.00 1.00 25 %".split()
    assert rows[3].split() == "4 sharing 24, together, s 1.50 1.00 to 2.00".split()
    assert max(map(len, rows)) <= 80
    assert "limit" not in table.table(wanted, figures, {})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model of 128 positions and a tokenizer."""
    folder = write_folder(tmp_path_factory.mktemp("tiny") / "model", numbers(CONFIG))
    Tokenizer(BPE({chr(97 + i): i for i in range(26)}, [])).save(str(folder / "tokenizer.json"))
    return folder


SMALL = ("--backend", "reference", "--num-prompts", "2", "--input-len", "10", "--output-len", "4", "--num-iters", "2")


def test_the_command_prints_a_table_and_writes_its_figures(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reference, "ceilings", lambda options: Ceilings(1e12, 1e12, "f32"), raising=False)
    path = tmp_path / "figures.json"
    assert cli.main(["bench", str(model), *SMALL, "--json", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("on reference, f32 cache, medians of 2") and "1,000.0 GB/s" in out[1]
    titles = [row.split(", tok/s")[0].split(", ms")[0].strip() for row in out[4:9]]
    assert titles == ["decode, one stream", "first token of 10", "prefill 20", "2 requests at once", "8 requests, in turn"]
    assert all(row.endswith("%") for row in out[4:9]) and len(out) == 11
    found = json.loads(path.read_text())
    assert found["backend"] == "reference" and found["sizes"]["batch"] == 2 and found["ceilings"]["multiplied"] == "f32"
    assert set(found["figures"]) == {line.key for line in workloads.lines(workloads.Sizes.of(2, 10, 4, 2), cli.bench.UNASKED)}
    assert all(len(values) == 2 and min(values) > 0 for values in found["figures"].values())
    assert found["limits"]["decode"] > found["figures"]["decode"][0] and found["limits"]["shared_together"] is None


def test_without_ceilings_there_are_no_limits_and_lengths_that_are_not_asked_for_fit(model, capsys):
    words = [
        "bench",
        str(model),
        "--backend",
        "reference",
        "--num-prompts",
        "1",
        "--num-iters",
        "1",
        "--only",
        "prefill",
        "latency",
    ]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "limit" not in out and "GB/s" not in out and "prefill 126" in out and "requests" not in out


@pytest.mark.parametrize(
    "words, part",
    [
        (["--num-prompts", "0"], "--num-prompts 0 is not valid"),
        (["--output-len", "1"], "--output-len 1 is not valid"),
        (["--only", "speed"], "invalid choice: 'speed'"),
        (["--json", "/nowhere/at/all.json"], "there is no such folder"),
        (["--input-len", "64"], "the context holds 128"),
        (["-m", "another"], "two models are named"),
    ],
)
def test_what_cannot_be_meant_is_refused(model, words, part, capsys):
    assert cli.main(["bench", str(model), "--backend", "reference", *words]) == OptionError.exit_code
    assert part in capsys.readouterr().err
