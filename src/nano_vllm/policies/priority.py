"""Smaller `priority` first, as in vLLM. A step of priority is worth a fixed wait, so that nobody waits for ever."""

from __future__ import annotations

USES_PRIORITY = True
SECONDS_PER_STEP = 60.0


def key(request) -> float:
    return request.arrival + SECONDS_PER_STEP * request.priority
