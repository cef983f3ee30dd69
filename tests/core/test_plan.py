"""The plan: what is asked against what the machine has."""

from __future__ import annotations

import numpy as np
import pytest

from nano_vllm.backends import cpu
from nano_vllm.errors import BackendUnavailable, NotEnoughMemory, OptionError
from nano_vllm.loading import choose_backend
from nano_vllm.memory import machine, plan
from nano_vllm.model.program import lower
from nano_vllm.model.weights import open_model
from nano_vllm.options import options

from .models import write_folder


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return lower(open_model(write_folder(tmp_path_factory.mktemp("plan") / "model")).spec)


def resolve(program, **asked) -> plan.Plan:
    return plan.resolve(options(backend="reference", **asked), program, "reference", "f32")


@pytest.mark.parametrize("asked", [{"num_blocks": 2**31 - 1}, {"num_blocks": 62}, {"kv_cache_memory": "1.1MB"}], ids=str)
def test_a_cache_that_does_not_fit_is_refused_with_the_arithmetic(monkeypatch, program, asked):
    """A block of 16 tokens has 2 layers x 2 x 2 heads x 32 numbers of 4 bytes each: 16,384 bytes, of which 61 fit a million."""
    monkeypatch.setattr(plan, "measured_free_memory", lambda: 10**6)
    with pytest.raises(NotEnoughMemory, match=r"16\.4 kB.*1 MB.* are free.*at most 61"):
        resolve(program, **asked)
    assert resolve(program, num_blocks=61).num_blocks == 61


def test_where_the_system_does_not_tell_nothing_is_refused(monkeypatch, program):
    monkeypatch.setattr(plan, "measured_free_memory", lambda: None)
    assert resolve(program, num_blocks=10**9).num_blocks == 10**9


def test_free_memory_is_told_or_guessed(monkeypatch):
    assert machine.free_memory() > 0
    monkeypatch.setattr(machine, "measured_free_memory", lambda: None)
    assert machine.free_memory() > 0


def test_numpys_integers_serve_as_pythons(program):
    made = resolve(program, num_blocks=np.int64(5), block_size=np.uint16(32), max_num_seqs=np.int32(3))
    assert (made.num_blocks, made.block_size, made.max_num_seqs) == (5, 32, 3) and type(made.num_blocks) is int
    assert resolve(program, kv_cache_memory=np.int64(10**5)).num_blocks == 6
    for wrong in (np.int64(0), np.float64(5), np.bool_(True)):
        with pytest.raises(OptionError):
            resolve(program, num_blocks=wrong)


def test_a_request_needs_room_for_one_token_of_each_end(program):
    with pytest.raises(OptionError, match="max_model_len = 1 .*the least is 2"):
        resolve(program, max_model_len=1)
    assert resolve(program, max_model_len=2).max_model_len == 2


def test_a_step_has_no_more_rows_than_the_cache_holds(program):
    made = resolve(program, num_blocks=3, max_num_batched_tokens=512)
    assert made.max_num_batched_tokens == 48 and "less than 512" in made.reasons["max_num_batched_tokens"]
    made = resolve(program, num_blocks=3, max_num_batched_tokens=48)
    assert made.max_num_batched_tokens == 48 and "as asked" in made.reasons["max_num_batched_tokens"]


def test_threads_without_a_processor_are_refused(monkeypatch):
    """They would spin in turns: a step of a millisecond takes seconds."""
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: set(range(6)))
    for quota, most in ((None, 6), (2.5, 3), (0.5, 1), (64.0, 6)):
        monkeypatch.setattr(machine, "_cpu_quota", lambda quota=quota: quota)
        assert options(threads=most).threads == most and options().threads is None
        with pytest.raises(OptionError, match=f"may use {most} processors.*at most {most}"):
            options(threads=most + 1)


def test_options_that_the_backend_does_not_read_are_refused(monkeypatch):
    """Whether it was asked for or is what is left."""
    for asked in ({"threads": 1}, {"isa": "generic"}):
        with pytest.raises(OptionError, match="would be ignored: the reference backend does not read it"):
            choose_backend(options(backend="reference", **asked))
    assert choose_backend(options(backend="reference"))[0] == "reference"
    monkeypatch.setattr(cpu, "_native", unavailable)
    assert choose_backend(options())[0] == "reference"
    with pytest.raises(OptionError, match="threads = 1 would be ignored.*cpu: not built"):
        choose_backend(options(threads=1))
    monkeypatch.setenv("NANO_VLLM_ISA", "generic")
    with pytest.raises(OptionError, match="unset NANO_VLLM_ISA"):
        choose_backend(options(backend="reference"))


def unavailable():
    raise BackendUnavailable("no native module", "not built", "Build it.")
