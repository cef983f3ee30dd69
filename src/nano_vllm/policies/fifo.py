"""First come, first served."""

from __future__ import annotations

USES_PRIORITY = False


def key(request) -> float:
    return request.arrival
