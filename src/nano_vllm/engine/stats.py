"""Counters that only grow. Everything else that is reported is derived from them or read where it lives."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Stats:
    """received == waiting + running + the sum of `finished`, always; requests refused in `submit` count as `rejected` alone."""

    received: int = 0
    rejected: int = 0
    finished: Counter = field(default_factory=Counter)  # finish reason -> requests
    steps: int = 0
    scheduled_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0

    def as_dict(self) -> dict:
        return {**vars(self), "finished": dict(self.finished)}
