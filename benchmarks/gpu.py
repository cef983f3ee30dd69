"""The CUDA backend on random weights in the shape of Qwen3-0.6B (or 8B): the engine itself, without tokenizer and text.

    python -m benchmarks.gpu [--shape 0.6b|8b] [--format bf16|q8|q4] [--kv bf16|int8|fp8] [--only W2 W1 ...] [--repeats N]
        [--eager] [--profile FILE] [--json FILE] [--tensor-parallel N]

W1: 256 requests, prompts and answers of 100 to 1024 tokens at random, temperature 0.6. W4: 1024 such. W2: one stream, prompt 128,
512 tokens, greedy; the first token alone and the rate of the others. W2x64: the rate of 64 such at once, whose prompts are one
step. W3: 16 prompts of 2048 tokens, one token each.
What the card reads per second and its bf16 matrix products are measured in the same run, and each figure has beside it what
they would allow, as nano_vllm.bench.limits tells: W1's limit is its tokens over the seconds of

    prompts: max(weights read once in each step of 8192 tokens, matrices multiplied for each token)
    answers: max(weights once a step, for as many steps as the longest answer, and for each token K/V of all before it;
                 matrices multiplied for each token)

`--repeats 3` runs each work three times in a row and adds its medians. `--profile FILE` writes traces of steady decode, FILE-1
and FILE-256, and their picture, FILE.svg (benchmarks/gpu_profile.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from nano_vllm.bench.limits import Limits, percent
from nano_vllm.bench.running import run
from nano_vllm.bench.table import spread
from nano_vllm.bench.workloads import GROUPS, TEMPERATURES, Line, Sizes, draw, fresh_ids, lengths, lines

STREAMS, PROMPT, NEW = 64, 128, 512  # of W2x64
SIZES = replace(Sizes.of(256, 1024, 1024, 1), scaling_prompt=PROMPT, scaling_new=NEW)
LINES = {line.key: line for line in lines(SIZES, GROUPS)}
LINES["decode_64"] = Line("decode", "decode, 64 streams", "tok/s", f"scaling_{STREAMS}", STREAMS * (NEW - 1))
FIGURES = {  # work -> name of a figure -> its line
    "W1": {"output tok/s": "batch_256"},
    "W2": {"first token ms": "first_token", "decode tok/s": "decode"},
    "W2x64": {"decode tok/s": "decode_64"},
    "W3": {"prefill tok/s": "prefill_2048"},
    "W4": {"output tok/s": "queue_1024"},
}
SHAPES = {
    "0.6b": dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, tie_word_embeddings=True
    ),
    "8b": dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, tie_word_embeddings=False
    ),
    "tiny": dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, tie_word_embeddings=True),
}
DRAWN = 2**26 + 2 * 4093  # random bytes; no multiple of any row, so that rows differ where the bytes come again
STEP = 4096  # bytes from where one tensor begins to where the next does
COMMON = dict(
    model_type="qwen3", vocab_size=151936, head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-6, max_position_embeddings=40960,
    rope_theta=1e6, hidden_act="silu",
)  # fmt: skip


class RandomWeights(Mapping):
    """Tensors of about ±0.02; norms are ones. All are views of the same random bytes, each from another place on: drawing and
    storing them one by one would take minutes for 8 billion weights."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], format: str) -> None:
        from nano_vllm.formats import describe

        self.format, self.shapes, group = format, shapes, 0 if format == "bf16" else 32
        self.infos = {n: describe(n, s, *((format, group) if len(s) == 2 else ("f32",))) for n, s in shapes.items()}
        self.starts = {name: STEP * i for i, name in enumerate(shapes)}
        drawn = np.frombuffer(np.random.default_rng(0).bytes(DRAWN), np.uint16)
        if format == "bf16":  # sign and fraction are random, the exponent is that of 1/64
            drawn = (drawn & 0x807F) | 0x3C80
        self.bytes = np.resize(drawn, (STEP * len(shapes) + max(i.nbytes for i in self.infos.values())) // 2).view(np.uint8)

    def __reduce__(self):  # to ranks: what is drawn again need not be sent
        from benchmarks.gpu import RandomWeights

        return RandomWeights, (self.shapes, self.format)

    def _numbers(self, name: str, shape: tuple[int, ...], kind: type) -> np.ndarray:
        start = self.starts[name]
        return self.bytes[start : start + int(np.prod(shape)) * np.dtype(kind).itemsize].view(kind).reshape(shape)

    def __getitem__(self, name: str):
        from nano_vllm.formats import Tensor, pack

        shape, info = self.shapes[name], self.infos[name]
        if len(shape) == 1:
            return pack(name, np.ones(shape, np.float32), "f32")
        if info.format == "bf16":
            return Tensor(info, {"values": self._numbers(name, shape, np.uint16)})
        scales = np.full((shape[0], shape[1] // 32), 0.02 / {"q4": 4.6, "q8": 74}[info.format], np.float16)
        wide, kind = (shape, np.int8) if info.format == "q8" else ((shape[0], shape[1] // 2), np.uint8)
        return Tensor(info, {"scales": scales, "quants": self._numbers(name, wide, kind)})

    def __iter__(self):
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def lowered(shape: str):
    """A shape's program."""
    from nano_vllm import registry
    from nano_vllm.model.program import lower

    return lower(registry.load("architectures", "qwen3").describe(COMMON | SHAPES[shape]))


def opened(shape: str, format: str = "bf16", **asked):
    """An engine over the cuda backend, and the seconds that opening took."""
    from nano_vllm.backends import cuda
    from nano_vllm.engine.engine import Engine
    from nano_vllm.memory.plan import resolve
    from nano_vllm.options import options

    program = lowered(shape)
    opts = options(backend="cuda", max_model_len=4096, **asked)
    begun = time.perf_counter()
    weights = RandomWeights(program.parameters, format)
    plan = resolve(opts, program, "cuda", cuda.KV_DTYPE, cuda.device(opts, weights.infos))
    session = cuda.open(program, weights, plan)
    engine = Engine(session, program.vocab_size, prefix_caching=True)
    return engine, time.perf_counter() - begun


def measure(engine, work: str, repeat: int, rng: np.random.Generator) -> dict[str, float]:
    """One figure for each name in FIGURES, and the seconds of W1, W3 and W4; prompts are others than any before."""

    def once(name: str, answer: int | None = None) -> dict:
        (phase,) = draw(name, SIZES, rng, repeat, engine.vocab_size)
        phase = [(ids, answer or new) for ids, new in phase]
        return run(engine, phase, TEMPERATURES.get(name, 0.0))

    if work in ("W1", "W4"):
        found = once("batch" if work == "W1" else "queue")
        return {"output tok/s": found["tokens"] / found["seconds"], "s": found["seconds"], "steps": found["steps"]}
    if work == "W2":
        for _ in range(2):
            once("one", 8)
        first = statistics.median(once("one", 1)["seconds"] for _ in range(7))
        runs = [once("one") for _ in range(3)]
        rate = statistics.median(511 / (found["seconds"] - found["first_s"]) for found in runs)
        return {"first token ms": 1e3 * first, "decode tok/s": rate}
    if work == "W2x64":
        found = once(f"scaling_{STREAMS}")
        return {"decode tok/s": STREAMS * (NEW - 1) / (found["seconds"] - found["first_s"])}
    seconds = sorted(once("prefill_2048")["seconds"] for _ in range(4))[1]
    return {"prefill tok/s": 16 * 2048 / seconds, "s": seconds}


def shares(work: str, result: dict[str, float], limits: Limits) -> dict[str, tuple[float, float]]:
    """Name of a figure -> its limit, and the figure's percent of it."""
    found = {}
    for name, key in FIGURES[work].items():
        line = LINES[key]
        limit = limits.figure(line, lengths(line.run, SIZES))
        found[name] = limit, percent(line, result[name], limit)
    return found


def summary(work: str, results: list[dict[str, float]], limits: Limits) -> str:
    """A run's figures, or medians of several with the least and the most, beside the limits."""
    middle = {name: statistics.median(r[name] for r in results) for name in results[0]}
    shared, parts = shares(work, middle, limits), []
    for name, value in middle.items():
        part = f"{name} {value:,.2f}"
        if len(results) > 1:
            part += f" ({spread([r[name] for r in results])})"
        if name in shared:
            part += f" = {shared[name][1]:.0f} % of {shared[name][0]:,.2f}"
        parts.append(part)
    return (f"{work}, median of {len(results)}: " if len(results) > 1 else f"{work}: ") + ", ".join(parts)


def held(session, before: int | None) -> str:
    """What was promised before loading against what the device holds; `before`: NVML's bytes in use when the process began."""
    from nano_vllm.backends.cuda import memory

    promised, used, after = session.plan.share.promised, session.held.total(), memory.nvml_used(0)
    nvml = "" if before is None or after is None else f" (NVML {(after - before) / 1e9:.2f})"
    owners = session.memory()
    parts = ", ".join(f"{name} {count / 1e9:.3f}" for name, count in owners.items())
    off, unexplained = 100 * (used / promised - 1), used - sum(owners.values())
    return (
        f"memory, GB: promised {promised / 1e9:.2f}, used {used / 1e9:.2f}{nvml}, {off:+.2f} %; "
        f"{parts}, unexplained {unexplained / 1e9:.3f}"
    )


def profile(engine, target: str) -> None:
    """Traces of steady decode at 1 and at 256 streams, the kernels that take the most time, and their picture, FILE.svg."""
    import torch

    from . import gpu_profile

    path, rng, traces = Path(target), np.random.default_rng(7), {}
    for streams in (1, 256):
        for traced in (contextlib.nullcontext(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])):
            with traced:
                run(engine, [(fresh_ids(rng, 100, engine.vocab_size), 60) for _ in range(streams)], 0.6)
        print(f"\n{streams} streams, 60 tokens each\n", traced.key_averages().table(sort_by="cuda_time_total", row_limit=14))
        trace = path.with_name(f"{path.stem}-{streams}{path.suffix or '.json'}")
        traced.export_chrome_trace(str(trace))
        traces[f"{streams} stream{'s' * (streams > 1)}"] = trace
    gpu_profile.write(traces, path.with_suffix(".svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--format", choices=("bf16", "q8", "q4"), default="bf16")
    parser.add_argument("--kv", choices=("auto", "bf16", "int8", "fp8"), default="auto", help="type of the cache")
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=["W2", "W1", "W3", "W1", "W4"])
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="of each work that is named, one after the other")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--profile", metavar="FILE")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    import torch

    from nano_vllm.backends.cuda import memory
    from nano_vllm.backends.cuda.rates import measured

    with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # this process holds nothing of what is measured with
        ceilings = apart.submit(measured, "bf16").result()
    before = memory.nvml_used(0)
    memory.context_bytes(0)  # before anything else makes the context
    how = {"shape": args.shape, "format": args.format, "kv": args.kv, "eager": args.eager, "GPUs": args.tensor_parallel}
    found: dict = {"device": torch.cuda.get_device_name(), **how}
    found["ceilings"] = {"read GB/s": ceilings.bytes_per_s / 1e9, "bf16 TFLOP/s": 2 * ceilings.multiply_adds_per_s / 1e12}
    print(found["device"], *(f"{name} {value:,.0f}" for name, value in found["ceilings"].items()), sep=", ", flush=True)
    asked = dict(kv_cache_dtype=args.kv, enforce_eager=args.eager, tensor_parallel_size=args.tensor_parallel, seed=0)
    engine, seconds = opened(args.shape, args.format, **asked)
    print(f"opened in {seconds:.1f} s; {engine.plan.num_blocks:,} blocks", flush=True)
    limits, rng = Limits.of(engine, lowered(args.shape), ceilings), np.random.default_rng(1)
    for work in args.only:
        results = found.setdefault(work, [])
        for _ in range(args.repeats):
            results.append(measure(engine, work, len(results), rng))
            print(summary(work, results[-1:], limits), flush=True)
        if args.repeats > 1:
            print(summary(work, results[-args.repeats :], limits), flush=True)
    found["limits"] = {w: {name: s[0] for name, s in shares(w, found[w][0], limits).items()} for w in FIGURES if w in found}
    if args.tensor_parallel == 1:
        print(held(engine.session, before), flush=True)
    if args.profile:
        profile(engine, args.profile)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
