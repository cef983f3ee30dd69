"""The kernels: each checked against NumPy, then timed beside its ceiling.

    python benchmarks/kernels.py [--isa avx512 …] [--kernel q4 "decode f16" …] [--rows 1 64 …] [--seconds 0.2] [--check]

Rows are a step's: of a linear, a norm, a gate or a rotation any; of `decode` each the last of a sequence of --context tokens, of
`prefill` all the last of one. A step runs a kernel many times, each with a matrix or a cache of its own, on fresh tokens; a step
without them is taken off, and the best of several counts. The caches are filled with one byte, since speed does not depend on it.

- Linears (by format) and attention (by cache type): 10⁹ multiply-adds a second. The ceiling is the smaller of two measured
  things: the instruction set's inner step without memory (`peak`, of attention that of float32), and the multiply-adds that the
  bytes of weights or keys and values allow at the rate at which as many threads read 1 GB.
- Norm, gates, rotation and rounding to int8 (on one thread) move rows: 10⁹ bytes read and written a second, beside a plain copy
  in the second cache; fewer rows than threads, beside one thread's.

Percentages are of the ceiling; – is a time that is lost in that of the step without copies, as on a busy machine.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import time
from collections.abc import Callable

import numpy as np
from kernel_cases import SMALL, Case, Shape, cases, check

from nano_vllm import _native
from nano_vllm._native import kernels
from nano_vllm.backends import cpu
from nano_vllm.backends._rounding import quantize_rows
from nano_vllm.backends.cpu.rates import read_bandwidth, together
from nano_vllm.memory.machine import physical_cores
from nano_vllm.model.program import Cache

ROWS = (1, 2, 4, 8, 16, 64, 512)
COLD = 2**27  # bytes of weights or keys and values in a step, more than the last cache
COPIED = 2**18  # bytes that fit the second cache twice
MOST_COPIES = 256
QUANTIZE = "quantize"


def best(run: Callable[[], float], seconds: float) -> float:
    """The least that run() says in `seconds`, of three times or more."""
    found, end = [], time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        found.append(run())
    return min(found)


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def copy_rate(threads: int) -> float:
    """Bytes read and written a second by a plain copy."""
    arrays = [(np.zeros(COPIED, np.uint8), np.ones(COPIED, np.uint8)) for _ in range(threads)]

    def work(i: int) -> int:
        target, source = (array.ctypes.data for array in arrays[i])
        for _ in range(500):
            ctypes.memmove(target, source, COPIED)
        return 500 * 2 * COPIED

    return together(work, threads, 8)


def peak(isa: str, format: str, threads: int) -> float:
    """Multiply-adds a second without memory."""
    steps = 20_000 if isa == "generic" else 500_000
    return together(lambda i: kernels.spin(isa, format, steps), threads, 5)


class Steps:
    """Steps of a case's program on one instruction set, with `copies` copies or none."""

    def __init__(self, case: Case, isa: str, threads: int, rows: int, copies: int) -> None:
        self.case, self.rows, self.rng = case, rows, np.random.default_rng()
        program = case.program(copies)
        plan = case.plan(isa, threads, rows, case.blocks(rows))
        self.session = cpu.open(program, case.weights(program, self.rng), plan)
        self.session.native.fill_cache(0x0C)  # normal in every type, and so is what comes of it

    def run(self) -> float:
        """Seconds of a step on tokens that were never seen."""
        given = self.case.batch(self.rows, self.session.program.vocab_size, self.rng)
        arrays = given.tokens, given.positions, given.starts, given.block_tables[0], given.wanted[:1]
        return timed(lambda: self.session.native.run(*arrays, False))


def seconds_of(case: Case, isa: str, threads: int, rows: int, copies: int, seconds: float) -> float:
    """Of one copy."""
    full, empty = (Steps(case, isa, threads, rows, n) for n in (copies, 0))
    taken = difference(best(full.run, seconds), best(empty.run, seconds / 4))
    for steps in (full, empty):
        steps.session.close()
    return taken / copies


def difference(full: float, empty: float) -> float:
    """NaN where it is less than a tenth, which may be noise."""
    return full - empty if full > 1.1 * empty else math.nan


@functools.cache
def token_bytes(cache: Cache, kv: str) -> float:
    """Of one token's keys and values in one cache."""
    session = _native.Session(threads=1, isa="", max_rows=1, vocab=1, kv_type=kv, block_size=16, num_blocks=1024)
    session.add_cache(cache.kv_heads, cache.head_size)
    return session.memory()["kv"] / (16 * 1024)


def bytes_read(case: Case, rows: int) -> float:
    """Weights, or keys and values, of one copy."""
    if case.weight is None:
        return token_bytes(case.cache, case.kv) * case.tokens(rows) * (rows if case.alone else 1)
    info = case.weight.info
    return kernels.packed_bytes(info.format, *info.shape, info.group, info.minimum)


def bytes_moved(case: Case, rows: int) -> float:
    """What comes in and goes out; of a rotation also what it stores."""
    return rows * (4 * (case.width + case.out) + (token_bytes(case.cache, case.kv) if case.cache else 0))


def check_quantize(isa: str) -> None:
    """ValueError unless whole numbers and scales are NumPy's."""
    x = np.random.default_rng(0).normal(0, 1, (7, 256)).astype(np.float32)
    found, (quants, scales) = kernels.quantize(isa, x), quantize_rows(x)
    if (found.quants != quants.reshape(x.shape)).any() or (found.scales != scales).any():
        raise ValueError(f"{isa} {QUANTIZE}: results differ from the definition")


def quantize_seconds(isa: str, rows: int, width: int, seconds: float) -> float:
    """On one thread, less the call for one group."""
    rng = np.random.default_rng()

    def run(shape: tuple[int, int]) -> float:
        fresh = rng.standard_normal(shape, np.float32)
        return timed(lambda: kernels.quantize(isa, fresh))

    return difference(best(lambda: run((rows, width)), seconds), best(lambda: run((1, 32)), seconds / 4))


class Bench:
    """Attributes:
    bandwidth: bytes a second that all threads read; copied: that 1 and all threads copy.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.bandwidth = read_bandwidth(args.threads)
        self.copied = {n: copy_rate(n) for n in {1, args.threads}}
        self.cases = cases(Shape(args.n, args.k, context=args.context), args.types)

    def multiplied(self, case: Case, isa: str, rows: int, top: float) -> tuple[float, float]:
        """-> 10⁹ multiply-adds a second, and the fraction of the ceiling."""
        work, read = case.work(rows), bytes_read(case, rows)
        copies = max(1, min(math.ceil(COLD / read), int(self.args.seconds * top / work)))
        rate = work / seconds_of(case, isa, self.args.threads, rows, copies, self.args.seconds)
        return rate / 1e9, rate / min(top, self.bandwidth * work / read)

    def moved(self, case: Case, isa: str, rows: int) -> tuple[float, float]:
        moved = bytes_moved(case, rows)
        copies = max(16, min(MOST_COPIES, int(COLD / moved)))
        rate = moved / seconds_of(case, isa, self.args.threads, rows, copies, self.args.seconds)
        return rate / 1e9, rate / self.copied[1 if rows < self.args.threads else self.args.threads]

    def quantized(self, isa: str, rows: int) -> tuple[float, float]:
        rate = 5 * rows * self.args.k / quantize_seconds(isa, rows, self.args.k, self.args.seconds)
        return rate / 1e9, rate / self.copied[1]

    def line(self, isa: str, name: str) -> None:
        case = self.cases.get(name)
        top = peak(isa, case.peak, self.args.threads) if case and case.multiplies else 0
        print(f"{isa:9}{name:18}" + (f"{top / 1e9:6.1f} " if top else f"{'GB/s':>6} "), end="", flush=True)
        for rows in self.args.rows:
            if case is None:
                rate, part = self.quantized(isa, rows)
            else:
                rate, part = self.multiplied(case, isa, rows, top) if top else self.moved(case, isa, rows)
            print(f"{'–':>12}" if math.isnan(rate) else f"{rate:7.1f} {100 * part:3.0f}%", end="", flush=True)
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, types = parser.add_argument, list(cpu.CACHE_TYPES)
    names = [*cases(SMALL, types), QUANTIZE]
    add("--isa", nargs="+", default=kernels.isas(), choices=kernels.isas())
    add("--kernel", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    add("--rows", nargs="+", type=int, default=ROWS)
    add("--threads", type=int, default=physical_cores()[0])
    add("--n", type=int, default=3072, help="outputs of a matrix, half the width of a gate's rows")
    add("--k", type=int, default=1024, help="inputs of a matrix, a multiple of 256, and the width of a norm's rows")
    add("--context", type=int, default=512, help="tokens that attention sees")
    add("--seconds", type=float, default=0.2, help="per number")
    add("--check", action="store_true", help="only check")
    args = parser.parse_args()
    args.types = types
    bench = None if args.check else Bench(args)
    if bench:
        rates = ", ".join(f"{rate / 1e9:.1f} GB/s on {n}" for n, rate in sorted(bench.copied.items()))
        print(f"{args.threads} threads; memory reads {bench.bandwidth / 1e9:.1f} GB/s, the second cache copies {rates}")
        print(f"{'':27}{'peak':>6} " + "".join(f"{rows:>7} row{'s' if rows > 1 else ' '}" for rows in args.rows))
    small = cases(SMALL, types)
    for isa in args.isa:
        for name in args.kernel:
            check(small[name], isa, args.threads) if name in small else check_quantize(isa)
            if bench:
                bench.line(isa, name)
        print(f"{isa}: {len(args.kernel)} kernels give the definition's numbers", flush=True)


if __name__ == "__main__":
    main()
