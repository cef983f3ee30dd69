"""The picture of a profile of steady decode: what the device does over three steps, and how much of the time it does nothing.

    python -m benchmarks.gpu_profile TRACE-1.json TRACE-256.json --svg FILE.svg

The traces are those of `python -m benchmarks.gpu --profile TRACE.json`, which calls this itself. A step ends where its ids have
been copied to the host. The share of the time in which nothing runs is of the middle half of a trace's steps, kernels and copies
that overlap counted once; a profiler's own cost makes it larger, if anything.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from .cpu.plot import COLOURS, step, text

WIDTH, LEFT, LANE, BELOW = 1000, 110, 20, 44
STEPS = 3
RESOLUTION = 2e-3  # µs; a trace is written in ns, and what begins as something ends may seem to begin a little later
KINDS = {  # kind -> what is in its kernels' names; the first that fits. What fits nowhere is "other"
    "copies": ("memcpy", "memset"),
    "attention": ("_attend", "_decode", "_merge", "_prefill", "attention"),
    "products": (
        "_few",
        "_tiled",
        "_product",
        "_one",
        "_several",
        "_unpack",
        "_values",
        "gemm",
        "gemv",
        "nvjet",
        "cutlass",
        "splitk",
        "dot_",
    ),
    "rows": ("_embed", "_normalize", "_add", "_gate", "_rotate"),
    "sampling": ("_survey", "_mass", "_pick", "_above", "_narrow", "_border", "_ban", "_count", "_penalize", "_chosen"),
}


@dataclass(frozen=True)
class Event:
    """A kernel or a copy; `begin` and `end` in µs."""

    name: str
    begin: float
    end: float

    @property
    def kind(self) -> str:
        name = self.name.lower()
        return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def read(path: Path) -> list[Event]:
    """The device's part of a trace as PyTorch's profiler writes it, by beginning."""
    found = json.loads(path.read_text("utf-8"))["traceEvents"]
    on_device = [e for e in found if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted((Event(e["name"], e["ts"], e["ts"] + e["dur"]) for e in on_device), key=lambda e: e.begin)


def ends(events: list[Event]) -> list[float]:
    """Where steps end, ascending.

    Raises:
        ValueError: there are too few for half of them to hold STEPS.
    """
    found = sorted(e.end for e in events if "dtoh" in e.name.lower())
    if len(found) < 4 * STEPS:
        raise ValueError(f"a trace has {len(found)} copies to the host; steady decode has at least {4 * STEPS}")
    return found


def within(events: list[Event], begin: float, end: float) -> list[Event]:
    """Events, or what of them lies, between two times."""
    cut = [Event(e.name, max(e.begin, begin), min(e.end, end)) for e in events]
    return [e for e in cut if e.begin < e.end]


def gaps(events: list[Event], begin: float, end: float) -> list[tuple[float, float]]:
    """Spans of time in which nothing runs; `events` by beginning."""
    found, busy = [], begin
    for e in [*within(events, begin, end), Event("", end, end)]:
        if e.begin - busy > RESOLUTION:
            found.append((busy, e.begin))
        busy = max(busy, e.end)
    return found


def idle(events: list[Event]) -> float:
    """Percent of the middle half of the steps in which nothing runs."""
    marks = ends(events)
    begin, end = marks[len(marks) // 4], marks[3 * len(marks) // 4]
    return 100 * sum(b - a for a, b in gaps(events, begin, end)) / (end - begin)


def panel(title: str, events: list[Event], top: float) -> tuple[list[str], float]:
    """The parts of a trace's panel, and where the next one begins: a lane for each kind, one for gaps, and an axis in µs."""
    marks = ends(events)
    first = (len(marks) - STEPS) // 2
    begin, end = marks[first], marks[first + STEPS]
    shown, scale = within(events, begin, end), (WIDTH - LEFT - 20) / (end - begin)
    lanes = {kind: [(e.begin, e.end) for e in shown if e.kind == kind] for kind in (*KINDS, "other")}
    lanes = {kind: spans for kind, spans in lanes.items() if spans} | {"nothing": gaps(events, begin, end)}
    words = f"{title}: {(end - begin) / STEPS:,.0f} µs a step; the device does nothing for {idle(events):.1f} % of the time"
    parts, bottom = [text(10, top + 16, words, "start", ' font-weight="bold"')], top + 28 + LANE * len(lanes)
    for i in range(int((end - begin) / (grid := step(end - begin))) + 1):
        x = LEFT + i * grid * scale
        parts.append(f'<path d="M{x:.1f} {top + 28}V{bottom + 4}" stroke="#ddd"/>' + text(x, bottom + 18, f"{i * grid:g}"))
    for n, (kind, spans) in enumerate(lanes.items()):
        y, colour = top + 30 + n * LANE, "#d00000" if kind == "nothing" else COLOURS[n % len(COLOURS)]
        total = 100 * sum(b - a for a, b in spans) / (end - begin)
        parts.append(text(LEFT - 8, y + 12, f"{kind} {total:.0f} %", "end"))
        bars = "".join(
            f"M{LEFT + (a - begin) * scale:.2f} {y}h{(b - a) * scale:.2f}v{LANE - 4}h-{(b - a) * scale:.2f}z" for a, b in spans
        )
        parts.append(f'<path d="{bars}" fill="{colour}"/>')
    for mark in marks[first + 1 : first + STEPS]:
        x = LEFT + (mark - begin) * scale
        parts.append(f'<path d="M{x:.1f} {top + 28}V{bottom}" stroke="#000" stroke-dasharray="3"/>')
    return [*parts, text(WIDTH - 20, bottom + 32, "µs", "end")], bottom + BELOW


def svg(traces: dict[str, list[Event]]) -> str:
    """Title -> events of each panel, one below the other."""
    parts, top = [], 10.0
    for title, events in traces.items():
        made, top = panel(title, events, top)
        parts += made
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{top:.0f}" fill="white"/>', *parts, "</svg>", ""])


def write(traces: dict[str, Path], target: Path) -> None:
    """Reads traces, prints how much of the time the device does nothing, and draws them."""
    events = {title: read(path) for title, path in traces.items()}
    for title, found in events.items():
        print(f"{title}: the device does nothing for {idle(found):.2f} % of the time of steady decode", flush=True)
    target.write_text(svg(events), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE.json")
    parser.add_argument("--svg", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    write({path.stem: path for path in args.traces}, args.svg)


if __name__ == "__main__":
    main()
