"""Nano-vLLM beside llama.cpp on the CPU: same file, same threads, one interleaved run, medians and ratios.

    pip install .[bench] && python benchmarks/side_by_side.py [--model FILE.gguf] [--threads N] [--repeats 5]

Each engine lives in its own process; only one works at a time, in turn, so that a machine whose speed drifts treats both alike.
Prompts are random ids, fresh each time, and the prefix cache is off. Rates are tokens per second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time

import numpy as np

PREFILL, DECODE_PROMPT, DECODE, TOGETHER = 512, 128, 128, 32
TOGETHER_PROMPT, TOGETHER_NEW = 32, 64


def fresh_ids(n: int) -> list[int]:
    return np.random.default_rng(time.time_ns()).integers(1000, 40000, n).tolist()


class Nano:
    """The worker of this project."""

    def __init__(self, model: str, threads: int) -> None:
        from nano_vllm import LLM

        self.llm = LLM(model, threads=threads, backend="cpu", enable_prefix_caching=False, max_model_len=2048)

    def _outputs(self, prompts: list[int], new: int) -> list:
        from nano_vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    def prefill(self) -> float:
        return PREFILL / self._outputs([fresh_ids(PREFILL)], 1)[0].timings.first_token_s

    def decode(self) -> float:
        return (DECODE - 1) / self._outputs([fresh_ids(DECODE_PROMPT)], DECODE)[0].timings.decode_s

    def first_token_ms(self) -> float:
        return 1000 * self._outputs([fresh_ids(DECODE_PROMPT)], 1)[0].timings.first_token_s

    def together(self) -> float:
        begin = time.perf_counter()
        self._outputs([fresh_ids(TOGETHER_PROMPT) for _ in range(TOGETHER)], TOGETHER_NEW)
        return TOGETHER * TOGETHER_NEW / (time.perf_counter() - begin)

    def one_by_one(self) -> float:
        begin = time.perf_counter()
        for _ in range(TOGETHER // 4):
            self._outputs([fresh_ids(TOGETHER_PROMPT)], TOGETHER_NEW)
        return TOGETHER // 4 * TOGETHER_NEW / (time.perf_counter() - begin)

    def bytes_per_token(self) -> float:
        stats = self.llm.stats()
        return stats["weight_bytes"] + stats["kv_bytes_per_token"] * (DECODE_PROMPT + DECODE / 2)


class Llama:
    """The worker of llama.cpp, through the plain C functions of llama-cpp-python."""

    def __init__(self, model: str, threads: int) -> None:
        import llama_cpp

        self.c = llama_cpp
        self.llama = llama_cpp.Llama(
            model, n_ctx=2048, n_batch=PREFILL, n_ubatch=PREFILL, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self.ctx = self.llama.ctx

    def _eval(self, ids: list[int]) -> int:
        array = (self.c.llama_token * len(ids))(*ids)
        if self.c.llama_decode(self.ctx, self.c.llama_batch_get_one(array, len(ids))):
            raise RuntimeError("llama_decode failed")
        logits = self.c.llama_get_logits_ith(self.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.llama.n_vocab(),)).argmax())

    def _clear(self) -> None:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.ctx), True)

    def _prompt_seconds(self, n: int) -> float:
        self._clear()
        begin = time.perf_counter()
        self._eval(fresh_ids(n))
        return time.perf_counter() - begin

    def prefill(self) -> float:
        return PREFILL / self._prompt_seconds(PREFILL)

    def first_token_ms(self) -> float:
        return 1000 * self._prompt_seconds(DECODE_PROMPT)

    def decode(self) -> float:
        self._clear()
        token = self._eval(fresh_ids(DECODE_PROMPT))
        begin = time.perf_counter()
        for _ in range(DECODE - 1):
            token = self._eval([token])
        return (DECODE - 1) / (time.perf_counter() - begin)


def work(engine: str, model: str, threads: int) -> None:
    """A worker: reads names of measurements, writes figures."""
    worker = {"nano": Nano, "llama": Llama}[engine](model, threads)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(worker, line.strip())()), flush=True)


class Worker:
    def __init__(self, engine: str, model: str, threads: int) -> None:
        command = [sys.executable, __file__, "--worker", engine, "--model", model, "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def _read(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a worker ended early")
        return json.loads(line)

    def __call__(self, what: str) -> float:
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self._read()


def read_bandwidth(threads: int) -> float:
    """Bytes per second that `threads` threads read together, best of five, from arrays no cache holds."""
    arrays = [np.ones(2**26, np.int64) for _ in range(threads)]
    best = 0.0
    for _ in range(5):
        pool = [threading.Thread(target=a.sum) for a in arrays]
        begin = time.perf_counter()
        for t in pool:
            t.start()
        for t in pool:
            t.join()
        best = max(best, sum(a.nbytes for a in arrays) / (time.perf_counter() - begin))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", choices=["nano", "llama"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model is None:
        from nano_vllm.sources.catalog import fetch

        args.model = str(fetch("smollm2"))
    if args.worker:
        return work(args.worker, args.model, args.threads)
    bandwidth = read_bandwidth(args.threads)
    nano, llama = (Worker(e, args.model, args.threads) for e in ("nano", "llama"))
    both = ("prefill", "decode", "first_token_ms")
    figures = {what: ([], []) for what in (*both, "together", "one_by_one")}
    for what in both:
        nano(what), llama(what)  # warm-up
    for _ in range(args.repeats):
        for what in both:
            figures[what][0].append(nano(what))
            figures[what][1].append(llama(what))
        for what in ("together", "one_by_one"):
            figures[what][0].append(nano(what))
    medians = {what: [statistics.median(column) if column else None for column in two] for what, two in figures.items()}
    print(f"{args.model}\n{args.threads} threads, medians of {args.repeats}, read bandwidth {bandwidth / 1e9:.1f} GB/s\n")
    print(f"{'':28}{'nano-vllm':>12}{'llama.cpp':>12}{'ratio':>8}")
    first = f"first token of {DECODE_PROMPT}, ms"
    names = {"prefill": f"prefill {PREFILL}, tok/s", "decode": "decode, tok/s", "first_token_ms": first}
    for what in both:
        ours, theirs = medians[what]
        print(f"{names[what]:28}{ours:12.1f}{theirs:12.1f}{ours / theirs:8.2f}")
    ours, serial = medians["together"][0], medians["one_by_one"][0]
    print(f"{f'{TOGETHER} at once, tok/s':28}{ours:12.1f}")
    print(f"{'one after the other, tok/s':28}{serial:12.1f}{'':12}{ours / serial:8.2f}")
    rate = nano("bytes_per_token") * medians["decode"][0]
    print(f"\ndecode reads {rate / 1e9:.1f} GB/s, {100 * rate / bandwidth:.0f} % of the bandwidth measured above")


if __name__ == "__main__":
    main()
