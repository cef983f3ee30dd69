"""The line that ends a command: its arithmetic, and how it fits a terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from nano_vllm.cli import _meter


def test_rates_count_what_they_say():
    meter = _meter.Meter(weight_bytes=10**9, kv_bytes_per_token=10**6)
    meter.add([_meter.Counted(prompt=100, cached=20, output=11, first_s=0.5, last_s=2.5)], steps=12)
    # 12 steps read the weights once each, and 10 of them 101 + … + 110 tokens of cache
    read = 12 * 10**9 + 10**6 * sum(range(101, 111))
    line = meter.line()
    assert "100 prompt tokens (160 tok/s, 20 cached)" in line  # 80 computed in half a second
    assert f"11 output tokens (5.0 tok/s), {read / 2.5 / 1e9:.1f} GB/s weights and cache, first token after 500 ms" in line
    meter.add([_meter.Counted(1, 0, 1, 0.1, 0.1)], steps=1)  # a single token has no time after it
    assert "12 output tokens (5.0 tok/s)" in meter.line() and "first token after 300 ms" in meter.line()


def test_requests_that_share_their_steps_share_their_time():
    meter = _meter.Meter(weight_bytes=10**9, kv_bytes_per_token=10**6)
    failed = _meter.Counted(prompt=9, cached=0, output=0, first_s=0.1, last_s=0.1)
    meter.add([_meter.Counted(10, 0, 3, 1.0, 2.0), _meter.Counted(20, 0, 5, 3.0, 5.0), failed], steps=8)
    read = 8 * 10**9 + 10**6 * (11 + 12 + 21 + 22 + 23 + 24)
    line = meter.line()
    assert "39 prompt tokens (13.0 tok/s), 8 output tokens (1.5 tok/s)" in line  # in 3 s; 2 + 4 in the 4 s after the first second
    assert f"{read / 5 / 1e9:.1f} GB/s weights and cache, first token after 2.00 s" in line


def test_what_there_is_not_is_left_out(monkeypatch):
    monkeypatch.setattr(_meter, "peak_memory", lambda: 10**8)
    assert _meter.Meter().line() == "peak memory 100 MB"
    meter = _meter.Meter(weight_bytes=10**9)
    meter.add([_meter.Counted(1000, 0, 0, 4.0, 4.0)], steps=6)
    assert meter.line() == "1,000 prompt tokens (250 tok/s), 1.5 GB/s weights and cache, peak memory 100 MB"


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="only Linux tells the peak in /proc/self/status")
def test_peak_memory_is_the_kernels():
    """In a process of its own: a peak that other tests have left would hide this one."""
    code = (
        "from nano_vllm.cli._meter import peak_memory; import numpy; before = peak_memory(); "
        "block = numpy.ones(64 << 20, numpy.uint8); del block; print(peak_memory() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) > 0.9 * (64 << 20)


# prompt, cached and output tokens of a short answer, of a long one, and of several turns that fill a context
@pytest.mark.parametrize("counts", [(35, 0, 32), (1135, 0, 8000), (8160, 8144, 8192), (54_321, 51_000, 12_345)])
def test_the_line_is_as_short_as_the_terminal_and_keeps_every_figure(counts, monkeypatch):
    monkeypatch.setattr(_meter, "peak_memory", lambda: 1_350_000_000)
    prompt, cached, output = counts
    meter = _meter.Meter(100 * 10**6, 46_080)
    meter.add([_meter.Counted(*counts, 5.432, 5.432 + output / 247)], output)
    whole = meter.line()
    assert _meter.fitted(whole, None) == _meter.fitted(whole, 200) == whole
    figures = re.findall(r"\d[\d.]*", whole.replace(",", ""))
    for width in (120, 100, 80):
        line = _meter.fitted(whole, width)
        assert len(line) <= width and "\n" not in line
        assert re.findall(r"\d[\d.]*", line.replace(",", "")) == figures
    assert (" in (" in line) and (" out (" in line) and ("cached" in line) == bool(cached)


def test_one_token_is_not_several():
    meter = _meter.Meter()
    meter.add([_meter.Counted(1, 0, 1, 0.1, 0.1)], steps=1)
    assert meter.line().startswith("1 prompt token (10.0 tok/s), 1 output token (0 tok/s), ")
    assert _meter.fitted(meter.line(), 20).startswith("1 in (10.0/s), 1 out (0/s), ")


def test_short_times_are_told_in_milliseconds():
    assert [_meter.duration(s) for s in (0.0004, 0.0543, 0.9994, 0.9996, 12.345)] == [
        "0 ms",
        "54 ms",
        "999 ms",
        "1.00 s",
        "12.35 s",
    ]
