"""How much of the time of steady decode the card waits for the host, without a profiler, whose own cost would be counted.

    python -m benchmarks.gpu_gaps [--shape 0.6b|8b] [--streams 1 64 256]

The engine decodes as it always does, and steps are timed by the host's clock, some dozens in a row. Before and after, the step
that was last is repeated on the same inputs, upload, graph and download, launched ahead of the card so that it never waits: what
that takes by the card's clock is what a step needs. A step of the engine takes longer by what the card has waited for. Contexts
grow by a token a step, so that needs before and after are averaged.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from nano_vllm.bench.workloads import fresh_ids
from nano_vllm.sampling.params import SamplingParams

from .gpu import SHAPES, opened

STEPS, WINDOWS, REPEATS = 40, 9, 20
PROMPT = 100


class Repeated:
    """The last step of a session, again and again.

    Args:
        session: of the cuda backend; what is submitted from here on is noted.
    """

    def __init__(self, session) -> None:
        self.session, self.used = session, 0
        upload = session.staging.upload

        def noted(count: int) -> None:
            self.used = count
            upload(count)

        session.staging.upload = noted

    def seconds(self, streams: int) -> float:
        """Of a step by the card's clock."""
        import torch

        session = self.session
        graph = session.graphs.captured[session.graphs.shapes.decode(streams)]
        with torch.cuda.stream(session.stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            for i in range(REPEATS + 2):  # the first ones wait for the host
                if i == 2:
                    begin.record()
                session.staging.inputs[: self.used].copy_(session.staging.uploads[0][: self.used], non_blocking=True)
                graph.replay()
                session.staging.ids[0][:streams].copy_(session.runner.last_ids[:streams], non_blocking=True)
            end.record()
            torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / REPEATS


def measure(engine, streams: int, rng: np.random.Generator) -> list[tuple[float, float]]:
    """Of each window, the seconds of a step in the engine, and those that the card needs."""
    repeated, found = Repeated(engine.session), []
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=STEPS * (WINDOWS + 3))
    for _ in range(streams):
        engine.submit(engine.make_request(fresh_ids(rng, PROMPT, engine.vocab_size), params, lambda update: None))
    for _ in range(STEPS):
        engine.step()
    before = None
    for _ in range(WINDOWS):
        for _ in range(4):  # after the pause, until a step is prepared while the one before it runs
            engine.step()
        begun = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        took = (time.perf_counter() - begun) / STEPS
        staged = engine.session.staging
        staged.uploads[0].copy_(staged.uploads[staged.turn])
        needed = repeated.seconds(streams)
        if before is not None:
            found.append((took, (before + needed) / 2))
        before = needed
    while engine.busy:
        engine.step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    args = parser.parse_args()
    engine, _ = opened(args.shape)
    rng = np.random.default_rng(3)
    for streams in args.streams:
        found = measure(engine, streams, rng)
        took, needed = (statistics.median(times) for times in zip(*found))
        waits = sorted(100 * (1 - n / t) for t, n in found)
        print(
            f"{streams} streams: a step takes {1e6 * took:,.0f} µs, the card needs {1e6 * needed:,.0f}: it waits for "
            f"{statistics.median(waits):.1f} % of the time ({waits[0]:.1f} to {waits[-1]:.1f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
