"""The plan: what is asked against what the machine has."""

from __future__ import annotations

import numpy as np
import pytest

from nano_vllm.errors import NotEnoughMemory, OptionError
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
