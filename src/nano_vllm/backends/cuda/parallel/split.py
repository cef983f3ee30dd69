"""Which part of a model a rank has (Shoeybi et al. 2019, Megatron-LM): a Program with fewer heads and narrower MLPs, and of each
weight the lines or columns that it reads.

q, k, v, gate and up are cut by lines (outputs), so what they make stays on the rank; the linears that read it (out, down) are
cut by columns (inputs), and what they add to the residual is a sum over ranks. Embedding and head are cut by the vocabulary: a
token's row is on one rank, and the others add zeros; logits are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ....errors import ModelFileError, OptionError, UnsupportedModel
from ....formats import Tensor, TensorInfo, describe, pack
from ....model.program import Attend, Cache, Embed, Gate, Linear, Op, Program, Rotate
from ..kernels.packed import FORMATS
from ..weights import known_infos

LARGEST = 64  # ranks, of the sizes that an error lists


@dataclass(frozen=True)
class Cut:
    """`count` lines (axis 0) or columns (axis 1) of a tensor, from `first` on. Lines beyond its end are zeros."""

    axis: int
    first: int
    count: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return (*whole[: self.axis], self.count, *whole[self.axis + 1 :])


@dataclass(frozen=True)
class Share:
    """What a rank has.

    Attributes:
        program: its ops on its part of the buffers; logits keep the whole vocabulary's width.
        cuts: weight name -> what it has of it; all of those that are not named.
        whole: weight name -> shape of the whole.
        vocabulary: the ids whose rows of embedding and head it has.
    """

    rank: int
    size: int
    program: Program
    cuts: dict[str, Cut]
    whole: dict[str, tuple[int, ...]]
    vocabulary: Cut


def obstacle(program: Program, size: int) -> str:
    """Why the program cannot be divided among so many ranks; "" if it can."""
    for op in program.ops:
        if isinstance(op, Attend):
            if op.heads % size:
                return f"{op.heads} heads cannot be dealt out evenly"
            if op.kv_heads % size and size % op.kv_heads:
                return f"{op.kv_heads} heads of keys can be neither dealt out evenly nor repeated"
        if isinstance(op, Gate) and op.size % size:
            return f"an MLP of {op.size:,} cannot be cut evenly"
    return ""


def share(program: Program, rank: int, size: int) -> Share:
    """OptionError where the model cannot be divided among `size` ranks, with the sizes that it can."""
    if why := obstacle(program, size):
        fitting = [str(n) for n in range(1, LARGEST + 1) if not obstacle(program, n)]
        mend = f"This model takes {', '.join(fitting)}."
        raise OptionError(f"the model cannot be divided by tensor_parallel_size = {size}", why, mend)
    lines = -(-program.vocab_size // size)
    made = _Division(program, rank, size, Cut(0, rank * lines, lines))
    ops = tuple(made.part(i, op) for i, op in enumerate(program.ops))
    used = {name for op in ops if isinstance(op, Linear) for name in op.biases} | {None}
    biases = {name for op in program.ops if isinstance(op, Linear) for name in op.biases}
    shapes = {name: made.cuts[name].shape(s) if name in made.cuts else s for name, s in program.parameters.items()}
    mine = replace(
        program,
        ops=ops,
        widths=program.widths | made.widths,
        caches=tuple(made.caches.get(i, cache) for i, cache in enumerate(program.caches)),
        parameters={name: shape for name, shape in shapes.items() if name in used or name not in biases},
    )
    return Share(rank, size, mine, made.cuts, program.parameters, made.vocabulary)


class _Division:
    """Goes through the ops; `columns`: what the rank has of each buffer that is divided."""

    def __init__(self, program: Program, rank: int, size: int, vocabulary: Cut) -> None:
        self.program, self.rank, self.size, self.vocabulary = program, rank, size, vocabulary
        self.cuts: dict[str, Cut] = {}
        self.columns: dict[str, Cut] = {}
        self.widths: dict[str, int] = {}
        self.caches: dict[int, Cache] = {}

    def part(self, i: int, op: Op) -> Op:
        match op:
            case Embed():
                self.cuts[op.weight] = self.vocabulary
            case Rotate() | Attend():
                heads, kept = self.heads(op)
                if isinstance(op, Attend):
                    self.caches[op.cache] = Cache(kept.count, op.head_size)
                    self._divide(op.dst, _times(heads, op.head_size, 1))
                return replace(op, heads=heads.count, kv_heads=kept.count)
            case Gate():
                self._divide(op.dst, self.even(op.size, 1))
                return replace(op, size=op.size // self.size)
            case Linear() if op.accumulate and op.src in self.columns:
                self.cuts |= dict.fromkeys(op.weights, self.columns[op.src])
                if self.rank:  # a bias is added once
                    return replace(op, biases=(None,) * len(op.biases))
            case Linear():
                parts = self.outputs(i, op)
                for name, bias, cut in zip(op.weights, op.biases, parts):
                    self.cuts[name] = cut
                    if bias:
                        self.cuts[bias] = cut
                if op.dst != "logits":
                    self._widen(op.dst, sum(cut.count for cut in parts))
        return op

    def outputs(self, i: int, op: Linear) -> list[Cut]:
        """By what reads the linear's result: lines of each of its weights."""
        if op.dst == "logits":
            return [self.vocabulary] * len(op.weights)
        for reader in self.program.ops[i + 1 :]:
            if isinstance(reader, Rotate) and reader.buffer == op.dst and len(op.weights) == 3:
                heads, kept = (_times(cut, reader.head_size, 0) for cut in self.heads(reader))
                return [heads, kept, kept]
            if isinstance(reader, Gate) and reader.src == op.dst and len(op.weights) == 2:
                return [self.even(reader.size, 0)] * 2
        raise UnsupportedModel(f"the linear {op.name!r} cannot be divided among GPUs", "", "Use tensor_parallel_size 1.")

    def heads(self, op: Rotate | Attend) -> tuple[Cut, Cut]:
        """Heads of queries, and of keys and values: these are repeated where there are more ranks."""
        kept = self.even(op.kv_heads, 0) if op.kv_heads >= self.size else Cut(0, self.rank * op.kv_heads // self.size, 1)
        return self.even(op.heads, 0), kept

    def even(self, count: int, axis: int) -> Cut:
        return Cut(axis, self.rank * (count // self.size), count // self.size)

    def _divide(self, buffer: str, cut: Cut) -> None:
        self.columns[buffer] = cut
        self._widen(buffer, cut.count)

    def _widen(self, buffer: str, width: int) -> None:
        self.widths[buffer] = max(self.widths.get(buffer, 0), width)


def _times(cut: Cut, factor: int, axis: int) -> Cut:
    return Cut(axis, cut.first * factor, cut.count * factor)


class Shards(Mapping[str, Tensor]):
    """A rank's part of weights. Of lines only that part is read from a file; to cut columns a whole tensor is in memory.

    Attributes:
        infos: of the parts, where `weights` has them.
    """

    def __init__(self, weights: Mapping[str, Tensor], mine: Share) -> None:
        self.weights, self.mine = weights, mine
        self.infos = cut_infos(known_infos(weights), mine)

    def __getitem__(self, name: str) -> Tensor:
        cut, whole = self.mine.cuts.get(name), self.mine.whole[name]
        if cut is None:
            return self.weights[name]
        count = max(0, min(cut.count, whole[0] - cut.first))
        if cut.axis == 0 and hasattr(self.weights, "lines"):
            return _padded(self.weights.lines(name, cut.first, count), cut.count)
        tensor = self.weights[name]
        if tuple(tensor.info.shape) != whole:
            raise ModelFileError(f"tensor {name!r} has the wrong shape", f"{tensor.info.shape}, the config asks for {whole}")
        if cut.axis == 1:
            return _columns(tensor, cut)
        planes = {plane: values[cut.first : cut.first + count] for plane, values in tensor.planes.items()}
        return _padded(Tensor(_described(tensor.info, (count, *whole[1:])), planes), cut.count)

    def __contains__(self, name: object) -> bool:
        return name in self.weights

    def __iter__(self) -> Iterator[str]:
        return iter(self.mine.program.parameters)

    def __len__(self) -> int:
        return len(self.mine.program.parameters)


def _described(info: TensorInfo, shape: tuple[int, ...]) -> TensorInfo:
    return describe(info.name, shape, info.format, info.group, info.minimum)


def _cuts_groups(info: TensorInfo, cut: Cut) -> bool:
    """Whether columns are cut where the format cannot be: within a group, or anywhere in a format that is unpacked anyway."""
    if cut.axis == 0 or not info.group:
        return False
    return info.format not in FORMATS or cut.first % info.group > 0 or cut.count % info.group > 0


def cut_infos(infos: Mapping[str, TensorInfo], mine: Share) -> dict[str, TensorInfo]:
    """What is known of the rank's parts, from what is known of the tensors."""
    found: dict[str, TensorInfo] = {}
    for name, info in infos.items():
        if name in mine.program.parameters:
            shape, cut = mine.program.parameters[name], mine.cuts.get(name)
            found[name] = describe(name, shape, "f32") if cut and _cuts_groups(info, cut) else _described(info, shape)
    return found


def _columns(tensor: Tensor, cut: Cut) -> Tensor:
    """Packed as it is where the cut falls between groups, else unpacked."""
    info, end = tensor.info, cut.first + cut.count
    if _cuts_groups(info, cut):
        return pack(info.name, tensor.unpack()[:, cut.first : end], "f32")
    columns = info.shape[1]
    planes = {
        name: plane[:, cut.first * plane.shape[1] // columns : end * plane.shape[1] // columns]
        for name, plane in tensor.planes.items()
    }
    return Tensor(_described(info, (info.shape[0], cut.count)), planes)


def _padded(tensor: Tensor, count: int) -> Tensor:
    """With lines of zeros below, so that all ranks have equally many."""
    have = tensor.info.shape[0]
    if have == count:
        return tensor
    planes = {
        name: np.concatenate([plane, np.zeros((count - have, *plane.shape[1:]), plane.dtype)])
        for name, plane in tensor.planes.items()
    }
    return Tensor(_described(tensor.info, (count, *tensor.info.shape[1:])), planes)
