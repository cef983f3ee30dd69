"""Figures to tables: medians, ratios to each peer, fractions of the machine's ceilings."""

from __future__ import annotations

import statistics

from nano_vllm.bench.table import digits
from nano_vllm.bench.workloads import Line, Sizes

from .engines import OURS


def medians(figures: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Line -> engine -> figures, to line -> engine -> median; engines without figures are left out."""
    return {key: {engine: statistics.median(v) for engine, v in columns.items() if v} for key, columns in figures.items()}


def ratio(line: Line, ours: float, theirs: float) -> float:
    """How many times as fast we are: above 1, ours is the better figure."""
    return ours / theirs if line.more_is_better else theirs / ours


def of_ceiling(line: Line, figure: float, facts: dict, ceilings: dict, sizes: Sizes) -> str:
    """What our figure means beside what the machine can do; empty for lines without such a measure.

    Decoding reads all weights and, on average over the answer, the keys and values of prompt + new / 2 tokens. A prompt is
    multiplied with the layers' matrices for each token, with the head once; attention's own products are not counted.
    """
    if line.key == "decode":
        rate = figure * (facts["weight_bytes"] + facts["kv_bytes_per_token"] * (sizes.prompt + sizes.new / 2))
        return f"{rate / 1e9:.1f} GB/s, {100 * rate / ceilings['bytes_per_s']:.0f} % of the bandwidth"
    if line.run.startswith("prefill"):
        rate = figure * (facts["layers"] + facts["head"] / line.tokens)
        return f"{rate / 1e9:.0f} G multiply-adds/s, {100 * rate / ceilings['int8_per_s']:.0f} % of the int8 peak"
    return ""


def table(result: dict, lines: list[Line], ceilings: dict, sizes: Sizes) -> str:
    """One model's table. A column of figures per engine, and beside a peer's how many times as fast we are."""
    middle, rows, peers = medians(result["figures"]), [], [engine for engine in result["engines"] if engine != OURS]
    title = f"{result['model']}, {result['megabytes']:.0f} MB"
    rows.append(f"{title:36}{OURS:>10}" + "".join(f"{peer:>13}{'ratio':>7}" for peer in peers))
    for line in lines:
        found = middle.get(line.key, {})
        ours = found.get(OURS)
        row = f"{f'{line.title}, {line.unit}':36}{digits(ours) if ours is not None else '–':>10}"
        for peer in peers:
            theirs = found.get(peer)
            both = ours is not None and theirs is not None
            row += f"{digits(theirs) if theirs is not None else '–':>13}"
            row += f"{ratio(line, ours, theirs):7.2f}" if both else f"{'–':>7}"
        if ours is not None and OURS not in result["absent"]:
            row += "   " + of_ceiling(line, ours, result["facts"], ceilings, sizes)
        rows.append(row.rstrip())
    rows += [f"{engine}: {why}" for engine, why in result["absent"].items()]
    if OURS not in result["absent"]:
        rows.append(f"prefix hits outside the shared prompts {result['hits']['fresh']}, in them {result['hits']['shared']}")
        rows.append(f"sha256 of the last logits {result['facts']['logits_sha256']}")
    return "\n".join(rows)


def beside_the_best(results: list[dict], lines: list[Line]) -> str:
    """Each line of each family's first file beside the best that any peer did on any file of the family; empty for one file."""
    rows = []
    for family in dict.fromkeys(r["model"].split("-")[0] for r in results):
        files = [r for r in results if r["model"].split("-")[0] == family]
        for line in lines if len(files) > 1 else []:
            ours = medians(files[0]["figures"]).get(line.key, {}).get(OURS)
            found = [
                (value, f"{engine} on {r['model']}")
                for r in files
                for engine, value in medians(r["figures"]).get(line.key, {}).items()
                if engine != OURS
            ]
            if ours is None or not found:
                continue
            theirs, who = max(found) if line.more_is_better else min(found)
            title = f"{files[0]['model']}: {line.title}"
            rows.append(f"{title:44}{ratio(line, ours, theirs):6.2f} × {who}, {digits(theirs)} {line.unit}")
    return "\n".join(["beside the best peer on any file of the model", *rows]) if rows else ""


def curves(result: dict) -> dict[str, list[tuple[int, float]]]:
    """Engine -> (concurrent requests, tokens per second), ascending."""
    found: dict[str, list[tuple[int, float]]] = {}
    for key, columns in medians(result["figures"]).items():
        if key.startswith("scaling_"):
            for engine, value in columns.items():
                found.setdefault(engine, []).append((int(key.removeprefix("scaling_")), value))
    return {engine: sorted(points) for engine, points in found.items()}
