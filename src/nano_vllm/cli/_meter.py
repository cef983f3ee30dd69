"""The line that ends a run: tokens, rates, memory."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from typing import NamedTuple

from ..memory.machine import format_bytes
from . import _terminal

# What makes the line shorter without taking a figure from it, one after the other until it fits a terminal.
SHORTER = (
    (" weights and cache", ""),
    ("peak memory", "peak"),
    ("first token after", "first"),
    (" (prompt|output) tokens?", lambda found: {"prompt": " in", "output": " out"}[found[1]]),
    ("tok/s", "t/s"),
    ("peak ", ""),
    ("first ", ""),
    (" t/s", "/s"),
    (r"(?<=\d),(?=\d)", ""),
)


def peak_memory() -> int | None:
    """Most bytes this process has had in memory, by the kernel's count; None where it keeps none."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rate(count: float, seconds: float) -> str:
    """Three digits or so; "0" where nothing was counted."""
    if not count:
        return "0"
    value = count / seconds if seconds > 0 else 0.0
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def tokens(count: int, kind: str) -> str:
    return f"{count:,} {kind} token{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def fitted(line: str, width: int | None) -> str:
    """The line in as many words as `width` columns hold; None: in all of them."""
    for words, shorter in SHORTER:
        if width is None or len(line) <= width:
            break
        line = re.sub(words, shorter, line)
    return line


class Counted(NamedTuple):
    """One request of a run. Seconds from the run's beginning to the first token and to the last; without tokens, to the end."""

    prompt: int
    cached: int
    output: int
    first_s: float
    last_s: float

    @classmethod
    def of(cls, output) -> Counted:
        usage, timings = output.usage, output.timings
        end = timings.first_token_s + timings.decode_s
        return cls(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, timings.first_token_s, end)


@dataclass
class Meter:
    """Adds up a command's runs, each of requests that began together and shared their steps; one request is a run, too.

    Prompt rate: prompt tokens that were computed (cached ones are not) over the time until every request had its first token.
    Output rate: tokens after each request's first over the time from the earliest first token to the end.
    GB/s: all weights once per step, and the keys and values of every earlier token once per output token after the first, over
    the whole time. First token: the mean of the requests that had one.
    """

    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    later_tokens: int = 0
    answered: int = 0  # requests that had a first token
    first_s: float = 0.0  # the sum of theirs
    prompt_s: float = 0.0
    output_s: float = 0.0
    whole_s: float = 0.0
    read_bytes: float = 0.0

    @classmethod
    def of(cls, stats: dict) -> Meter:
        """Of an LLM's `stats()`."""
        return cls(stats["weight_bytes"], stats["kv_bytes_per_token"])

    def add(self, run: list[Counted], steps: int) -> None:
        """Counts a run and the steps that it took."""
        end = max(request.last_s for request in run)
        self.whole_s += end
        self.prompt_s += max(request.first_s for request in run)
        self.read_bytes += steps * self.weight_bytes
        answered = [request for request in run if request.output]
        if answered:
            self.output_s += end - min(request.first_s for request in answered)
        for request in run:
            self.prompt_tokens += request.prompt
            self.cached_tokens += request.cached
        for request in answered:
            self.answered += 1
            self.first_s += request.first_s
            later = request.output - 1
            self.output_tokens += request.output
            self.later_tokens += later
            self.read_bytes += self.kv_bytes_per_token * (later * request.prompt + later * (later + 1) / 2)

    def line(self) -> str:
        """The summary, without a newline; the same parts for every command. Those that its runs do not have are left out, such
        as output where none was asked for."""
        parts, peak = [], peak_memory()
        if self.prompt_tokens:
            cached = f", {self.cached_tokens:,} cached" if self.cached_tokens else ""
            computed = rate(self.prompt_tokens - self.cached_tokens, self.prompt_s)
            parts.append(f"{tokens(self.prompt_tokens, 'prompt')} ({computed} tok/s{cached})")
        if self.answered:
            parts.append(f"{tokens(self.output_tokens, 'output')} ({rate(self.later_tokens, self.output_s)} tok/s)")
        if self.whole_s:
            parts.append(f"{self.read_bytes / self.whole_s / 1e9:.1f} GB/s weights and cache")
        if self.answered:
            parts.append(f"first token after {duration(self.first_s / self.answered)}")
        return ", ".join(parts + ([f"peak memory {format_bytes(peak)}"] if peak else []))

    def tell(self) -> None:
        if line := self.line():
            print(fitted(line, _terminal.columns(sys.stderr)), file=sys.stderr, flush=True)


class Answer:
    """Prints a stream's pieces as they come and keeps what was said.

    Attributes:
        text: what has been printed.
        output: the RequestOutput, or None when the stream was left early.
    """

    def __init__(self, llm, stream, meter: Meter) -> None:
        self.llm, self.stream, self.meter = llm, stream, meter
        self.before = llm.stats()
        self.text, self.tokens, self.output = "", 0, None
        self.begun, self.first, self.last = time.perf_counter(), 0.0, 0.0

    def show(self) -> None:
        """Prints until the stream ends. Whatever ends it, the request is aborted and counted."""
        try:
            for piece in self.stream:
                self.last = time.perf_counter()
                self.first = self.first or self.last
                self.tokens += len(piece.token_ids)
                self.text += piece.text
                self.output = piece.output or self.output
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        finally:
            self.stream.close()
            self._count()

    def _count(self) -> None:
        now = self.llm.stats()
        names = ("prompt_tokens", "prefix_hit_tokens", "scheduled_tokens", "steps")
        prompt, cached, computed, steps = (now[name] - self.before[name] for name in names)
        if self.output is not None:
            self.meter.add([Counted.of(self.output)], steps)
        elif prompt:  # what was refused never began
            end = (self.last or time.perf_counter()) - self.begun
            first = self.first - self.begun if self.first else end
            done = prompt if self.first else min(prompt, cached + computed)  # it may have ended in the midst of its prompt
            self.meter.add([Counted(done, cached, self.tokens, first, end)], steps)
