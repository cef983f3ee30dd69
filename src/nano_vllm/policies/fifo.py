"""First come, first served."""

from __future__ import annotations


def key(request) -> float:
    return request.arrival
