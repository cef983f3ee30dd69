"""The CUDA backend on random weights in the shape of Qwen3-0.6B (or 8B): the engine itself, without tokenizer and text.

    python -m benchmarks.gpu [--shape 0.6b|8b] [--format bf16|q8|q4] [--only W2 W1 ...] [--eager] [--profile FILE] [--json FILE]
        [--tensor-parallel N]

W1: 256 requests, prompts and answers of 100 to 1024 tokens at random, temperature 0.6. W4: 1024 such. W2: one stream, prompt 128,
512 tokens, greedy; the first token alone and the rate of the others. W3: 16 prompts of 2048 tokens, one token each.
What the card reads per second and its bf16 matrix products are measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random

import numpy as np

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


def opened(shape: str, format: str = "bf16", **asked):
    """An engine over the cuda backend, and the seconds that opening took."""
    from nano_vllm import registry
    from nano_vllm.backends import cuda
    from nano_vllm.engine.engine import Engine
    from nano_vllm.memory.plan import resolve
    from nano_vllm.model.program import lower
    from nano_vllm.options import options

    program = lower(registry.load("architectures", "qwen3").describe(COMMON | SHAPES[shape]))
    opts = options(backend="cuda", max_model_len=4096, **asked)
    begun = time.perf_counter()
    weights = RandomWeights(program.parameters, format)
    plan = resolve(opts, program, "cuda", cuda.KV_DTYPE, cuda.device(opts, weights.infos))
    session = cuda.open(program, weights, plan)
    engine = Engine(session, program.vocab_size, prefix_caching=True)
    return engine, time.perf_counter() - begun


def run(engine, prompts: list[list[int]], counts: list[int], temperature: float) -> tuple[float, float]:
    """-> seconds until the first token, and until the last."""
    from nano_vllm.sampling.params import SamplingParams

    times: list[float] = []
    got = [0] * len(prompts)

    def sink(update, i: int) -> None:
        times.append(time.perf_counter())
        got[i] += len(update.ids)
        if update.error:
            raise update.error

    begun = time.perf_counter()
    for i, (prompt, count) in enumerate(zip(prompts, counts)):
        params = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=count)
        engine.submit(engine.make_request(prompt, params, lambda update, i=i: sink(update, i)))
    while engine.busy:
        engine.step()
    if got != counts:
        raise RuntimeError("a request got another number of tokens than it asked for")
    return times[0] - begun, times[-1] - begun


def mixed(n: int, repeat: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and lengths of answers; with `repeat`, other tokens of the same lengths, so that no prefix is found again."""
    draw = Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(n)]
    counts = [draw.randint(100, 1024) for _ in range(n)]
    return [[(t + 997 * repeat) % 100000 + (repeat * 7) % 50 for t in p] for p in prompts], counts


def random_prompts(n: int, length: int, seed: int) -> list[list[int]]:
    draw = Random(seed)
    return [[draw.randint(0, 100000) for _ in range(length)] for _ in range(n)]


def measure(engine, work: str, repeat: int) -> dict:
    if work in ("W1", "W4"):
        prompts, counts = mixed(256 if work == "W1" else 1024, repeat + (5 if work == "W4" else 0))
        seconds = run(engine, prompts, counts, 0.6)[1]
        return {"output tok/s": sum(counts) / seconds, "s": seconds, "steps": engine.stats.steps}
    if work == "W2":
        seed = 1000 + 100 * repeat
        for i in range(2):
            run(engine, random_prompts(1, 128, seed + i), [8], 0.0)
        first = sorted(run(engine, random_prompts(1, 128, seed + 10 + i), [1], 0.0)[1] for i in range(7))
        rates = []
        for i in range(3):
            begun, ended = run(engine, random_prompts(1, 128, seed + 20 + i), [512], 0.0)
            rates.append(511 / (ended - begun))
        return {"first token ms": 1e3 * first[3], "decode tok/s": sorted(rates)[1]}
    times = sorted(run(engine, random_prompts(16, 2048, 5000 + 100 * repeat + i), [1] * 16, 0.0)[1] for i in range(4))
    return {"prefill tok/s": 16 * 2048 / times[1], "s": times[1]}


def ceilings() -> dict:
    """Median of 10: bytes read per second by a sum over 4 GB, and a bf16 product of 8192 x 8192 x 8192 on random numbers."""
    import torch

    def seconds(work) -> float:
        begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(10)] for _ in range(2))
        for _ in range(3):
            work()
        for begin, end in zip(begins, ends):
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return sorted(b.elapsed_time(e) for b, e in zip(begins, ends))[5] / 1e3

    x = torch.randn(2**30, device="cuda")
    y = torch.empty_like(x)
    copied = 2 * x.numel() * 4 / seconds(lambda: y.copy_(x))
    summed = x.numel() * 4 / seconds(lambda: x.sum())
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / seconds(lambda: a @ b)
    return {"read GB/s": summed / 1e9, "copy GB/s": copied / 1e9, "bf16 TFLOP/s": rate / 1e12}


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
    """A trace of steady decode, and the kernels that take the most time, at 1 and at 256 streams."""
    import torch

    for streams in (1, 256):
        prompts = random_prompts(streams, 100, 77)
        run(engine, prompts, [60] * streams, 0.6)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
            run(engine, random_prompts(streams, 100, 78), [60] * streams, 0.6)
        print(f"\n{streams} streams, 60 tokens each\n", traced.key_averages().table(sort_by="cuda_time_total", row_limit=14))
        path = Path(target)
        traced.export_chrome_trace(str(path.with_name(f"{path.stem}-{streams}{path.suffix or '.json'}")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--format", choices=("bf16", "q8", "q4"), default="bf16")
    parser.add_argument("--only", nargs="+", default=["W2", "W1", "W3", "W1", "W4"])
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--profile", metavar="FILE")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    import torch

    from nano_vllm.backends.cuda import memory

    before = memory.nvml_used(0)
    memory.context_bytes(0)  # before anything else makes the context
    how = {"shape": args.shape, "format": args.format, "eager": args.eager, "GPUs": args.tensor_parallel}
    found: dict = {"device": torch.cuda.get_device_name(), **how}
    found["ceilings"] = ceilings()
    torch.cuda.empty_cache()
    print(found["device"], *(f"{name} {value:,.0f}" for name, value in found["ceilings"].items()), sep=", ", flush=True)
    engine, seconds = opened(args.shape, args.format, enforce_eager=args.eager, tensor_parallel_size=args.tensor_parallel, seed=0)
    print(f"opened in {seconds:.1f} s; {engine.plan.num_blocks:,} blocks", flush=True)
    repeats: dict[str, int] = {}
    for work in args.only:
        repeats[work] = repeats.get(work, -1) + 1
        result = measure(engine, work, repeats[work])
        found.setdefault(work, []).append(result)
        print(f"{work}:", ", ".join(f"{name} {value:,.2f}" for name, value in result.items()), flush=True)
    print(held(engine.session, before), flush=True)
    if args.profile:
        profile(engine, args.profile)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
