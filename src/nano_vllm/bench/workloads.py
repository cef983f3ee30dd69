"""What is measured: prompts of random ids, drawn anew for every run, so that no cache has seen them.

A request is (ids, new tokens); a phase is the requests that are given at once; a workload is the phases of one run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np

from . import GROUPS

Request = tuple[list[int], int]
Phase = list[Request]

VOCABULARY = 40_000  # ids are below it where no model says how many it has
TEMPERATURES = {"batch": 0.6, "queue": 0.6}  # of a run; others are greedy
QUEUE_REPEATS = 10_000  # from where the repeats of `queue` count: its prompts begin with the lengths of `batch`


@dataclass(frozen=True)
class Sizes:
    """Tokens and requests.

    Attributes:
        prompt, new: of the one stream.
        prefill: lengths of prompts; each is a workload of `prompts` at once.
        batch: requests at once, their prompts and answers `prompt_range` and `answer_range` (least, most) tokens long.
        queue: as `batch`, more than run at once.
        shared, sharing, own: tokens in common, requests that have them, and further tokens of each prompt and of each answer.
        scaling: requests at once, with `scaling_prompt` and `scaling_new` tokens each.
    """

    repeats: int = 5
    prompt: int = 128
    new: int = 128
    prefill: tuple[int, ...] = (512, 2048)
    prompts: int = 1
    batch: int = 32
    prompt_range: tuple[int, int] = (16, 256)
    answer_range: tuple[int, int] = (16, 256)
    queue: int = 128
    shared: int = 1024
    sharing: int = 16
    own: int = 32
    scaling: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    scaling_prompt: int = 32
    scaling_new: int = 64

    @staticmethod
    def quick() -> Sizes:
        """Small enough to see in a minute that all works, and too small to be quoted."""
        return Sizes(
            repeats=1, new=16, prefill=(128, 256), batch=8, prompt_range=(16, 48), answer_range=(16, 48), queue=16, shared=256,
            sharing=4, own=16, scaling=(1, 2, 4), scaling_new=16,
        )  # fmt: skip

    @staticmethod
    def of(requests: int, prompt: int, answer: int, repeats: int) -> Sizes:
        """All sizes from three: requests at once, and their longest prompt and answer.

        (256, 1024, 1024) gives W1 to W4 as benchmarks/gpu.py has them: prompts and answers from 100 tokens on, one stream of
        128 and 512, 16 prompts of 2048, 1024 requests.
        """
        return Sizes(
            repeats=repeats,
            prompt=min(128, prompt),
            new=max(2, min(512, answer)),
            prefill=(2 * prompt,),
            prompts=max(1, requests // 16),
            batch=requests,
            prompt_range=(max(1, prompt * 100 // 1024), prompt),
            answer_range=(max(1, answer * 100 // 1024), answer),
            queue=4 * requests,
            shared=prompt,
            sharing=max(2, requests),
            own=max(1, min(32, answer // 2)),
            scaling=tuple(2**i for i in range(requests.bit_length())),
            scaling_prompt=min(32, prompt),
            scaling_new=min(64, answer),
        )

    def with_repeats(self, repeats: int) -> Sizes:
        return replace(self, repeats=repeats)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request, its answer included."""
        sums = (self.prompt + self.new, max(self.prefill) + 1, self.prompt_range[1] + self.answer_range[1])
        return max(*sums, self.shared + 2 * self.own, self.scaling_prompt + self.scaling_new)


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        key: names it in the JSON file: decode, first_token, prefill_512, batch_32, queue_128, shared_together,
            shared_after_one, scaling_8.
        unit: tok/s (more is better), ms or s (less is better).
        run: the workload that it is computed from; lines of one workload are computed from the same runs.
        tokens: that `unit` counts, where they are not all of the answers'.
    """

    key: str
    title: str
    unit: str
    run: str
    tokens: int = 0

    @property
    def group(self) -> str:
        """Of GROUPS."""
        kind = self.run.split("_")[0]
        return {"one": "latency", "batch": "throughput"}.get(kind, kind)

    @property
    def more_is_better(self) -> bool:
        return self.unit == "tok/s"


def lines(sizes: Sizes, groups: list[str]) -> list[Line]:
    """The lines of `groups`, in the order of GROUPS."""
    times = f"{sizes.prompts} × " if sizes.prompts > 1 else ""
    found = {
        "latency": [
            Line("decode", "decode, one stream", "tok/s", "one", sizes.new - 1),
            Line("first_token", f"first token of {sizes.prompt}", "ms", "one"),
        ],
        "prefill": [
            Line(f"prefill_{n}", f"prefill {times}{n}", "tok/s", f"prefill_{n}", sizes.prompts * n) for n in sizes.prefill
        ],
        "throughput": [Line(f"batch_{sizes.batch}", f"{sizes.batch} requests at once", "tok/s", "batch")],
        "queue": [Line(f"queue_{sizes.queue}", f"{sizes.queue} requests, in turn", "tok/s", "queue")],
        "shared": [
            Line("shared_together", f"{sizes.sharing} sharing {sizes.shared}, together", "s", "shared_together"),
            Line("shared_after_one", f"{sizes.sharing} sharing {sizes.shared}, one first", "s", "shared_after_one"),
        ],
        "scaling": [Line(f"scaling_{n}", f"{n} concurrent", "tok/s", f"scaling_{n}") for n in sizes.scaling],
    }
    return [line for group in GROUPS if group in groups for line in found[group]]


def fresh_ids(rng: np.random.Generator, n: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Random ids, of a large vocabulary not the first thousand, where control tokens are."""
    return rng.integers(min(1000, vocabulary // 2), vocabulary, n).tolist()


def mixed(n: int, prompts: tuple[int, int], answers: tuple[int, int], repeat: int, vocabulary: int = VOCABULARY) -> Phase:
    """Requests of random lengths, seed 0: always the same lengths, and with another `repeat` other ids, so that no prefix is
    found again. nano-vllm's own benchmark is mixed(256, (100, 1024), (100, 1024), 0)."""
    draw = Random(0)
    ids = [[draw.randint(0, 10000) for _ in range(draw.randint(*prompts))] for _ in range(n)]
    counts = [draw.randint(*answers) for _ in range(n)]
    moved = [[((t + 997 * repeat) % 100000 + (repeat * 7) % 50) % vocabulary for t in prompt] for prompt in ids]
    return list(zip(moved, counts))


def requests(run: str, sizes: Sizes) -> int:
    """How many requests one run of a workload has."""
    kind, _, n = run.partition("_")
    counts = {"one": 1, "prefill": sizes.prompts, "batch": sizes.batch, "queue": sizes.queue, "shared": sizes.sharing}
    return int(n) if kind == "scaling" else counts[kind]


def draw(run: str, sizes: Sizes, rng: np.random.Generator, repeat: int, vocabulary: int = VOCABULARY) -> list[Phase]:
    """The phases of a workload, with ids that no earlier `repeat` had. Lengths are the same in every one."""
    kind, _, n = run.partition("_")
    count = requests(run, sizes)

    def one(prompt: int, new: int) -> Request:
        return fresh_ids(rng, prompt, vocabulary), new

    if run == "one":
        return [[one(sizes.prompt, sizes.new)]]
    if kind == "prefill":
        return [[one(int(n), 1) for _ in range(count)]]
    if kind == "scaling":
        return [[one(sizes.scaling_prompt, sizes.scaling_new) for _ in range(count)]]
    if run in ("batch", "queue"):
        begin = QUEUE_REPEATS if run == "queue" else 0
        return [mixed(count, sizes.prompt_range, sizes.answer_range, begin + repeat, vocabulary)]
    prefix = fresh_ids(rng, sizes.shared, vocabulary)
    sharing = [(prefix + fresh_ids(rng, sizes.own, vocabulary), sizes.own) for _ in range(count)]
    return [sharing] if run == "shared_together" else [sharing[:1], sharing[1:]]


def lengths(run: str, sizes: Sizes) -> list[Phase]:
    """A workload to count with: its phases with ids of no meaning."""
    return draw(run, sizes, np.random.default_rng(0), 0)


def figure(line: Line, phases: list[dict]) -> float:
    """A line's figure from what was told of each phase: `seconds`, `tokens`, and of one stream `first_s`."""
    seconds, first = sum(p["seconds"] for p in phases), phases[0]["first_s"]
    if line.key == "decode":
        return line.tokens / (seconds - first)
    if line.key == "first_token":
        return 1000 * first
    if line.unit == "s":
        return seconds
    return (line.tokens or sum(p["tokens"] for p in phases)) / seconds
