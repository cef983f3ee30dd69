"""What the card can do, measured in the run that is compared with it: bytes read, and multiply-adds of a large product."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...engine.backend import Ceilings
from .weights import DTYPES

READ = 2**32  # bytes, more than any cache holds; less where memory is short
SIDE = 8192  # of the matrices
REPEATS = 10


def measured(dtype: str = "auto") -> Ceilings:
    """Medians of 10: a sum over 4 GB of float32, and a product of 8192 x 8192 x 8192 random numbers of `dtype` (auto: bf16
    where the card has it, else f16; f32 as a session multiplies it). All memory is given back."""
    if dtype == "auto":
        dtype = "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "f16"
    made = Ceilings(read_rate(), multiply_rate(DTYPES[dtype]), dtype)
    torch.cuda.empty_cache()
    return made


def read_rate() -> float:
    """Bytes per second."""
    x = torch.randn(min(READ, torch.cuda.mem_get_info()[0] // 4) // 4, device="cuda")
    return x.nbytes / seconds(x.sum)


def multiply_rate(dtype: torch.dtype) -> float:
    """Multiply-adds per second."""
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=dtype) for _ in range(2))
    return SIDE**3 / seconds(lambda: a @ b)


def seconds(work: Callable[[], object]) -> float:
    """The median, by the card's clock, of launches in a row after three that are not counted."""
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(REPEATS)] for _ in range(2))
    for _ in range(3):
        work()
    for begin, end in zip(begins, ends):
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return sorted(b.elapsed_time(e) for b, e in zip(begins, ends))[REPEATS // 2] / 1e3
