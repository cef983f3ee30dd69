"""The scaling plot, as an SVG file written by hand: tokens per second over concurrent requests, on an axis of powers of two."""

from __future__ import annotations

import math
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 64, 150, 40, 48
COLOURS = ("#1f6fb4", "#d1622b", "#3a8f4d", "#8456a8", "#a08020", "#7a7a7a")


def step(most: float) -> float:
    """The distance of the lines of a grid of about five: 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(most / 5))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= most / 5)


def text(x: float, y: float, words: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def svg(curves: dict[str, list[tuple[int, float]]], title: str) -> str:
    """Name -> points (requests, tokens per second) of each curve; at least one point in all."""
    points = [point for curve in curves.values() for point in curve]
    right = max(math.log2(max(n for n, _ in points)), 1)
    grid = step(max(value for _, value in points))
    top = grid * math.ceil(max(value for _, value in points) / grid)

    def place(n: float, value: float) -> tuple[float, float]:
        x = LEFT + math.log2(n) / right * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 22, title, "start", ' font-weight="bold"'),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "concurrent requests"),
        text(LEFT - 8, TOP - 6, "tok/s", "end"),
    ]
    for i in range(round(top / grid) + 1):
        y = place(1, i * grid)[1]
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 8, y + 4, f"{i * grid:g}", "end"))
    parts += [text(place(n, 0)[0], HEIGHT - BOTTOM + 18, str(n)) for n in sorted({n for n, _ in points})]
    for i, (name, curve) in enumerate(curves.items()):
        colour, places = COLOURS[i % len(COLOURS)], [place(*point) for point in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(f'<rect x="{WIDTH - RIGHT + 12}" y="{TOP + 20 * i}" width="10" height="10" fill="{colour}"/>')
        parts.append(text(WIDTH - RIGHT + 28, TOP + 20 * i + 10, name, "start"))
    return "\n".join([*parts, "</svg>", ""])
