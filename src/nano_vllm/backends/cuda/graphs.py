"""CUDA graphs of whole steps, at padded shapes.

Decode steps and those of one short prompt are captured when the session opens. A step of another shape is launched kernel by
kernel, at the padded shape, and leaves a wish. Wishes are granted while the host waits for a decode step anyway: a capture runs
nothing on the device and waits for nothing there, and no first token waits.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator

import torch

from .layout import Shape

log = logging.getLogger(__name__)

MIXED_ROWS = 256  # steps with prompts of up to so many tokens are captured, too: launches would take longer than they do
MIXED_STEP = 32  # their rows are padded to multiples of it
MOST = 160  # graphs at most, where memory allows
SECONDS = 2.0  # that opening a session may spend on captures


def padded_sizes(most: int) -> list[int]:
    """Numbers of rows up to `most` such that whatever is padded to the next of them grows by less than a tenth."""
    sizes = [1]
    while sizes[-1] < most:
        least = sizes[-1] + 1
        sizes.append(min(most, max(least, -(-11 * least // 10) - 1)))
    return sizes


def power(count: int, most: int) -> int:
    """0, or the next power of two, but not more than `most`."""
    return min(most, 1 << (count - 1).bit_length()) if count else 0


class Shapes:
    """The shapes that graphs are made for.

    Args:
        rows, sequences: of a step at most.
    """

    def __init__(self, rows: int, sequences: int) -> None:
        self.rows, self.sequences = rows, min(rows, sequences)
        self.sizes = padded_sizes(self.sequences)

    def decode(self, rows: int) -> Shape:
        size = self.sizes[bisect_left(self.sizes, rows)]
        return Shape(size, size, 0, size)

    def mixed(self, shape: Shape) -> Shape | None:
        """None where the step is too large for a graph to pay, or wants more ids than one of each sequence."""
        rows = -(-shape.rows // MIXED_STEP) * MIXED_STEP
        if rows > min(MIXED_ROWS, self.rows) or shape.wanted > self.sequences:
            return None
        few = self.sequences
        padded = Shape(rows, power(shape.decodes, few), power(shape.tiles, rows), power(shape.wanted, few))
        return None if is_decode(padded) else padded  # its wanted rows are not all rows, as those of a decode step are

    def usual(self, tile_tokens: int) -> Iterator[Shape]:
        """Of one prompt alone, whose first token is waited for, and of decode steps, the smaller first.

        Args:
            tile_tokens: rows of a tile at most.
        """
        alone = (self.mixed(Shape(n, 0, -(-n // tile_tokens), 1)) for n in range(2, min(MIXED_ROWS, self.rows) + 1))
        yield from dict.fromkeys(shape for shape in alone if shape)
        for size in self.sizes:
            yield self.decode(size)


def is_decode(shape: Shape) -> bool:
    """Every row is a sequence, and wants an id."""
    return shape.rows == shape.decodes == shape.wanted and not shape.tiles


class Graphs:
    """Captured steps.

    Args:
        shapes: that there may be.
        record: launches a shape's step on the current stream.
        most: graphs at most.
        agree: of several ranks, whether all say so. They have the same graphs: all that `prepare` captures, and no others.
    """

    def __init__(
        self, shapes: Shapes, record: Callable[[Shape], None], most: int = MOST, agree: Callable[[bool], bool] | None = None
    ) -> None:
        self.shapes, self.record, self.most = shapes, record, most
        self.alone, self.agree = agree is None, agree or bool
        self.captured: dict[Shape, torch.cuda.CUDAGraph] = {}
        self.wishes: dict[Shape, None] = {}
        self.refused: set[Shape] = set()
        self.pool = torch.cuda.graph_pool_handle()

    def replay(self, shape: Shape) -> bool:
        """Runs the step if it has been captured; else it is wished for."""
        if shape in self.captured:
            self.captured[shape].replay()
            return True
        if shape not in self.refused:
            self.wishes[shape] = None
        return False

    def prepare(self, shapes: Iterator[Shape]) -> None:
        """Captures shapes whose kernels have been loaded (warmup.py), as many as SECONDS are enough for."""
        ends = time.perf_counter() + SECONDS
        for shape in shapes:
            if not self.agree(time.perf_counter() <= ends):
                return
            self._capture(shape)

    def idle(self, waiting: Callable[[], bool]) -> None:
        """While the host waits for a decode step: grants one wish, and as long as `waiting`, more of them."""
        granted = False
        while self.alone and self.wishes and (not granted or waiting()):
            self._capture(self.wishes.popitem()[0])
            granted = True

    def _capture(self, shape: Shape) -> None:
        if len(self.captured) >= self.most:
            self.refused.add(shape)
            return
        graph, done = torch.cuda.CUDAGraph(), False
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                self.record(shape)
            finally:
                graph.capture_end()
            done = True
        except RuntimeError as error:  # its steps go on without
            log.warning("no graph of %s: %s", shape, error)
        if self.agree(done):
            self.captured[shape] = graph
        else:
            self.refused.add(shape)
