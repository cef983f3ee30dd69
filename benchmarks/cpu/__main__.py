"""Nano-vLLM beside llama.cpp, its server, OpenVINO GenAI and onnxruntime-genai on the CPU.

    python -m benchmarks.cpu [--models m1-q4_1 FILE.gguf …] [--only latency prefill …] [--quick] [--json FILE] [--plot FILE.svg]

Run it from the repository's folder, on a machine that does nothing else. Each engine lives in its own process; only one works at
a time, in turn, on the same fresh prompts, so that a machine whose speed drifts treats all alike. What the machine can do is
measured first. A ratio above 1 means that Nano-vLLM is faster. llama-cpp-python's part is one stream; requests at once are
llama-server's, which `make llama-server` builds from the same source.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from nano_vllm.backends.cpu.rates import int8_peak, read_bandwidth
from nano_vllm.bench.workloads import GROUPS, Line, Sizes, draw, figure, lines
from nano_vllm.memory.machine import usable_cpus
from nano_vllm.options import cache_dir

from . import report
from .engines import ENGINES, OURS, serves
from .models import KNOWN, NAMES, multiply_adds, prepare
from .plot import svg

ROOT = Path(__file__).parents[2]
ONNX = "m1-q4_1"  # the file from whose numbers onnxruntime's model is made
PAUSE = 0.5  # s before an engine's turn: threads of the one before may still spin
DEFAULT = f"default the first {len(NAMES)}, of --quick the first"


class Worker:
    """An engine's process with one file loaded. `absent` says why there is none."""

    def __init__(self, python: str, engine: str, settings: dict) -> None:
        command = [python, "-m", "benchmarks.cpu.engines", engine, json.dumps(settings)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.engine, self.absent = engine, self._read().get("absent")

    def _read(self) -> dict | None:
        for line in self.process.stdout:
            if line.startswith(("{", "null")):  # libraries print there, too
                return json.loads(line)
        return {"absent": "its process ended early"}

    def __call__(self, phase) -> dict | None:
        """None where it does not serve such a phase, or has failed: `absent` says why then."""
        try:
            self.process.stdin.write(json.dumps(phase) + "\n")
            self.process.stdin.flush()
            answer = self._read()
        except BrokenPipeError:
            answer = {"absent": "its process ended early"}
        if answer and "absent" in answer:
            self.absent, answer = answer["absent"], None
        return answer

    def close(self) -> None:
        self.process.communicate()  # closes its input, which ends it


def run_all(workers: list[Worker], wanted: list[Line], sizes: Sizes) -> tuple[dict, dict]:
    """-> line -> engine -> figures, and how many prompt tokens came from our prefix cache."""
    rng = np.random.default_rng(time.time_ns())
    figures = {line.key: {w.engine: [] for w in workers} for line in wanted}
    hits = {"fresh": 0, "shared": 0}
    for run, group in {line.run: line.group for line in wanted}.items():
        print(f"… {run}", file=sys.stderr, flush=True)
        for repeat in range(-1, sizes.repeats):  # the first warms up and does not count
            phases = draw(run, sizes, rng, repeat + 1)
            for worker in (w for w in workers if w.absent is None and serves(w.engine, [group])):
                time.sleep(PAUSE)
                answers = [worker(phase) for phase in phases]
                if None in answers:
                    continue
                hits["shared" if run.startswith("shared") else "fresh"] += sum(a.get("prefix_hits", 0) for a in answers)
                for line in wanted:
                    if line.run == run and repeat >= 0:
                        figures[line.key][worker.engine].append(figure(line, answers))
    return figures, hits


def measure(name: str, path: Path, args: argparse.Namespace, wanted: list[Line], sizes: Sizes) -> dict:
    most = max(sizes.batch, sizes.sharing, *sizes.scaling)
    settings = {"model": str(path), "threads": args.threads, "longest": sizes.longest_request, "requests": most}
    pythons = {"OpenVINO": args.openvino, "onnxruntime": args.onnx}
    more = {"llama-server": {"binary": args.llama_server}, "onnxruntime": {"folder": str(args.folder / f"{name}-onnx-int4")}}
    engines = [e for e in args.engines if e != "onnxruntime" or name == ONNX]
    workers = [Worker(pythons.get(e, sys.executable), e, settings | more.get(e, {})) for e in engines]
    try:
        figures, hits = run_all(workers, wanted, sizes)
        facts = dict(zip(("layers", "head"), multiply_adds(path)))
        facts |= next((w("facts") or {} for w in workers if w.engine == OURS and w.absent is None), {})
    finally:
        for worker in workers:
            worker.close()
    absent = {w.engine: w.absent for w in workers if w.absent is not None}
    size = path.stat().st_size / 1e6
    return {
        "model": name,
        "megabytes": size,
        "engines": engines,
        "figures": figures,
        "facts": facts,
        "hits": hits,
        "absent": absent,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=[], help=f"of {', '.join(KNOWN)}, or GGUF files; {DEFAULT}")
    usual = [group for group in GROUPS if group != "queue"]
    add("--only", nargs="+", choices=GROUPS, default=usual, help="parts of the table; default all but queue")
    add("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    add("--threads", type=int, default=usable_cpus())
    add("--repeats", type=int, help="of each measurement, default 5; --quick 1")
    add("--quick", action="store_true", help="small sizes, to see that all works; not to be quoted")
    add("--folder", type=Path, default=cache_dir() / "benchmarks", help="where the files that it makes are kept")
    python = {n: str(path) if (path := ROOT / f".venv/{n}/bin/python").exists() else sys.executable for n in ("openvino", "onnx")}
    add("--openvino", default=python["openvino"], metavar="PYTHON", help="the Python that has openvino-genai")
    add("--onnx", default=python["onnx"], metavar="PYTHON", help="the Python that has onnxruntime-genai")
    server = ROOT / ".venv/bin/llama-server"
    add("--llama-server", default=str(server) if server.exists() else None, metavar="PATH", help="llama.cpp's server")
    add("--json", type=Path, help="file for all figures")
    add("--plot", type=Path, help="SVG file for the scaling of the first model")
    args = parser.parse_args()
    args.models = args.models or list(NAMES[:1] if args.quick else NAMES)
    if unknown := [m for m in args.models if m not in KNOWN and not Path(m).is_file()]:
        parser.error(f"no model {unknown[0]!r}: it is one of {', '.join(KNOWN)}, or a file")
    if args.plot and "scaling" not in args.only:
        parser.error("--plot shows scaling, which --only leaves out")
    args.engines = [engine for engine in args.engines if serves(engine, args.only)]
    return args


def main() -> None:
    args = arguments()
    sizes = Sizes.quick() if args.quick else Sizes()
    sizes = sizes if args.repeats is None else sizes.with_repeats(args.repeats)
    wanted = lines(sizes, args.only)
    paths = {name: prepare(name, args.folder) for name in args.models}
    ceilings = {"bytes_per_s": read_bandwidth(args.threads), "int8_per_s": int8_peak(args.threads)}
    threads = f"{args.threads} thread{'s' * (args.threads > 1)}"
    print(f"{platform.machine()}, {threads}, medians of {sizes.repeats} after a warm-up")
    print(f"reads {ceilings['bytes_per_s'] / 1e9:.1f} GB/s, multiplies int8 {ceilings['int8_per_s'] / 1e9:.0f} G/s", flush=True)
    results = []
    for name, path in paths.items():
        results.append(measure(name if name in KNOWN else path.name, path, args, wanted, sizes))
        print("\n" + report.table(results[-1], wanted, ceilings, sizes), flush=True)
        if args.json:
            whole = {"threads": args.threads, "quick": args.quick, "ceilings": ceilings, "results": results}
            args.json.write_text(json.dumps(whole, indent=1))
    if best := report.beside_the_best(results, wanted):
        print("\n" + best)
    if args.plot:
        args.plot.write_text(svg(report.curves(results[0]), f"{results[0]['model']}, {threads}"))


if __name__ == "__main__":
    main()
