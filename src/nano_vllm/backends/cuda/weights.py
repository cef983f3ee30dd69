"""Weights to the device, tensor by tensor: beside the file's, one tensor is in host memory at a time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ...errors import ModelFileError
from ...formats import Tensor, TensorInfo
from ...model.program import Embed, Linear, Program
from .kernels.packed import FORMATS, Packed

UNPACKED = 2**26  # numbers of packed matrices that are unpacked at a time, for steps of more rows than their kernels take
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def host(tensor: Tensor) -> torch.Tensor:
    """The tensor's numbers in its file's precision; quantised ones as float32."""
    format, planes = tensor.info.format, tensor.planes
    if format not in DTYPES:
        return torch.from_numpy(tensor.unpack())
    values = np.ascontiguousarray(planes["values"])
    values = values if values.flags.writeable else values.copy()
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16) if format == "bf16" else torch.from_numpy(values)


def stays_packed(infos: list[TensorInfo]) -> bool:
    """Whether the matrices of a linear stay as their file has them: all in one format that there are kernels for."""
    kinds = {(info.format, info.group, info.minimum) for info in infos}
    return len(kinds) == 1 and infos[0].format in FORMATS and infos[0].shape[1] % 32 == 0


def on_device(tensors: list[Tensor], device: torch.device) -> Packed:
    """One packed matrix of several, one below the other."""

    def plane(name: str) -> torch.Tensor | None:
        if name not in tensors[0].planes:
            return None
        return torch.cat([torch.from_numpy(np.array(t.planes[name])).to(device) for t in tensors])

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
        self.infos = known_infos(weights)
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
                self.vectors[name] = self._read(name).to(device).float()
        tensors = (*self.biases.values(), *self.vectors.values())
        self.nbytes = sum(t.nbytes for t in (*self.matrices.values(), *tensors))

    def _tensor(self, name: str) -> Tensor:
        if name not in self.weights:
            raise ModelFileError(f"the model has no tensor {name!r}")
        tensor, shape = self.weights[name], self.program.parameters[name]
        if tuple(tensor.info.shape) != shape:
            raise ModelFileError(f"tensor {name!r} has the wrong shape", f"{tensor.info.shape}, the config asks for {shape}")
        return tensor

    def _read(self, name: str) -> torch.Tensor:
        return host(self._tensor(name))

    def _merge(self, names: tuple[str, ...]) -> None:
        infos = [self.infos.get(name) for name in names]
        if all(infos) and stays_packed(infos):
            self.matrices[names] = on_device([self._tensor(name) for name in names], self.device)
            return
        shapes = [self.program.parameters[name] for name in names]
        matrix = torch.empty(sum(n for n, _ in shapes), shapes[0][1], dtype=self.dtype, device=self.device)
        first = 0
        for name, (n, _) in zip(names, shapes):
            matrix[first : first + n] = self._read(name).to(self.device)
            first += n
        self.matrices[names] = matrix

    def _merge_biases(self, op: Linear) -> None:
        parts = [
            self._read(bias).to(self.device).float()
            if bias
            else torch.zeros(self.program.parameters[weight][0], device=self.device)
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
            packed = UNPACKED
        else:
            total += sum(int(np.prod(program.parameters[name])) for name in group) * dtype.itemsize
    return total + packed * dtype.itemsize
