"""Ranks as processes: over NCCL where there are two cards, over gloo and Triton's interpreter where there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

torch = pytest.importorskip("torch", reason="the backend is PyTorch's")
pytest.importorskip("triton", reason="Triton has no package for this system")
if not hasattr(os, "memfd_create"):
    pytest.skip("ranks are for Linux", allow_module_level=True)
if torch.cuda.is_available() and torch.cuda.device_count() < 2:
    pytest.skip("needs two NVIDIA GPUs, or none", allow_module_level=True)

from nano_vllm.backends import reference  # noqa: E402
from nano_vllm.engine.engine import Engine  # noqa: E402
from nano_vllm.errors import BatchError, EngineClosed, ModelFileError, OptionError, RankLost  # noqa: E402
from nano_vllm.model.weights import open_model  # noqa: E402
from nano_vllm.sampling.params import SamplingParams  # noqa: E402
from tests.backends import tiny  # noqa: E402
from tests.core import models  # noqa: E402

from .test_session import VOCAB, cuda, ids, logits, lower, model, opened, run, weights  # noqa: E402

SPEC = model(layers=1, hidden=16, mlp=16)
PLAN = dict(num_blocks=8, max_num_seqs=4, max_num_batched_tokens=32)
SOON = 20.0  # seconds, on a busy machine; about one on an idle one


def alive(pid: int) -> bool:
    """Neither gone nor waiting for whoever adopted it to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ended(pids: list[int]) -> bool:
    until = time.monotonic() + SOON
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


def pids(session) -> list[int]:
    return [rank.process.pid for rank in session.ranks]


@pytest.fixture(scope="module")
def session():
    session = opened(SPEC, tensor_parallel_size=2, **PLAN)
    yield session
    session.close()


def test_two_ranks_answer_as_one_device(session):
    """Greedy and drawn ids, prompts in chunks, prefix hits, penalties, one step ahead."""
    shared = ids(33).tolist()
    requests = [
        (shared, SamplingParams(temperature=0, max_tokens=4)),
        (shared[:32] + [5], SamplingParams(temperature=0, max_tokens=3)),
        (ids(2, 7).tolist(), SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.5, max_tokens=3)),
    ]
    assert run(session, requests) == run(opened(SPEC, **PLAN), requests)


def test_logits_come_back(session):
    part = [(ids(20), 0, [4, 2])]
    np.testing.assert_allclose(logits(session, part), logits(opened(SPEC, **PLAN), part), atol=1e-4)


def test_a_wrong_step_is_refused_and_does_no_harm(session):
    """Later ones are answered, whether or not anybody asked for the results of those before."""
    good, wrong = tiny.batch([(ids(3), 0, [1])], "last"), tiny.batch([(ids(3), 0, [99])], "last")
    tickets = [session.submit(step) for step in (good, wrong, good, wrong, good)]
    with pytest.raises(BatchError, match="outside the pool"):
        tickets[3].result()
    np.testing.assert_array_equal(tickets[4].result().logits, tickets[0].result().logits)


def test_what_is_planned_is_of_one_device(session):
    alone = opened(SPEC, **PLAN)
    assert session.memory()["kv"] == alone.memory()["kv"] / 2
    assert session.kv_bytes_per_token == alone.kv_bytes_per_token
    assert alone.weight_bytes < session.weight_bytes < 1.1 * alone.weight_bytes  # norms are on both


def test_a_closed_session_leaves_nothing(session):
    """The last test of this session."""
    started = pids(session)
    assert len(started) == 2 and all(map(alive, started))
    session.close()
    session.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)  # not even a zombie
    for left in Path("/proc/self/fd").iterdir():
        assert "memfd" not in (os.readlink(left) if left.is_symlink() else "")
    with pytest.raises(EngineClosed):
        session.submit(tiny.batch([(ids(2), 0, [0])]))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_ends_requests_with_an_error_that_says_so(lost):
    session = opened(SPEC, tensor_parallel_size=2, **PLAN)
    engine, started, updates = Engine(session, VOCAB), pids(session), []
    for seed in (1, 2):
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        engine.submit(engine.make_request(ids(5, seed).tolist(), params, updates.append))
    for _ in range(3):
        engine.step()
    os.kill(started[lost], signal.SIGKILL)
    begun = time.monotonic()
    while engine.busy:
        engine.step()
    assert time.monotonic() - begun < SOON
    engine.check()
    last = {update.request.id: update for update in updates}
    for update in last.values():
        assert update.finish_reason == "error" and isinstance(update.error, RankLost)
        assert all(text in str(update.error) for text in (f"rank {lost} of 2", "SIGKILL", "Load the model again"))
    assert len(last) == 2 and not any(map(alive, started))
    with pytest.raises(RankLost):
        session.submit(tiny.batch([(ids(2), 0, [0])]))
    session.close()


def test_ranks_read_their_parts_of_a_file(tmp_path):
    """Heads in another order, matrices cut between groups and within them, and a head of its own."""
    kinds = {"lm_head": Type.Q8_0, "o_proj": Type.Q8_0, "down_proj": Type.Q4_1, "gate_proj": Type.Q4_1}
    types = {name: kind for name in models.numbers() for part, kind in kinds.items() if part in name}
    file = open_model(models.write_gguf(tmp_path / "a.gguf", types=types))
    program, part = lower(file.spec), [(tiny.tokens(40, 20), 0, [4, 2])]
    right = logits(reference.open(program, file.weights, tiny.plan(**PLAN)), part)
    plan = tiny.plan("cuda", dtype="f32", tensor_parallel_size=2, max_model_len=128, **PLAN)
    session = cuda.open(program, file.weights, plan)
    file.close()
    np.testing.assert_allclose(logits(session, part), right, atol=2e-4 * np.abs(right).max())
    session.close()


PARENT = """
import sys, time
from tests.cuda.test_parallel import PLAN, SPEC, opened, pids
session = opened(SPEC, tensor_parallel_size=2, **PLAN)
print(*pids(session), flush=True)
time.sleep(600)
"""


def test_ranks_do_not_outlive_a_killed_parent():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        started = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(started) == 2 and all(map(alive, started))
        parent.kill()
        assert ended(started)


def test_what_a_rank_cannot_open_is_said_by_the_session():
    program = lower(SPEC)
    packed = weights(program)
    plan = tiny.plan("cuda", dtype="f32", tensor_parallel_size=2, **PLAN)
    with pytest.raises(ModelFileError, match="final_norm"):
        cuda.open(program, {n: t for n, t in packed.items() if n != "final_norm"}, plan)
    begun = time.monotonic()
    with pytest.raises(OptionError, match="takes 1, 2, 4"):
        cuda.open(program, packed, tiny.plan("cuda", dtype="f32", tensor_parallel_size=3, **PLAN))
    assert time.monotonic() - begun < 1  # before a process is started
