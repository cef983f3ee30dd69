"""Pinned memory between host and device: one copy each way a step."""

from __future__ import annotations

import numpy as np
import torch

from .layout import Shape, parts
from .steps import Step

DEPTH = 3  # steps whose host memory may be in use at once: two under way, one being written
TORCH_TYPES = {np.int32: torch.int32, np.float32: torch.float32, np.float64: torch.float64}


class Staging:
    """Host buffers in turn, and the one on the device that the kernels read.

    Args:
        numbers: int32s that a step uploads at most.
        ids: that a step brings back at most.
    """

    def __init__(self, numbers: int, ids: int, device: torch.device) -> None:
        self.device, self.pinned = device, device.type == "cuda"
        self.inputs = torch.zeros(numbers, dtype=torch.int32, device=device)
        self.uploads = [self._host(numbers, torch.int32) for _ in range(DEPTH)]
        self.ids = [self._host(ids, torch.int32) for _ in range(DEPTH)]
        self.logits: list[torch.Tensor | None] = [None] * DEPTH
        self.events = [torch.cuda.Event() if self.pinned else None for _ in range(DEPTH)]
        self.turn = 0

    def _host(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, pin_memory=self.pinned)

    def begin(self) -> np.ndarray:
        """The host array of this step's inputs; waits until the step that last used it has ended."""
        self.turn = (self.turn + 1) % DEPTH
        if self.pinned:
            self.events[self.turn].synchronize()
        return self.uploads[self.turn].numpy()

    def upload(self, count: int) -> None:
        self.inputs[:count].copy_(self.uploads[self.turn][:count], non_blocking=True)

    def extra(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """int32 arrays of no bounded size to the device; one copy for all of them."""
        cuts = np.cumsum([0, *map(len, arrays)])
        host = self._host(max(1, int(cuts[-1])), torch.int32)
        for first, array in zip(cuts, arrays):
            host[first : first + len(array)].numpy()[:] = array
        there = host.to(self.device, non_blocking=True)
        return [there[first:] for first in cuts[:-1]]

    def step(self, shape: Shape, every: bool) -> Step:
        """The step's view of the device buffer."""
        found, table = parts(shape)
        inputs = {
            name: self.inputs[part.start : part.start + part.count].view(TORCH_TYPES[part.dtype]) for name, part in found.items()
        }
        inputs["seed"] = inputs["seed"].view(-1, 2)
        return Step(shape.rows, shape.wanted, inputs, self.inputs[table:], every)

    def download(self, ids: torch.Tensor, logits: torch.Tensor | None) -> Download:
        """Starts the copy back; to be called last in the step."""
        turn, kept = self.turn, None
        self.ids[turn][: len(ids)].copy_(ids, non_blocking=True)
        if logits is not None:
            host = self.logits[turn]
            if host is None or host.numel() < logits.numel():
                host = self.logits[turn] = self._host(logits.numel(), torch.float32)
            kept = host[: logits.numel()].view(logits.shape)
            kept.copy_(logits, non_blocking=True)
        if self.pinned:
            self.events[turn].record()
        return Download(self.ids[turn][: len(ids)], kept, self.events[turn])


class Download:
    """What a step brings back, once its event has come."""

    def __init__(self, ids: torch.Tensor, logits: torch.Tensor | None, event) -> None:
        self.ids, self.logits, self.event = ids, logits, event

    def waiting(self) -> bool:
        """The step still runs."""
        return self.event is not None and not self.event.query()

    def wait(self) -> tuple[np.ndarray, np.ndarray | None]:
        if self.event is not None:
            self.event.synchronize()
        return self.ids.numpy().copy(), None if self.logits is None else self.logits.numpy()
