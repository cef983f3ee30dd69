"""What a loaded model costs while nobody asks it anything: its process's time on the processor, and how often its threads wake.

    python benchmarks/idle.py [--model smollm2] [--seconds 30] [--threads N]

Opens an AsyncLLM, serves eight requests at once, then lets its event loop sleep. Less than one percent of one core is asked for:
the command fails at more. For Unix.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import time

from nano_vllm import AsyncLLM, SamplingParams

REQUESTS, TOKENS = 8, 32
MOST = 1.0  # percent of one core


async def serve(llm: AsyncLLM, i: int) -> int:
    """-> tokens of an answer."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return sum([len(piece.token_ids) async for piece in llm.generate(f"Number {i} is", params)])


def used() -> tuple[float, float, int]:
    """Seconds on the clock, seconds on processors and voluntary context switches, of all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), usage.ru_utime + usage.ru_stime, usage.ru_nvcsw


async def main(args: argparse.Namespace) -> float:
    """-> percent of one core."""
    async with await AsyncLLM.load(args.model, **({"threads": args.threads} if args.threads else {})) as llm:
        begin = used()
        tokens = sum(await asyncio.gather(*(serve(llm, i) for i in range(REQUESTS))))
        served = used()
        await asyncio.sleep(args.seconds)
        slept = used()
    for name, before, after in ((f"{tokens} tokens", begin, served), ("idle", served, slept)):
        seconds, busy, switches = (b - a for a, b in zip(before, after))
        percent = 100 * busy / seconds
        print(f"{name:<12}{seconds:7.2f} s  {percent:8.3f} % of one core  {switches:7d} voluntary context switches", flush=True)
    return percent


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="alias, Hugging Face id, folder, or .gguf file (default smollm2)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of idleness (default 30)")
    parser.add_argument("--threads", type=int, help="of the backend")
    idle = asyncio.run(main(parser.parse_args()))
    if idle >= MOST:
        sys.exit(f"idle takes {idle:.2f} % of a core; less than {MOST:g} % is asked for")
