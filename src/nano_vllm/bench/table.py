"""Figures as a table: medians, their spread, and what the machine would allow."""

from __future__ import annotations

import statistics

from .limits import percent
from .workloads import Line


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(figures: list[float]) -> str:
    """The least and the most; empty for one figure."""
    return f"{digits(min(figures))} to {digits(max(figures))}" if len(figures) > 1 else ""


def table(lines: list[Line], figures: dict[str, list[float]], limits: dict[str, float | None]) -> str:
    """A row for each line, at most 80 columns wide.

    Args:
        figures: line -> its figures.
        limits: line -> what it would be at the machine's limit, in its unit; None or left out where no limit is known.
    """
    rows = [f"{'':34}{'median':>9}{'least to most':>19}" + (f"{'limit':>10}{'of it':>8}" if any(limits.values()) else "")]
    for line in lines:
        middle, limit = statistics.median(figures[line.key]), limits.get(line.key)
        row = f"{f'{line.title}, {line.unit}':34}{digits(middle):>9}{spread(figures[line.key]):>19}"
        if limit:
            row += f"{digits(limit):>10}{percent(line, middle, limit):>6.0f} %"
        rows.append(row.rstrip())
    return "\n".join(rows)
