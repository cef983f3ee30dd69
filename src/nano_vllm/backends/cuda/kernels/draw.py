"""Launchers of the sampling kernels, with the space that they share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton

from .sampling import CHUNK, HISTORIES, _ban, _border, _count, _mass, _penalize, _pick, _survey


class Sampler:
    """Draws ids from rows of logits; see `sampling`.

    Args:
        vocab: of the logits.
        rows: at most that many at a time.
    """

    def __init__(self, vocab: int, rows: int, device: torch.device) -> None:
        self.vocab, self.rows, self.device = vocab, rows, device
        self.chunk = min(CHUNK, triton.next_power_of_2(vocab))
        self.chunks = -(-vocab // self.chunk)
        self.tops = torch.empty(rows, self.chunks, dtype=torch.float32, device=device)
        self.arguments = torch.empty(rows, self.chunks, dtype=torch.int32, device=device)
        self.sums = torch.empty(rows, self.chunks, dtype=torch.float32, device=device)
        self.borders = torch.empty(rows, dtype=torch.float32, device=device)
        self.border_ids = torch.empty(rows, dtype=torch.int32, device=device)
        self.counts = torch.zeros(HISTORIES, vocab, dtype=torch.int32, device=device)

    def tensors(self) -> list[torch.Tensor]:
        return [self.tops, self.arguments, self.sums, self.borders, self.border_ids, self.counts]

    @staticmethod
    def bytes(vocab: int, rows: int) -> int:
        """That a sampler takes of the device."""
        return rows * (-(-vocab // CHUNK) * 12 + 8) + HISTORIES * vocab * 4

    def edit(self, logits: torch.Tensor, p: Mapping[str, torch.Tensor]) -> None:
        """The stages ban, repetition, frequency and presence, in place.

        Args:
            logits: (rows, vocabulary) float32.
            p: arrays of `SamplingBatch` by name: banned, banned_starts, history, history_starts, prompt_lengths int32; the
                penalties float32, (rows,).
        """
        rows, tile = len(logits), 128
        _ban[(rows,)](logits, p["banned"], p["banned_starts"], self.vocab, tile, num_warps=4)
        for first in range(0, rows, HISTORIES):
            grid = (min(HISTORIES, rows - first),)
            starts = p["history_starts"]
            _count[grid](p["history"], starts, p["prompt_lengths"], self.counts, first, self.vocab, tile, num_warps=4)
            penalties = p["repetition_penalty"], p["frequency_penalty"], p["presence_penalty"]
            _penalize[grid](logits, p["history"], starts, self.counts, *penalties, first, self.vocab, tile, num_warps=4)

    def draw(self, logits: torch.Tensor, p: Mapping[str, torch.Tensor], ids: torch.Tensor, borders: bool) -> None:
        """The stages from temperature on, then the id.

        Args:
            logits: (rows, vocabulary) float32.
            p: temperature float32, min_p and top_p float64, top_k int32, seed (rows, 2) int32, index, position, skip int32; all
                else (rows,). A row with `skip` gets -1.
            ids: (rows,) int32, the result.
            borders: whether any row has a top_k or a top_p.
        """
        rows, most = len(logits), triton.next_power_of_2(self.chunks)
        sizes = (self.vocab, self.chunks, most, self.chunk)
        heat, least = p["temperature"], p["min_p"]
        _survey[(rows, self.chunks)](
            logits, heat, self.tops, self.arguments, self.sums, self.vocab, self.chunks, self.chunk, num_warps=4
        )
        limits = self.borders, self.border_ids
        if borders:
            _border[(rows,)](logits, heat, least, p["top_k"], p["top_p"], self.tops, *limits, *sizes, num_warps=8)
        _mass[(rows, self.chunks)](logits, heat, least, self.tops, *limits, self.sums, *sizes, borders, num_warps=4)
        _pick[(rows,)](
            logits, heat, least, self.tops, self.arguments, *limits, self.sums, p["seed"], p["index"], p["position"], p["skip"],
            ids, *sizes, borders, num_warps=8,
        )  # fmt: skip
