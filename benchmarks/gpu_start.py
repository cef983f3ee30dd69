"""Time from the start of a process to its first token on the GPU: a model of random weights in bf16, loaded from its file.

    python -m benchmarks.gpu_start [--shape 0.6b|8b] [--eager] [--runs N] [--json FILE]

The file is written once, into a temporary folder. Each run is a fresh process, timed from before it is started; the first fills
Triton's cache if it is empty, the table is of the medians of the others. `compiled` counts kernels that Triton did not find in
its cache, `twice` those that it compiled more than once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PROMPT = 128


def write(folder: Path, shape: str) -> None:
    """config.json and model.safetensors of random weights."""
    from nano_vllm.architectures._llama_family import INSIDE, OUTSIDE
    from nano_vllm.architectures.qwen3 import describe
    from nano_vllm.model.spec import parameters

    from .gpu import COMMON, SHAPES, RandomWeights

    config = COMMON | SHAPES[shape]
    weights = RandomWeights(parameters(describe(config)), "bf16")
    names = {ours: theirs for theirs, ours in OUTSIDE.items()}
    for i in range(config["num_hidden_layers"]):
        names |= {f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}" for theirs, ours in INSIDE.items() if ours}
    header, at = {}, 0
    for name, info in weights.infos.items():
        entry = {"dtype": info.format.upper(), "shape": info.shape, "data_offsets": [at, at + info.nbytes]}
        header[names[name]], at = entry, at + info.nbytes
    (folder / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in weights:
            file.write(weights[name].planes["values"].data)


def child(folder: str, eager: bool, begun: float) -> None:
    """Prints a line of JSON: what each part took, in seconds, and what Triton did."""
    marks = {"interpreter": time.time()}
    from nano_vllm.backends import cuda
    from nano_vllm.engine.engine import Engine
    from nano_vllm.memory.plan import resolve
    from nano_vllm.model.program import lower
    from nano_vllm.model.weights import open_model
    from nano_vllm.options import options
    from nano_vllm.sampling.params import SamplingParams

    marks["import nano_vllm"] = time.time()
    opts = options(backend="cuda", enforce_eager=eager, max_model_len=4096)
    cuda.probe(opts)
    marks["probe, with import torch"] = time.time()
    import triton

    compiled: list[str] = []

    def listen(*, src, metadata, metadata_group, times, cache_hit) -> None:
        if not cache_hit:
            compiled.append(metadata["hash"])

    triton.knobs.compilation.listener = listen
    opened = open_model(folder)
    program = lower(opened.spec)
    marks["headers"] = time.time()
    plan = resolve(opts, program, "cuda", cuda.KV_DTYPE, cuda.device(opts, opened.weights.infos))
    marks["plan, with CUDA's context"] = time.time()
    session = cuda.open(program, opened.weights, plan)
    at = marks["plan, with CUDA's context"]
    for name, seconds in session.opening.items():
        at = marks[name] = at + seconds
    marks["session, the rest"] = time.time()
    engine = Engine(session, program.vocab_size)
    first: list[float] = []
    prompt = np.random.default_rng(0).integers(0, program.vocab_size, PROMPT).tolist()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.submit(engine.make_request(prompt, params, lambda update: first.append(time.time())))
    while engine.busy:
        engine.step()
    marks["first token"] = first[0]
    ends = [begun, *marks.values()]
    parts = {name: end - start for name, start, end in zip(marks, ends, ends[1:])} | {"all": first[0] - begun}
    print(json.dumps({"seconds": parts, "compiled": len(compiled), "twice": len(compiled) - len(set(compiled))}))


def measured(folder: str, eager: bool) -> dict:
    """One run, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu_start", "--child", folder, *(["--eager"] if eager else [])]
    # Modules are compiled in the first run, as by an installation, also where it may not write beside them.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env = kept | {"PYTHONPYCACHEPREFIX": str(Path(folder) / "bytecode")}
    done = subprocess.run([*command, "--begun", repr(time.time())], stdout=subprocess.PIPE, text=True, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("0.6b", "8b", "tiny"), default="0.6b")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="after the first")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.eager, args.begun)
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.shape)
        first, *runs = [measured(folder, args.eager) for _ in range(1 + args.runs)]
    print(f"{'first run':<28}{first['seconds']['all']:6.2f} s, {first['compiled']} compiled, {first['twice']} twice")
    for name in first["seconds"]:
        print(f"{name:<28}{np.median([run['seconds'][name] for run in runs]):6.2f} s")
    print("compiled in later runs:", ", ".join(str(run["compiled"]) for run in runs))
    if args.json:
        Path(args.json).write_text(json.dumps({"first": first, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
