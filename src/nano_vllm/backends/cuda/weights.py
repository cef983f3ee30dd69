"""Weights to the device, tensor by tensor: beside the file's, one tensor of each part of a linear is in host memory at a time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ...errors import ModelFileError
from ...formats import Tensor, TensorInfo
from ...model.program import Embed, Linear, Program
from .kernels.packed import FORMATS, Packed

UNPACKED = 2**26  # numbers of packed matrices that are unpacked at a time, for steps of more rows than their kernels take
PIECE = 2**25  # bytes that go to the device at a time
TORCH_TYPES = {name: getattr(torch, name) for name in ("float32", "float16", "uint8", "int8")}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Upload:
    """Copies host arrays to the device through two pinned buffers in turn: one is filled while the other's piece is under way.

    Args:
        device: to copy to; on the CPU nothing is pinned, the pieces are the same.
        piece: bytes of a buffer.
    """

    def __init__(self, device: torch.device, piece: int = PIECE) -> None:
        pinned = device.type == "cuda"
        self.buffers = [torch.empty(piece, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self.events = [torch.cuda.Event() if pinned else None for _ in range(2)]
        self.turn = 0

    def copy(self, values: np.ndarray, out: torch.Tensor, kind: torch.dtype | None = None) -> None:
        """out = values, on the current stream; another type than `out`'s is converted on the device.

        Args:
            values: as many numbers as `out` has.
            kind: what the values' bits are; None: what NumPy says. (NumPy has no bfloat16.)
        """
        values, flat = values.reshape(-1), out.view(-1)
        each = self.buffers[0].numel() // values.itemsize
        for first in range(0, len(values), each):
            piece = values[first : first + each]
            buffer, event = self.buffers[self.turn], self.events[self.turn]
            if event is not None:
                event.synchronize()
            there = buffer[: piece.nbytes]
            np.copyto(there.numpy().view(piece.dtype), piece)
            to, there = flat[first : first + len(piece)], there.view(kind or TORCH_TYPES[piece.dtype.name])
            to.copy_(there if there.dtype == to.dtype else there.to(to.device, non_blocking=True), non_blocking=True)
            if event is not None:
                event.record()
            self.turn = 1 - self.turn

    def tensor(self, tensor: Tensor, out: torch.Tensor) -> None:
        """The tensor's numbers; quantised ones are unpacked on the host."""
        kind = DTYPES.get(tensor.info.format)
        self.copy(tensor.planes["values"] if kind else tensor.unpack(), out, kind)


def stays_packed(infos: list[TensorInfo]) -> bool:
    """Whether the matrices of a linear stay as their file has them: all in one format that there are kernels for."""
    kinds = {(info.format, info.group, info.minimum) for info in infos}
    return len(kinds) == 1 and infos[0].format in FORMATS and infos[0].shape[1] % 32 == 0


def on_device(tensors: list[Tensor], upload: Upload, device: torch.device) -> Packed:
    """One packed matrix of several, one below the other."""

    def plane(name: str) -> torch.Tensor | None:
        if name not in tensors[0].planes:
            return None
        parts = [tensor.planes[name] for tensor in tensors]
        shape = sum(map(len, parts)), parts[0].shape[1]
        out, first = torch.empty(shape, dtype=TORCH_TYPES[parts[0].dtype.name], device=device), 0
        for part in parts:
            upload.copy(part, out[first : first + len(part)])
            first += len(part)
        return out

    shape = sum(t.info.shape[0] for t in tensors), tensors[0].info.shape[1]
    return Packed(shape, plane("quants"), plane("scales"), plane("mins"))


class DeviceWeights:
    """Attributes:
    matrices: the weights of a linear, one matrix (N, K) for all that it concatenates; and of an embedding, under its own name.
        Tensors of `dtype`, or packed as the file has them.
    biases: as `matrices`, (N,) float32, where any of the linear's weights has one.
    vectors: name -> (width,) float32.
    nbytes: of all of them.
    """

    def __init__(self, program: Program, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.program, self.weights, self.dtype, self.device = program, weights, dtype, device
        self.infos, self.upload = known_infos(weights), Upload(device)
        self.matrices: dict[tuple[str, ...], torch.Tensor | Packed] = {}
        self.biases: dict[tuple[str, ...], torch.Tensor] = {}
        self.vectors: dict[str, torch.Tensor] = {}
        for op in program.ops:
            if isinstance(op, Embed) and (op.weight,) not in self.matrices:
                self._merge((op.weight,))
            elif isinstance(op, Linear) and op.weights not in self.matrices:
                self._merge(op.weights)
            if isinstance(op, Linear) and any(op.biases) and op.weights not in self.biases:
                self._merge_biases(op)
        taken = {name for op in program.ops if isinstance(op, Linear) for name in (*op.weights, *op.biases)}
        taken |= {op.weight for op in program.ops if isinstance(op, Embed)}
        for name in program.parameters:
            if name not in taken:
                self.vectors[name] = self._vector(name)
        del self.upload  # pinned memory is short
        tensors = (*self.biases.values(), *self.vectors.values())
        self.nbytes = sum(t.nbytes for t in (*self.matrices.values(), *tensors))

    def _tensor(self, name: str) -> Tensor:
        if name not in self.weights:
            raise ModelFileError(f"the model has no tensor {name!r}")
        tensor, shape = self.weights[name], self.program.parameters[name]
        if tuple(tensor.info.shape) != shape:
            raise ModelFileError(f"tensor {name!r} has the wrong shape", f"{tensor.info.shape}, the config asks for {shape}")
        return tensor

    def _vector(self, name: str) -> torch.Tensor:
        out = torch.empty(self.program.parameters[name], dtype=torch.float32, device=self.device)
        self.upload.tensor(self._tensor(name), out)
        return out

    def _merge(self, names: tuple[str, ...]) -> None:
        infos = [self.infos.get(name) for name in names]
        if all(infos) and stays_packed(infos):
            self.matrices[names] = on_device([self._tensor(name) for name in names], self.upload, self.device)
            return
        shapes = [self.program.parameters[name] for name in names]
        matrix = torch.empty(sum(n for n, _ in shapes), shapes[0][1], dtype=self.dtype, device=self.device)
        first = 0
        for name, (n, _) in zip(names, shapes):
            self.upload.tensor(self._tensor(name), matrix[first : first + n])
            first += n
        self.matrices[names] = matrix

    def _merge_biases(self, op: Linear) -> None:
        parts = [
            self._vector(bias) if bias else torch.zeros(self.program.parameters[weight][0], device=self.device)
            for weight, bias in zip(op.weights, op.biases)
        ]
        self.biases[op.weights] = torch.cat(parts)


def known_infos(weights: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """From headers where there are such; a plain mapping's tensors are in memory already."""
    infos = getattr(weights, "infos", None)
    if infos is None and isinstance(weights, dict):
        infos = {name: tensor.info for name, tensor in weights.items()}
    return infos or {}


def nbytes(program: Program, dtype: torch.dtype, infos: Mapping[str, TensorInfo]) -> int:
    """What the weights will take of the device, and the space to unpack them in."""
    total, packed = 0, 0
    names = {op.weights for op in program.ops if isinstance(op, Linear)}
    names |= {(op.weight,) for op in program.ops if isinstance(op, Embed)}
    for name, shape in program.parameters.items():
        if len(shape) == 1:
            total += 4 * shape[0]
    for group in names:
        known = [infos[name] for name in group if name in infos]
        if len(known) == len(group) and stays_packed(known):
            total += sum(info.nbytes for info in known)
            numbers = sum(int(np.prod(program.parameters[name])) for name in group)
            packed = max(packed, min(UNPACKED, numbers))
        else:
            total += sum(int(np.prod(program.parameters[name])) for name in group) * dtype.itemsize
    return total + packed * dtype.itemsize
