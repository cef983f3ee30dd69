"""What benchmarks/kernels.py measures: its checks find a wrong kernel, and its arithmetic holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import kernel_cases
from nano_vllm import _native, registry
from nano_vllm.backends import cpu, reference
from nano_vllm.backends.cpu import rates
from nano_vllm.options import options

SCRIPT = Path(__file__).parents[2] / "benchmarks/kernels.py"
CASES = kernel_cases.cases(kernel_cases.SMALL, ["f16", "f32"])


@pytest.mark.parametrize("isa", _native.instruction_sets())
def test_kernels_pass(isa):
    for case in CASES.values():
        kernel_cases.check(case, isa, 2)


@pytest.mark.parametrize(
    "name, function",
    [("q8", "linear_int8"), ("f16", "linear"), ("decode f16", "attend"), ("rotate f32", "rotate"), ("silu", "gate")],
)
def test_a_difference_is_found(name, function, monkeypatch):
    right = getattr(reference, function)
    monkeypatch.setattr(reference, function, lambda *args: right(*args) * np.float32(1.0001))
    with pytest.raises(ValueError, match=f"{name}: .* differ"):
        kernel_cases.check(CASES[name], "", 1)


def test_every_format_has_a_case():
    assert {format for format, _ in kernel_cases.FORMATS.values()} == set(registry.names("formats"))


def test_work_and_positions():
    decode, prefill, linear = CASES["decode f16"], CASES["prefill f16"], CASES["q4"]
    rng, per_key = np.random.default_rng(0), 2 * 6 * 48
    assert decode.work(3) == 3 * 40 * per_key and prefill.work(3) == (38 + 39 + 40) * per_key
    assert prefill.work(64) == sum(range(2, 66)) * per_key  # positions 1 to 64
    assert linear.work(3) == 3 * 96 * 256
    step = decode.batch(3, 9, rng)
    assert step.positions.tolist() == [39] * 3 and step.starts.tolist() == [0, 1, 2, 3]
    assert np.array_equal(step.block_tables[0], np.arange(9).reshape(3, 3)) and decode.blocks(3) == 9
    step = prefill.batch(64, 9, rng)
    assert step.positions.tolist() == list(range(1, 65)) and step.starts.tolist() == [0, 64] and prefill.blocks(64) == 5
    assert not np.array_equal(step.tokens, prefill.batch(64, 9, rng).tokens)


def test_the_script_checks_by_name():
    command = [sys.executable, SCRIPT, "--check", "--isa", "generic", "--kernel", "norm", "decode f16", "quantize"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "generic: 3 kernels give the definition's numbers\n"), done.stderr


def test_the_machines_ceilings(monkeypatch):
    """A vector's products on one thread are more than those one by one, and both more than nothing."""
    monkeypatch.setattr(rates, "READ", 2**24)
    found = cpu.ceilings(options(threads=1))
    assert found.multiplied == "int8" and found.bytes_per_s > 10**7
    slow, isas = rates.int8_peak(1, "generic", 2), _native.kernels.isas()
    assert isas == ["generic"] or found.multiply_adds_per_s > slow > 10**5
