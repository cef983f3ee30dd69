"""Weights to the device, tensor by tensor: beside the file's, one tensor is in host memory at a time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ...errors import ModelFileError
from ...formats import Tensor
from ...model.program import Embed, Linear, Program

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def host(tensor: Tensor) -> torch.Tensor:
    """The tensor's numbers in its file's precision; quantised ones as float32."""
    format, planes = tensor.info.format, tensor.planes
    if format not in DTYPES:
        return torch.from_numpy(tensor.unpack())
    values = np.ascontiguousarray(planes["values"])
    values = values if values.flags.writeable else values.copy()
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16) if format == "bf16" else torch.from_numpy(values)


class DeviceWeights:
    """Attributes:
    matrices: the weights of a linear, one matrix (N, K) for all that it concatenates; and of an embedding, under its own name.
    biases: as `matrices`, (N,) float32, where any of the linear's weights has one.
    vectors: name -> (width,) float32.
    nbytes: of all of them.
    """

    def __init__(self, program: Program, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.program, self.weights, self.dtype, self.device = program, weights, dtype, device
        self.matrices: dict[tuple[str, ...], torch.Tensor] = {}
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
        tensors = (*self.matrices.values(), *self.biases.values(), *self.vectors.values())
        self.nbytes = sum(t.numel() * t.element_size() for t in tensors)

    def _read(self, name: str) -> torch.Tensor:
        if name not in self.weights:
            raise ModelFileError(f"the model has no tensor {name!r}")
        tensor, shape = self.weights[name], self.program.parameters[name]
        if tuple(tensor.info.shape) != shape:
            raise ModelFileError(f"tensor {name!r} has the wrong shape", f"{tensor.info.shape}, the config asks for {shape}")
        return host(tensor)

    def _merge(self, names: tuple[str, ...]) -> None:
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


def nbytes(program: Program, dtype: torch.dtype) -> int:
    """What the weights will take of the device."""
    total = 0
    for shape in program.parameters.values():
        count = int(np.prod(shape))
        total += count * (dtype.itemsize if len(shape) == 2 else 4)
    return total
