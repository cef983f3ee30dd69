"""Running workloads on an engine, in this thread: no tokenizer, no text, no queue between."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ..sampling.params import SamplingParams
from . import workloads
from .workloads import Line, Phase, Sizes


def run(engine, phase: Phase, temperature: float = 0.0, finished: Callable[[], None] = lambda: None) -> dict:
    """Gives a phase's requests at once and steps until the last has ended; end-of-text ids end none.

    Args:
        engine: an `Engine` that nobody else steps.
        finished: called when a request has ended.

    Returns:
        `seconds` until the last token, `first_s` until the first, `tokens` of all answers, `steps` taken, and `prefix_hits`,
        tokens of prompts that came from the prefix cache.

    Raises:
        RuntimeError: a request got another number of tokens than it asked for.
        NanoVLLMError: a request is refused, or failed.
    """
    times: list[float] = []
    errors: list[Exception] = []
    got = [0] * len(phase)

    def sink(update, i: int) -> None:
        times.append(time.perf_counter())
        got[i] += len(update.ids)
        if update.finish_reason is not None:
            finished()
        if update.error:
            errors.append(update.error)

    steps, hits = engine.stats.steps, engine.stats.prefix_hit_tokens
    begun = time.perf_counter()
    for i, (ids, new) in enumerate(phase):
        params = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=new)
        engine.submit(engine.make_request(ids, params, lambda update, i=i: sink(update, i)))
    while engine.busy:
        engine.step()
    if errors:
        raise errors[0]
    if got != [new for _, new in phase]:
        raise RuntimeError("a request got another number of tokens than it asked for")
    return {
        "seconds": times[-1] - begun,
        "first_s": times[0] - begun,
        "tokens": sum(got),
        "steps": engine.stats.steps - steps,
        "prefix_hits": engine.stats.prefix_hit_tokens - hits,
    }


def measure(
    engine, wanted: list[Line], sizes: Sizes, progress: Callable[[str], None] = lambda run: None, finished=lambda: None
) -> dict:
    """Runs the workloads of the lines, each `sizes.repeats` times after a short one that is not counted.

    Args:
        progress: called with a workload's name before its first run.
        finished: called when a request has ended.

    Returns:
        line -> its figures, in the order of the runs.
    """
    rng, vocabulary = np.random.default_rng(0), engine.vocab_size
    run(engine, [(workloads.fresh_ids(rng, sizes.prompt, vocabulary), min(8, sizes.new))])
    figures: dict[str, list[float]] = {line.key: [] for line in wanted}
    for name in dict.fromkeys(line.run for line in wanted):
        progress(name)
        for repeat in range(sizes.repeats):
            phases = workloads.draw(name, sizes, rng, repeat, vocabulary)
            told = [run(engine, phase, workloads.TEMPERATURES.get(name, 0.0), finished) for phase in phases]
            for line in wanted:
                if line.run == name:
                    figures[line.key].append(workloads.figure(line, told))
    return figures
