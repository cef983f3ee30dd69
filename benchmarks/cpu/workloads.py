"""What is measured: prompts of random ids, drawn anew for every run, so that no cache has seen them.

A request is (ids, new tokens); a phase is the requests that are given at once; a workload is the phases of one run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

Request = tuple[list[int], int]
Phase = list[Request]

GROUPS = ("decode", "prefill", "batch", "shared", "scaling")


@dataclass(frozen=True)
class Sizes:
    """Tokens and requests; `quick()` is small enough to see in a minute that all works, and too small to be quoted."""

    repeats: int = 5
    prompt: int = 128
    new: int = 128
    prefill: tuple[int, ...] = (512, 2048)
    batch: int = 32
    longest: int = 256
    shared: int = 1024
    sharing: int = 16
    own: int = 32
    scaling: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    scaling_prompt: int = 32
    scaling_new: int = 64

    @staticmethod
    def quick() -> Sizes:
        return Sizes(
            repeats=1, new=16, prefill=(128, 256), batch=8, longest=48, shared=256, sharing=4, own=16, scaling=(1, 2, 4),
            scaling_new=16,
        )  # fmt: skip

    def with_repeats(self, repeats: int) -> Sizes:
        return replace(self, repeats=repeats)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request, its answer included."""
        sums = (self.prompt + self.new, max(self.prefill) + 1, 2 * self.longest, self.shared + 2 * self.own)
        return max(*sums, self.scaling_prompt + self.scaling_new)


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        key: names it in the JSON file: decode, first_token, prefill_512, batch_32, shared_together, shared_after_one, scaling_8.
        unit: tok/s (more is better), ms or s (less is better).
        run: the workload that it is computed from; lines of one workload are computed from the same runs.
    """

    key: str
    title: str
    unit: str
    run: str
    tokens: int = 0

    @property
    def group(self) -> str:
        """Of GROUPS."""
        return "decode" if self.run == "one" else self.run.split("_")[0]

    @property
    def more_is_better(self) -> bool:
        return self.unit == "tok/s"


def lines(sizes: Sizes, groups: list[str]) -> list[Line]:
    found = {
        "decode": [
            Line("decode", "decode, one stream", "tok/s", "one", sizes.new - 1),
            Line("first_token", f"first token of {sizes.prompt}", "ms", "one"),
        ],
        "prefill": [Line(f"prefill_{n}", f"prefill {n}", "tok/s", f"prefill_{n}", n) for n in sizes.prefill],
        "batch": [Line(f"batch_{sizes.batch}", f"{sizes.batch} requests at once", "tok/s", "batch")],
        "shared": [
            Line("shared_together", f"{sizes.sharing} sharing {sizes.shared}, together", "s", "shared_together"),
            Line("shared_after_one", f"{sizes.sharing} sharing {sizes.shared}, one first", "s", "shared_after_one"),
        ],
        "scaling": [Line(f"scaling_{n}", f"{n} concurrent", "tok/s", f"scaling_{n}") for n in sizes.scaling],
    }
    return [line for group in GROUPS if group in groups for line in found[group]]


def ids(rng: np.random.Generator, n: int) -> list[int]:
    return rng.integers(1000, 40000, n).tolist()


def draw(run: str, sizes: Sizes, rng: np.random.Generator) -> list[Phase]:
    """The phases of a workload, with fresh ids. Lengths of `batch` are the same in every run."""
    kind, _, n = run.rpartition("_")
    if run == "one":
        return [[(ids(rng, sizes.prompt), sizes.new)]]
    if kind == "prefill":
        return [[(ids(rng, int(n)), 1)]]
    if kind == "scaling":
        return [[(ids(rng, sizes.scaling_prompt), sizes.scaling_new) for _ in range(int(n))]]
    if run == "batch":
        lengths = np.random.default_rng(0).integers(16, sizes.longest + 1, (sizes.batch, 2)).tolist()
        return [[(ids(rng, prompt), new) for prompt, new in lengths]]
    prefix = ids(rng, sizes.shared)
    requests = [(prefix + ids(rng, sizes.own), sizes.own) for _ in range(sizes.sharing)]
    return [requests] if run == "shared_together" else [requests[:1], requests[1:]]


def figure(line: Line, phases: list[dict]) -> float:
    """A line's figure from what a worker told of each phase: `seconds`, `tokens`, and of one stream `first_s`."""
    seconds, first = sum(p["seconds"] for p in phases), phases[0]["first_s"]
    if line.key == "decode":
        return line.tokens / (seconds - first)
    if line.key == "first_token":
        return 1000 * first
    if line.run.startswith("prefill"):
        return line.tokens / first
    return seconds if line.unit == "s" else sum(p["tokens"] for p in phases) / seconds
