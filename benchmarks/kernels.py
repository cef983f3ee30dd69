"""The matrix kernels: each checked against NumPy, then timed on one thread beside its ceiling.

    python benchmarks/kernels.py [--isa avx512 …] [--format q4 …] [--n 3072] [--k 1024] [--seconds 0.1]

A ceiling is the smaller of two measured things: the kernel's inner step without its memory, and (where the matrix is larger than
the last cache; try --n 98304) memory's read bandwidth over the bytes of a weight. Numbers are 10⁹ multiply-adds a second of
the thread's processor time, the best of many runs, and the percentage of the ceiling.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from nano_vllm import formats
from nano_vllm._native import kernels

ROWS = (1, 2, 4, 8, 16, 64, 512)
CASES = {
    "q4": ("q4", {"group": 32}),
    "q4+min": ("q4", {"group": 32, "minimum": True}),
    "q4+min/128": ("q4", {"group": 128, "minimum": True}),
    "q4_k": ("q4_k", {}),
    "q5_k": ("q5_k", {}),
    "q6_k": ("q6_k", {}),
    "q8": ("q8", {}),
    "bf16": ("bf16", {}),
    "f16": ("f16", {}),
    "f32": ("f32", {}),
}


def best(run, seconds: float) -> float:
    """The shortest time of run() in `seconds`, of this thread's processor."""
    shortest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.thread_time()
        run()
        shortest = min(shortest, time.thread_time() - start)
    return shortest


def pack(tensor: formats.Tensor):
    info, planes = tensor.info, dict(tensor.planes)
    first = planes.pop("quants" if info.group else "values")
    return kernels.pack(info.format, *info.shape, info.group, info.minimum, first, **planes)


def prepare(isa: str, w, x: np.ndarray, quantized: bool, n: int):
    """-> a call without arguments that computes x · wᵀ, and the array it writes."""
    out = np.zeros((len(x), n), np.float32)
    source = kernels.quantize(isa, x) if quantized else x
    return (lambda: kernels.linear(isa, w, source, out)), out


def check(isa: str, tensor: formats.Tensor, w, x: np.ndarray) -> None:
    """ValueError unless the kernel's numbers are the definition's."""
    n, values = tensor.info.shape[0], tensor.unpack().astype(np.float64)
    run, out = prepare(isa, w, x, tensor.info.group > 0, n)
    run()
    seen = x
    if tensor.info.group:
        activations = kernels.quantize(isa, x)
        seen = (activations.quants.reshape(len(x), -1, 32) * activations.scales.astype(np.float64)[..., None]).reshape(x.shape)
    wrong = np.abs(out - seen @ values.T) > 1e-5 * (np.abs(seen) @ np.abs(values).T)
    if wrong.any():
        raise ValueError(f"{isa} {tensor.info.format}: {wrong.sum()} of {wrong.size} results differ from the definition")


def read_bandwidth(seconds: float) -> float:
    """Bytes a second that one thread reads from memory."""
    array = np.ones(2**26, np.float32)
    return array.nbytes / best(array.max, seconds)


def peak(isa: str, format: str, seconds: float) -> float:
    steps = 2_000 if isa == "generic" else 100_000
    return kernels.spin(isa, format, steps) / best(lambda: kernels.spin(isa, format, steps), seconds)


def repeated(tensor: formats.Tensor, n: int) -> formats.Tensor:
    """The first rows over and over, so that large matrices need no quantising."""
    order = np.arange(n) % tensor.info.shape[0]
    many = formats.reorder(tensor, order)
    info = formats.describe("w", (n, tensor.info.shape[1]), many.info.format, many.info.group, many.info.minimum)
    return formats.Tensor(info, many.planes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", nargs="+", default=kernels.isas(), choices=kernels.isas())
    parser.add_argument("--format", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--n", type=int, default=3072, help="outputs")
    parser.add_argument("--k", type=int, default=1024, help="inputs, a multiple of 256")
    parser.add_argument("--seconds", type=float, default=0.1, help="per number")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    bandwidth = read_bandwidth(3 * options.seconds)
    print(f"{options.n} × {options.k}, one thread; memory reads {bandwidth / 1e9:.1f} GB/s")
    print(f"{'':20s}  peak " + "".join(f"{rows:>6d} row{'s' if rows > 1 else ' '} " for rows in ROWS))
    for isa in options.isa:
        for name in options.format:
            format, extra = CASES[name]
            n = options.n if isa != "generic" else min(options.n, 256)
            small = formats.pack("w", rng.normal(0, 0.1, (64, options.k)).astype(np.float32), format, **extra)
            check(isa, small, pack(small), rng.normal(0, 1, (7, options.k)).astype(np.float32))
            w, top = pack(repeated(small, n)), peak(isa, format, options.seconds)
            cells = []
            for rows in ROWS:
                x = rng.normal(0, 1, (rows, options.k)).astype(np.float32)
                run, _ = prepare(isa, w, x, small.info.group > 0, n)
                rate = rows * n * options.k / best(run, options.seconds)
                limit = min(top, bandwidth * rows * n * options.k / w.nbytes) if w.nbytes > 2**26 else top
                cells.append(f"{rate / 1e9:6.1f} {100 * rate / limit:3.0f}% ")
            print(f"{isa:8s} {name:10s} {top / 1e9:6.1f} " + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
