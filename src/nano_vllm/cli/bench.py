"""`nano-vllm bench`: how fast a model is here, and what the machine would allow."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from ..bench import GROUPS
from ..errors import OptionError
from . import _flags

HELP = "measure speed and latency, beside what the machine allows"
UNASKED = tuple(group for group in GROUPS if group != "scaling")
SMALL, LARGE = (16, 128, 64), (256, 1024, 1024)  # num_prompts, input_len, output_len; of a device with memory of its own: LARGE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "alias, Hugging Face id, folder, .nano or .gguf file; the same as --model"
    parser.add_argument("name", nargs="?", metavar="model", help=text)
    few, many = ((f"{small}, on a GPU {large}") for small, large in zip(SMALL[:2], LARGE[:2]))
    counts = {
        "--num-prompts": f"requests at once, four times as many in turn (default {few})",
        "--input-len": f"tokens of the longest prompt; the shortest has a tenth (default {many})",
        "--output-len": f"tokens of the longest answer, likewise (default {SMALL[2]}, on a GPU {LARGE[2]})",
        "--num-iters": "runs of each workload, of which the median counts (default 3)",
    }
    for flag, help in counts.items():
        parser.add_argument(flag, type=_flags.number(int), metavar="N", help=help)
    words = ", ".join(GROUPS)
    parser.add_argument("--only", nargs="+", choices=GROUPS, metavar="WORK", help=f"of {words}; default all but scaling")
    parser.add_argument("--json", metavar="FILE", help="file for all figures")
    _flags.add(parser, "model and engine", _flags.model_flags())


def check(args: argparse.Namespace) -> None:
    """OptionError for what cannot be meant, before anything is loaded."""
    for name, least in (("num_prompts", 1), ("input_len", 1), ("output_len", 2), ("num_iters", 1)):
        value, flag = getattr(args, name), "--" + name.replace("_", "-")
        if value is not None and not least <= value < 2**31:
            raise OptionError(f"{flag} {value} is not valid", f"it is a whole number of at least {least}")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise OptionError(f"--json {args.json} cannot be written", "there is no such folder", "Make it first.")


def sizes(args: argparse.Namespace, unasked: tuple[int, int, int], context: int):
    """What the flags ask for; lengths that are not asked for fit the context.

    Raises:
        OptionError: those that were asked for do not.
    """
    from ..bench.workloads import Sizes

    most = max(2, (context - 1) // 2)
    prompt, answer = (args.input_len or min(unasked[1], most)), (args.output_len or min(unasked[2], most))
    made = Sizes.of(args.num_prompts or unasked[0], prompt, answer, args.num_iters or 3)
    if made.longest_request > context:
        why = f"the longest request has {made.longest_request:,} tokens with its answer; the context holds {context:,}"
        raise OptionError("the workloads do not fit", why, "Ask for less with --input-len or --output-len.")
    return made


def measured(engine, wanted: list, asked) -> dict[str, list[float]]:
    """Figures of the lines, with a bar where stderr is a terminal."""
    from tqdm import tqdm

    from ..bench.running import measure
    from ..bench.workloads import requests

    total = asked.repeats * sum(requests(run, asked) for run in dict.fromkeys(line.run for line in wanted))
    with tqdm(total=total, unit="request", disable=None, leave=False, dynamic_ncols=True) as bar:
        return measure(engine, wanted, asked, bar.set_description, bar.update)


def main(args: argparse.Namespace) -> int:
    """Prints the table on stdout."""
    from ..bench import table, workloads
    from ..bench.limits import Limits
    from ..loading import choose_backend, load
    from ..model.program import lower
    from ..options import options
    from ..sources.resolve import resolve
    from . import _model

    check(args)
    given = _model.named(args)
    name, backend = choose_backend(options(**given))
    unasked = LARGE if hasattr(backend, "device") else SMALL
    asked = options(**{"max_num_seqs": args.num_prompts or unasked[0]} | given | {"backend": name})
    resolve(asked.model, asked)  # what is not there is told, or fetched, before anything is measured
    ceilings = backend.ceilings(asked) if hasattr(backend, "ceilings") else None
    loaded = load(asked)
    try:
        engine, program = loaded.engine, lower(loaded.spec)
        made = sizes(args, unasked, engine.plan.max_model_len)
        wanted = workloads.lines(made, args.only or UNASKED)
        print(heading(asked.model, engine.plan, made.repeats, ceilings), flush=True)
        figures = measured(engine, wanted, made)
        limits = {}
        if ceilings is not None:
            allowed = Limits.of(engine, program, ceilings)
            limits = {line.key: allowed.figure(line, workloads.lengths(line.run, made)) for line in wanted}
        print(table.table(wanted, figures, limits), flush=True)
    finally:
        loaded.close()
    if args.json:
        whole = {"model": str(asked.model), "backend": name, "sizes": asdict(made), "ceilings": ceilings and asdict(ceilings)}
        Path(args.json).write_text(json.dumps(whole | {"figures": figures, "limits": limits}, indent=1) + "\n", "utf-8")
    return 0


def heading(model: str, plan, repeats: int, ceilings) -> str:
    """What runs where, and what the machine does."""
    threads = f", {plan.threads} thread{'s' * (plan.threads > 1)}" if plan.backend == "cpu" else ""
    words = [f"{model} on {plan.backend}{threads}, {plan.kv_cache_dtype} cache, medians of {repeats}"]
    if ceilings is not None:
        rate = f"{ceilings.multiply_adds_per_s / 1e9:,.0f} G multiply-adds/s in {ceilings.multiplied}"
        words.append(f"the machine reads {ceilings.bytes_per_s / 1e9:,.1f} GB/s and does {rate}")
    return "\n".join([*words, ""])
