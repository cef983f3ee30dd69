"""What a step needs to know, as one array of int32: one copy brings it to the device.

Where a part begins depends on the step's `Shape` alone, so that a graph captured for a shape finds its inputs in the same places.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...engine.backend import Batch

ALIGNED = 4  # int32s: Triton compiles a kernel again for a pointer that is aligned otherwise
# Per wanted row: name -> type. float64 take two int32s.
SAMPLING = {
    "temperature": np.float32,
    "min_p": np.float64,
    "top_p": np.float64,
    "top_k": np.int32,
    "repetition_penalty": np.float32,
    "frequency_penalty": np.float32,
    "presence_penalty": np.float32,
    "index": np.int32,
    "position": np.int32,
    "prompt_lengths": np.int32,
    "skip": np.int32,
}


TILES = ("tile_rows", "tile_counts", "tile_sequences", "tile_begins")  # of a tile


@dataclass(frozen=True)
class Shape:
    """Attributes:
    rows: tokens of the step.
    decodes: sequences with one row.
    tiles: tiles of rows of the others.
    wanted: rows whose next token is wanted.
    """

    rows: int
    decodes: int
    tiles: int
    wanted: int


@dataclass(frozen=True)
class Part:
    start: int
    count: int  # of int32s
    dtype: type


@lru_cache(maxsize=1024)
def parts(shape: Shape) -> tuple[dict[str, Part], int]:
    """-> name -> part, and where the block table begins, which comes last: its size is no matter of the shape."""
    found: dict[str, Part] = {}
    at = 0

    def put(name: str, count: int, dtype: type = np.int32) -> None:
        nonlocal at
        found[name] = Part(at, count * np.dtype(dtype).itemsize // 4, dtype)
        at += -(-found[name].count // ALIGNED) * ALIGNED

    put("stride", 1)  # int32s of a row of the table
    for name in ("tokens", "sources", "positions", "slots"):
        put(name, shape.rows)
    for name in ("decode_rows", "decode_sequences"):
        put(name, shape.decodes)
    for name in TILES:
        put(name, shape.tiles)
    put("wanted", shape.wanted)
    for name, dtype in SAMPLING.items():
        put(name, shape.wanted, dtype)
    put("seed", 2 * shape.wanted)
    for name in ("history_starts", "banned_starts"):
        put(name, shape.wanted + 1)
    return found, at


def capacity(rows: int, sequences: int, table: int) -> int:
    """int32s that any step of so many rows, sequences and entries of the block table needs at most."""
    return parts(Shape(rows, sequences, rows, rows))[1] + table


def tiles(batch: Batch, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """First row, number of rows, sequence and the position of that one's first row in the step, of each tile of at most `tokens`
    rows, over the sequences with several rows. Those that see the most keys come first: the last ones to start are short then."""
    lengths = np.diff(batch.starts)
    many = np.flatnonzero(lengths > 1)
    counts = -(-lengths[many] // tokens)
    sequence = np.repeat(many, counts)
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    row = batch.starts[sequence] + within * tokens
    count = np.minimum(tokens, batch.starts[sequence + 1] - row)
    order = np.argsort(-batch.positions[row], kind="stable")
    sequence = sequence[order]
    return row[order], count[order], sequence, batch.positions[batch.starts[sequence]]


def fill(out: np.ndarray, shape: Shape, batch: Batch, tile_tokens: int, block_size: int) -> int:
    """Writes the batch into `out` (int32) and returns how much of it was used. What the shape has beyond the batch is padded
    with rows that read and write nothing."""
    found, table_at = parts(shape)

    def write(name: str, values: np.ndarray, pad: int = 0) -> None:
        part = found[name]
        to = out[part.start : part.start + part.count].view(part.dtype)
        to[: len(values)] = values
        if len(values) < len(to):
            to[len(values) :] = pad

    table = batch.block_tables[0]
    sequence = np.repeat(np.arange(len(table)), np.diff(batch.starts))
    write("stride", np.array([table.shape[1]]))
    write("tokens", batch.tokens)
    write("sources", batch.sources, -1)
    write("positions", batch.positions)
    blocks, within = np.divmod(batch.positions, block_size)
    write("slots", table[sequence, blocks] * np.int32(block_size) + within, -1)
    single = np.flatnonzero(np.diff(batch.starts) == 1)
    single = single[np.argsort(-batch.positions[batch.starts[single]], kind="stable")]  # what ends last begins first
    write("decode_rows", batch.starts[single], -1)
    write("decode_sequences", single)
    if shape.tiles:
        for name, values in zip(TILES, tiles(batch, tile_tokens)):
            write(name, values)
    write("wanted", batch.wanted)
    sampling = batch.sampling
    for name in SAMPLING:
        if name in sampling.values:
            write(name, sampling.values[name])
    write("index", sampling.index)
    write("position", sampling.position)
    write("prompt_lengths", sampling.prompt_lengths)
    write("skip", batch.want_logits, 1)
    write("seed", sampling.seed.view(np.int32))
    write("history_starts", sampling.history_starts)
    write("banned_starts", sampling.banned_starts)
    end = table_at + table.size
    out[table_at:end] = table.reshape(-1)
    return end


def shape_of(batch: Batch, tile_tokens: int) -> Shape:
    lengths = np.diff(batch.starts)
    several = lengths[lengths > 1]
    return Shape(
        rows=len(batch.tokens),
        decodes=len(lengths) - len(several),
        tiles=int((-(-several // tile_tokens)).sum()),
        wanted=len(batch.wanted),
    )
