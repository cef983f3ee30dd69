"""The line that ends a run: tokens, rates, memory."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from ..memory.machine import format_bytes


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
    value = count / seconds if seconds > 0 else 0.0
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


@dataclass
class Meter:
    """Adds up the requests of a command.

    Prompt rate: prompt tokens that were computed (cached ones are not) over the time to the first token.
    Output rate: tokens after the first over the time after the first.
    GB/s: in each step after the first token, all weights once and the keys and values of every earlier token.
    """

    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0
    decode_bytes: float = 0.0

    @classmethod
    def of(cls, llm) -> Meter:
        stats = llm.stats()
        return cls(stats["weight_bytes"], stats["kv_bytes_per_token"])

    def add(self, prompt: int, cached: int, output: int, first_s: float, decode_s: float) -> None:
        """Counts one request."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.output_tokens += output
        self.first_s += first_s
        if output > 1:
            steps = output - 1
            self.decode_tokens += steps
            self.decode_s += decode_s
            self.decode_bytes += steps * self.weight_bytes + self.kv_bytes_per_token * (steps * prompt + steps * (steps + 1) / 2)

    def batch(self, outputs: list, seconds: float) -> None:
        """Counts requests that ran together for `seconds`; steps are shared, so no GB/s is told."""
        for output in outputs:
            self.requests += 1
            self.prompt_tokens += output.usage.prompt_tokens
            self.cached_tokens += output.usage.cached_tokens
            self.output_tokens += output.usage.completion_tokens
        self.first_s = max(output.timings.first_token_s for output in outputs)
        self.decode_tokens, self.decode_s = self.output_tokens, seconds

    def line(self) -> str:
        """The summary, without a newline."""
        cached = f", {self.cached_tokens:,} cached" if self.cached_tokens else ""
        prompt_rate = rate(self.prompt_tokens - self.cached_tokens, self.first_s)
        parts = [f"{self.prompt_tokens:,} prompt tokens ({prompt_rate} tok/s{cached})"]
        if self.output_tokens:
            parts += [self._output(), f"first token after {self.first_s / self.requests:.3f} s"]
        peak = peak_memory()
        return ", ".join(parts + ([f"peak memory {format_bytes(peak)}"] if peak else []))

    def _output(self) -> str:
        output = f"{self.output_tokens:,} output tokens"
        if not (self.decode_tokens and self.decode_s):
            return output
        speed = f"{rate(self.decode_tokens, self.decode_s)} tok/s"
        if self.decode_bytes:
            speed += f", {self.decode_bytes / self.decode_s / 1e9:.1f} GB/s weights and cache"
        return f"{output} ({speed})"

    def tell(self) -> None:
        print(self.line(), file=sys.stderr, flush=True)


class Answer:
    """Prints a stream's pieces as they come and keeps what was said.

    Attributes:
        text: what has been printed.
        output: the RequestOutput, or None when the stream was left early.
    """

    def __init__(self, llm, stream, meter: Meter) -> None:
        self.llm, self.stream, self.meter = llm, stream, meter
        self.before = llm.stats()["prompt_tokens"]
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
        if self.output is not None:
            usage, timings = self.output.usage, self.output.timings
            self.meter.add(
                usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, timings.first_token_s, timings.decode_s
            )
        elif self.tokens:
            prompt = self.llm.stats()["prompt_tokens"] - self.before
            self.meter.add(prompt, 0, self.tokens, self.first - self.begun, self.last - self.first)
