"""What the machine can do, measured in the run that is compared with it: bytes read and int8 multiply-adds a second."""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from ...memory.machine import free_memory

READ = 2**30  # bytes, more than any cache holds; less where memory is short


def together(work: Callable[[int], int], threads: int, repeats: int) -> float:
    """The most that `threads` threads did in a second, of `repeats` times: work(i) -> how much thread i did. It frees the GIL."""
    best = 0.0
    for _ in range(repeats):
        done = [0] * threads

        def run(i: int, done=done) -> None:
            done[i] = work(i)

        pool = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
        begin = time.perf_counter()
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
        best = max(best, sum(done) / (time.perf_counter() - begin))
    return best


def read_bandwidth(threads: int, repeats: int = 8) -> float:
    """Bytes per second, of the faster of two readers: C's memchr for a byte that is nowhere, and NumPy's maximum."""
    size = min(READ, free_memory() // 4)
    arrays = [np.ones(size // threads // 4, np.float32) for _ in range(threads)]
    memchr = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None).memchr
    memchr.argtypes, memchr.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p

    def search(i: int) -> int:
        if memchr(arrays[i].ctypes.data, 0x55, arrays[i].nbytes) is not None:
            raise AssertionError("a byte that is not there was found")
        return arrays[i].nbytes

    def maximum(i: int) -> int:
        arrays[i].max()
        return arrays[i].nbytes

    return max(together(reader, threads, repeats) for reader in (search, maximum))


def int8_peak(threads: int, isa: str | None = None, repeats: int = 8) -> float:
    """Multiply-adds of int8 per second, without memory, on an instruction set; None: the widest."""
    kernels = importlib.import_module("nano_vllm._native").kernels
    isa = isa or kernels.isas()[0]
    steps = 20_000 if isa == "generic" else 1_000_000
    return together(lambda i: kernels.spin(isa, "q8", steps), threads, repeats)
