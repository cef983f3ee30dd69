"""The native session: same request, same bits however it is computed; wrong steps are refused; every byte is counted."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from nano_vllm.backends import cpu
from nano_vllm.errors import BackendUnavailable, BatchError, EngineClosed, ModelFileError, OptionError, UnsupportedModel
from nano_vllm.model.program import lower
from tests.backends import tiny

from . import models

LENGTH = 530  # crosses two borders of splits
SPECS = {
    "plain": dict(heads=9, kv_heads=3, head_size=64),
    "window": dict(heads=4, kv_heads=2, head_size=16, window=40, layers=2),
    "wide group": dict(heads=8, kv_heads=1, head_size=32, window=300),
    "super-blocks": dict(heads=4, kv_heads=2, head_size=64, hidden=256, mlp=256),
}
MIXED = {"attention.k": "q5_k", "attention.v": "q6_k", "mlp.down": "q6_k", "mlp.up": "f16", "": "q4_k"}


def whole(spec, length=LENGTH, **settings) -> np.ndarray:
    session = models.session(spec, **settings)
    return models.logits(session, [(models.ids(length), 0, models.blocks(session, length))])


def in_chunks(session, cuts, length=LENGTH, table=None) -> np.ndarray:
    table = table or models.blocks(session, length)
    edges = [0, *cuts, length]
    return np.concatenate([models.logits(session, [(models.ids(length)[a:b], a, table)]) for a, b in zip(edges, edges[1:])])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("isa", models.ISAS)
@pytest.mark.parametrize("format, kv", [("q4", "f16"), ("f32", "bf16"), ("q4", "int16"), ("f32", "int8")])
def test_threads_and_chunks_do_not_change_a_bit(name, isa, format, kv):
    format = MIXED if name == "super-blocks" and format == "q4" else format
    spec, settings = models.model(**SPECS[name]), dict(format=format, kv=kv, isa=isa)
    right = whole(spec, threads=1, **settings)
    assert np.isfinite(right).all()
    np.testing.assert_array_equal(whole(spec, threads=3, **settings), right)
    for threads, cuts in ((1, (1, 2, 7, 40, 256, 300)), (2, (270, 512, 513, 528, 529))):
        ours = in_chunks(models.session(spec, threads=threads, **settings), cuts)
        np.testing.assert_array_equal(ours, right, err_msg=f"{threads} threads, {cuts}")


@pytest.mark.parametrize("block_size", [16, 32, 64, 1024])
def test_block_size_does_not_change_a_bit(block_size):
    spec = models.model(**SPECS["plain"])
    np.testing.assert_array_equal(whole(spec, block_size=block_size, format="q8"), whole(spec, threads=1, format="q8"))


@pytest.mark.parametrize("format", ["q4", "f16", MIXED], ids=["q4", "f16", "super-blocks"])
def test_alone_or_in_a_batch_gives_the_same_bits(format):
    spec = models.model(**SPECS["super-blocks" if format == MIXED else "plain"])
    lengths, prompts = (1, 33, 270, 7), [models.ids(n, seed=n) for n in (1, 33, 270, 7)]
    alone = []
    for ids in prompts:
        session = models.session(spec, format)
        alone.append(models.logits(session, [(ids, 0, models.blocks(session, len(ids)))]))
    session, first, parts = models.session(spec, format), 0, []
    for n, ids in zip(lengths, prompts):
        parts.append((ids, 0, models.blocks(session, n, first)))
        first += -(-n // 16)
    # a step with the beginnings of all but one, then decode rows beside a prefill
    cut = [(ids[: n - 1], 0, table) for (ids, _, table), n in zip(parts[1:], lengths[1:])]
    models.logits(session, cut, wanted="last")
    rest = [parts[0]] + [(ids[n - 1 :], n - 1, table) for (ids, _, table), n in zip(parts[1:], lengths[1:])]
    together = models.logits(session, rest, wanted="last")
    for ours, right in zip(together, alone):
        np.testing.assert_array_equal(ours, right[-1])
    np.testing.assert_array_equal(models.logits(session, parts, wanted="last"), [a[-1] for a in alone])


def test_wanted_rows_are_those_rows():
    session = models.session(models.model())
    ids, table = models.ids(20), models.blocks(session, 20)
    every = models.logits(session, [(ids, 0, table)])
    batch = tiny.batch([(ids, 0, table)])
    some = np.array([0, 3, 4, 19], np.int32)
    picked = dataclasses.replace(batch, wanted=some, sampling=tiny.greedy(4), want_logits=np.array([True, False, True, False]))
    result = session.submit(picked).result()
    np.testing.assert_array_equal(result.logits, every[[0, 4]])
    np.testing.assert_array_equal(result.ids, [-1, every[3].argmax(), -1, every[19].argmax()])
    none = dataclasses.replace(batch, wanted=some[:0], sampling=tiny.greedy(0), want_logits=np.zeros(0, bool))
    result = session.submit(none).result()
    assert result.logits is None and len(result.ids) == 0


def test_ids_come_from_the_step_before():
    session = models.session(models.model())
    table = models.blocks(session, 40)
    first = session.submit(tiny.batch([(models.ids(20), 0, table)], "last", want_logits=False)).result().ids
    promised = tiny.batch([(np.array([0]), 20, table)], "last")
    taken = session.submit(dataclasses.replace(promised, sources=np.zeros(1, np.int32))).result().logits
    session = models.session(models.model())
    right = models.logits(session, [(np.append(models.ids(20), first), 0, table)], "last")
    np.testing.assert_array_equal(taken, right)


@pytest.mark.parametrize(
    "fault",
    [
        dict(tokens=np.full(20, models.VOCAB, np.int32)),
        dict(tokens=np.full(20, -1, np.int32)),
        dict(positions=np.arange(20, dtype=np.int32)[::-1]),
        dict(positions=np.arange(20, dtype=np.int32) + 100_000),
        dict(positions=np.arange(20, dtype=np.int32) - 1),
        dict(block_tables=(np.array([[0, -1]], np.int32),)),
        dict(block_tables=(np.array([[0, 10_000]], np.int32),)),
        dict(starts=np.array([0, 21], np.int32)),
        dict(starts=np.array([0, 0, 20], np.int32)),
        dict(wanted=np.array([20], np.int32)),
        dict(wanted=np.array([-1], np.int32)),
        dict(sources=np.full(20, 5, np.int32)),
    ],
    ids=str,
)
def test_a_wrong_step_is_refused_at_both_doors(fault):
    session = models.session(models.model())
    batch = tiny.batch([(models.ids(20), 0, [1, 0])], "last")
    wrong = dataclasses.replace(batch, **fault)
    with pytest.raises(BatchError):
        session.submit(wrong)
    if "sources" not in fault:
        with pytest.raises(ValueError):
            session.native.run(*(np.ascontiguousarray(a, np.int32) for a in (
                wrong.tokens, wrong.positions, wrong.starts, wrong.block_tables[0], wrong.wanted)))  # fmt: skip
    assert np.isfinite(session.submit(batch).result().logits).all()  # and does no harm


def test_more_rows_than_planned_are_refused():
    session = models.session(models.model(), max_rows=8)
    with pytest.raises(BatchError, match="more rows"):
        session.submit(tiny.batch([(models.ids(9), 0, [0])]))


def test_memory_is_counted_and_close_frees_it():
    spec = models.model(hidden=256, mlp=512, layers=4)
    session = models.session(spec, format="q4", tokens=4096)
    parameters = sum(np.prod(s) for s in session.program.parameters.values())
    memory = session.memory()
    assert (
        0.5625 * parameters <= memory["weights"] <= 0.75 * parameters
    )  # 4.5 bits a weight; rows padded to 32 and float32 vectors
    tokens = session.plan.num_blocks * session.plan.block_size
    assert memory["kv"] == pytest.approx(session.kv_bytes_per_token * tokens, rel=1e-3)
    assert session.weight_bytes == memory["weights"]
    session.close()
    session.close()
    with pytest.raises(EngineClosed):
        session.submit(tiny.batch([(models.ids(2), 0, [0])]))


def test_threads_end_with_the_session():
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    if not os.path.isdir("/proc/self/task"):
        pytest.skip("counts threads through /proc")
    gc.collect()
    before = threads()
    session = models.session(models.model(), threads=6)
    assert threads() == before + 5
    session.close()
    assert threads() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_computes_the_same():
    session = models.session(models.model(), threads=3)
    table = models.blocks(session, 33)
    right = models.logits(session, [(models.ids(33), 0, table)])
    child = os.fork()
    if child == 0:
        same = np.array_equal(models.logits(session, [(models.ids(33), 0, table)]), right)
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(models.logits(session, [(models.ids(33), 0, table)]), right)


def test_what_cannot_be_opened_says_so():
    program = lower(models.model())
    packed = models.weights(program)
    with pytest.raises(OptionError, match="fp8"):
        cpu.open(program, packed, tiny.plan("cpu", "fp8"))
    with pytest.raises(OptionError, match="generic"):
        cpu.open(program, packed, tiny.plan("cpu", isa="sse9"))
    with pytest.raises(ModelFileError, match="final_norm"):
        cpu.open(program, {k: v for k, v in packed.items() if k != "final_norm"}, tiny.plan("cpu"))
    with pytest.raises(ModelFileError, match="shape"):
        cpu.open(program, packed | {"final_norm": packed["embedding"]}, tiny.plan("cpu"))
    with pytest.raises(UnsupportedModel, match="head_size"):
        big = lower(models.model(head_size=258))
        cpu.open(big, {}, tiny.plan("cpu"))
    with pytest.raises(UnsupportedModel, match="relu"):
        cpu.open(lower(models.model(activation="relu")), {}, tiny.plan("cpu"))


def test_probe_names_what_is_there():
    probe = cpu.probe(SimpleNamespace(isa=None))
    assert probe.usable and models.ISAS[0] in probe.reason and "generic" in probe.details["instruction sets"]
    refused = cpu.probe(SimpleNamespace(isa="sse9"))
    assert not refused.usable and "sse9" in refused.reason and "generic" in refused.mend


def test_a_missing_module_says_how_to_build_it(monkeypatch):
    def missing(name):
        raise ImportError("no such file")

    monkeypatch.setattr(cpu.importlib, "import_module", missing)
    probe = cpu.probe(SimpleNamespace(isa=None))
    assert not probe.usable and "pip install ." in probe.mend
    with pytest.raises(BackendUnavailable, match="pip install"):
        cpu.open(lower(models.model()), {}, tiny.plan("cpu"))


def test_threads_that_cannot_start_are_told():
    """In a process of its own, whose address space holds the stacks of a few threads only."""
    code = (
        "import resource\nfrom nano_vllm import _native\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 * 10**9,) * 2)\n"
        "try:\n    _native.Session(1000, '', 16, 100, 'f16', 16, 4)\nexcept RuntimeError as error:\n    print('told:', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("told:"), done.stderr
