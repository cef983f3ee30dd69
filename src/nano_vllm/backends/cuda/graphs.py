"""CUDA graphs of decode steps, at padded sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch


def padded_sizes(most: int) -> list[int]:
    """Numbers of rows up to `most` such that whatever is padded to the next of them grows by less than a tenth."""
    sizes = [1]
    while sizes[-1] < most:
        least = sizes[-1] + 1
        sizes.append(min(most, max(least, -(-11 * least // 10) - 1)))
    return sizes


class Graphs:
    """Captured steps by size. A capture runs nothing on the device and waits for nothing there.

    Args:
        most: rows of the largest.
        record: size -> launches that size's step on the current stream, all of whose kernels have run before.
    """

    def __init__(self, most: int, record: Callable[[int], None]) -> None:
        self.sizes, self.record = padded_sizes(most), record
        self.captured: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def size(self, rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, rows)]

    def capture(self, size: int) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            self.record(size)
        finally:
            graph.capture_end()
        self.captured[size] = graph

    def ahead(self, rows: int) -> None:
        """Captures the largest missing size that steps of up to `rows` rows need; for moments when the device is busy."""
        for size in reversed(self.sizes[: bisect_left(self.sizes, rows) + 1]):
            if size not in self.captured:
                return self.capture(size)
