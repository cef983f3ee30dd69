"""The Program on the device: buffers of fixed size, and its ops one after the other, as `fuse` has joined them.

What a linear of several rows leaves for the residual (`accumulate`) waits in parts until the norm that follows adds it: one pass
instead of two. The residual is float32, everything between is of the weights' type.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...errors import UnsupportedModel
from ...memory.plan import Plan
from ...model.program import Attend, Embed, Gate, Linear, Normalize, Program, Rotate, Select
from ...model.spec import Rope
from .fuse import Product, RotateAttend, segments
from .kernels import attend_row, attention, cache, linear, one_row, one_row_packed, packed, prefill, rotate, rows, tiled
from .kernels.packed import Packed
from .layout import TILES
from .weights import DTYPES, UNPACKED, DeviceWeights

MAX_HEAD_SIZE = 256


@dataclass(frozen=True)
class Step:
    """Attributes:
    rows, wanted: of the step.
    inputs: name -> view of what was uploaded; see `layout`.
    table: the block tables.
    every: all rows are wanted, in their order.
    """

    rows: int
    wanted: int
    inputs: dict[str, torch.Tensor]
    table: torch.Tensor
    every: bool


def check_supported(program: Program) -> None:
    """Raises UnsupportedModel for what the kernels lack, before a weight is read."""
    for op in program.ops:
        if isinstance(op, Gate) and op.activation not in rows.ACTIVATIONS:
            raise UnsupportedModel(f"activation {op.activation!r} is not supported", f"known are {', '.join(rows.ACTIVATIONS)}")
        if isinstance(op, Attend) and op.heads % op.kv_heads:
            raise UnsupportedModel(f"{op.heads} heads over {op.kv_heads} of keys are not supported", "no whole number share one")
    for kept in program.caches:
        if kept.head_size % 2 or kept.head_size > MAX_HEAD_SIZE:
            raise UnsupportedModel(f"head_size {kept.head_size} is not supported", f"it must be even and at most {MAX_HEAD_SIZE}")


def turns(rope: Rope, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine (positions, size / 2) float32, rounded as the reference backend's: a float32 angle, float64 functions."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * np.float32(rope.frequencies)
    return tuple((f(angles.astype(np.float64)).astype(np.float32) * np.float32(rope.scale)) for f in (np.cos, np.sin))


def residuals(program: Program) -> set[str]:
    """Buffers that linears add to."""
    return {op.dst for op in program.ops if isinstance(op, Linear) and op.accumulate}


def sizes(program: Program, dtype: torch.dtype, max_rows: int, max_seqs: int) -> dict[str, tuple[int, torch.dtype]]:
    """Name -> numbers and type of each buffer, the logits but for their vocabulary-wide rows included."""
    kept = residuals(program)
    found = {name: (max_rows * width, torch.float32 if name in kept else dtype) for name, width in program.widths.items()}
    found["logits"] = (max_seqs * program.widths["logits"], torch.float32)
    for op in program.ops:
        if isinstance(op, Select):
            found[f"{op.dst} selected"] = (max_rows * program.widths[op.src], found[op.src][1])
        if isinstance(op, Linear) and op.dst == "logits":
            lines = sum(program.parameters[name][0] for name in op.weights)
            if lines < program.vocab_size:  # of several ranks
                found["gathered"] = (max_seqs * -(-program.vocab_size // lines) * lines, torch.float32)
        if isinstance(op, Linear) and op.accumulate:
            width = program.widths[op.dst]
            found["delta"] = (max_rows * width, dtype)
            most = max(linear.MAX_PARTS * linear.MAX_ROWS, packed.MAX_PART_ROWS, tiled.MAX_PART_ROWS)
            found["parts"] = (most * width, torch.float32)
        if isinstance(op, Attend):
            need = attention.scratch(max_seqs, op.heads, op.kv_heads, op.head_size)
            found["attention"] = (max(need, found.get("attention", (0,))[0]), torch.float32)
            found["arrived"] = (max(attend_row.MAX_ROWS * op.kv_heads, found.get("arrived", (0,))[0]), torch.int32)
    return found


class Runner:
    """Runs steps on the current stream. Nothing in it waits for the device or, but for steps with unusually many wanted rows,
    allocates there.

    Args:
        group: a `parallel.rank.Group`, where program and weights are a rank's.
    """

    def __init__(self, program: Program, weights: DeviceWeights, plan: Plan, device: torch.device, group=None) -> None:
        self.program, self.weights, self.plan, self.device, self.group = program, weights, plan, device, group
        dtype, self.cache_type = DTYPES[plan.dtype], cache.TYPES[plan.kv_cache_dtype]
        self.buffers = {
            name: torch.empty(count, dtype=kind, device=device)
            for name, (count, kind) in sizes(program, dtype, plan.max_num_batched_tokens, plan.max_num_seqs).items()
        }
        if "arrived" in self.buffers:
            self.buffers["arrived"].zero_()
        self.dtype = dtype
        self.segments = segments(program)
        largest = max((m.shape[0] * m.shape[1] for m in weights.matrices.values() if isinstance(m, Packed)), default=0)
        self.buffers["unpacked"] = torch.empty(min(UNPACKED, largest), dtype=dtype, device=device)
        self.caches: list[cache.KVCache] = []
        self.turns = [tuple(torch.from_numpy(x).to(device) for x in turns(r, plan.max_model_len)) for r in program.ropes]
        self.last_ids = torch.zeros(plan.max_num_batched_tokens, dtype=torch.int32, device=device)
        attends = [op for op in program.ops if isinstance(op, Attend)]
        tiles = (prefill.tile_rows(op.heads // op.kv_heads, dtype, self.cache_type) for op in attends)
        self.tile_tokens = min((tokens for _, tokens in tiles), default=1)

    def allocate_cache(self, blocks: int) -> None:
        """Graphs keep the addresses: none may be captured before."""
        layers = [(c.kv_heads, c.head_size) for c in self.program.caches]
        self.caches = cache.allocate(blocks, self.plan.block_size, layers, self.cache_type, self.device)

    def tensors(self) -> list[torch.Tensor]:
        """What it holds beside weights and cache."""
        return [*self.buffers.values(), *(x for pair in self.turns for x in pair), self.last_ids]

    def run(self, step: Step) -> torch.Tensor:
        """-> logits (wanted, vocabulary) float32, valid until the next step."""
        self.names = {name: name for name in self.program.widths}  # a selected buffer takes another's name
        self.rows, self.pending = step.rows, {}
        self.logits = None
        for segment in self.segments:
            for op in segment.one if self.rows == 1 else segment.many:
                self._execute(op, step)
            if step.wanted == 0:
                break  # nobody reads what follows
            for op in segment.selects if not step.every else ():
                self._execute(op, step)
        if not step.wanted:
            return self._view("logits", 0, self.program.vocab_size)
        return self._gather(self.logits) if self.group else self.logits

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's logits (wanted, lines of its head) -> those of all ranks (wanted, vocabulary)."""
        (count, lines), size, vocab = part.shape, self.group.size, self.program.vocab_size
        parts = self._view("gathered", size * count, lines).view(size, count, lines)
        self.group.gather(part, parts)
        out = self._view("logits", count, vocab)
        for first, piece in zip(range(0, vocab, lines), parts):
            some = out[:, first : first + lines]
            some.copy_(piece[:, : some.shape[1]])
        return out

    def _view(self, name: str, count: int, width: int) -> torch.Tensor:
        """(count, width) of a buffer; allocated anew where it is larger than the buffer."""
        buffer = self.buffers[self.names.get(name, name)]
        if count * width > buffer.numel():
            return torch.empty(count, width, dtype=buffer.dtype, device=self.device)
        return buffer[: count * width].view(count, width)

    def _execute(self, op, step: Step) -> None:
        n, inputs, widths = self.rows, step.inputs, self.program.widths
        if not isinstance(op, (Linear, Normalize, Gate)) and getattr(op, "src", None) in self.pending:
            self._settle(op.src)
        match op:
            case Embed():
                table = self.weights.matrices[(op.weight,)]
                embed = packed.embed if isinstance(table, Packed) else rows.embed
                x, first = self._view(op.dst, n, table.shape[1]), self.group.first if self.group else 0
                embed(table, inputs["tokens"], inputs["sources"], self.last_ids, x, first)
                if self.group:
                    self.group.reduce(x)
            case Normalize():
                x, parts = self._view(op.src, n, widths[op.src]), self.pending.pop(op.src, None)
                rows.normalize(x, parts, self.weights.vectors[op.weight], op.eps, self._view(op.dst, n, widths[op.src]))
            case Linear():
                self._linear(op)
            case Product():
                self._product(op)
            case RotateAttend():
                self._rotate_attend(op, step)
            case Rotate():
                self._rotate(op, step)
            case Attend():
                self._attend(op, step)
            case Gate():
                rows.gate(self._view(op.src, n, 2 * op.size), op.size, op.activation, self._view(op.dst, n, op.size))
            case Select():
                self._select(op, step)
            case _:
                raise UnsupportedModel(f"the cuda backend has no op {type(op).__name__}")

    def _settle(self, name: str) -> None:
        parts = self.pending.pop(name)
        rows.add(self._view(name, self.rows, parts.shape[-1]), parts)

    def _linear(self, op: Linear) -> None:
        if op.src in self.pending:
            self._settle(op.src)
        weight, bias = self.weights.matrices[op.weights], self.weights.biases.get(op.weights)
        (n, k), count = weight.shape, self.rows
        x = self._view(op.src, count, k)
        if x.dtype != self.dtype:
            x = x.to(self.dtype)
        compact = isinstance(weight, Packed)
        few = count <= (packed.max_rows(weight, self.dtype) if compact else linear.MAX_ROWS)
        if op.accumulate and op.dst in self.pending:
            self._settle(op.dst)
        parts = 0
        if op.accumulate and few:
            parts = packed.parts(count, n, k) if compact else linear.tiles(count, n, k, True)[2]
        elif op.accumulate and not compact:
            parts = tiled.parts(count, n, k, self.dtype, self.device)
        if op.accumulate:
            y = self._view("parts", parts * count, n).view(parts, count, n) if parts else self._view("delta", count, n)[None]
            self.pending[op.dst] = y
        else:
            y = self._view(op.dst, count, n)[None]
            if op.dst == "logits":
                self.logits = y[0]
        if few and compact:
            packed.linear(x, weight, bias, y)
        elif few:
            linear.linear(x, weight, bias, y)
        elif compact:
            self._unpacked(x, weight, bias, y[0])
        elif parts:
            tiled.linear(x, weight, bias, y)
        else:
            product(x, weight, bias, y[0])
        if op.accumulate and self.group:
            self.group.reduce(y)

    def _product(self, op: Product) -> None:
        for name in {op.src, op.dst} & self.pending.keys():
            self._settle(name)
        weight, bias = self.weights.matrices[op.linear.weights], self.weights.biases.get(op.linear.weights)
        (n, k), norm, gate = weight.shape, op.normalize, op.gate
        shared = op.linear.accumulate and self.group is not None
        out = self._view("parts" if shared else op.dst, 1, gate.size if gate else n)
        if op.dst == "logits":
            self.logits = out
        how = (self.weights.vectors[norm.weight], norm.eps) if norm else (None, 0.0)
        by, add = one_row_packed if isinstance(weight, Packed) else one_row, op.linear.accumulate and not shared
        by.product(self._view(op.src, 1, k), weight, bias, out, *how, gate.activation if gate else "", add=add)
        if shared:
            self.group.reduce(out)
            self.pending[op.dst] = out[None]

    def _unpacked(self, x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """The product with a packed matrix, as many of its rows at a time as there is space for."""
        n, k = weight.shape
        each = max(1, UNPACKED // k)
        for first in range(0, n, each):
            values = self.buffers["unpacked"][: min(each, n - first) * k].view(-1, k)
            packed.unpack(weight, first, values)
            some = slice(first, first + len(values))
            product(x, values, None if bias is None else bias[some], out[:, some])

    def _rotate(self, op: Rotate, step: Step) -> None:
        qkv = self._view(op.buffer, self.rows, (op.heads + 2 * op.kv_heads) * op.head_size)
        vectors = self.weights.vectors
        norms = (vectors[op.q_norm], vectors[op.k_norm]) if op.q_norm else None
        slots, positions = step.inputs["slots"], step.inputs["positions"]
        kept = self.caches[op.cache]
        keep = len(step.inputs["tile_rows"]) > 0 and prefill.reads_own(self.dtype, kept.keys.dtype)
        rotate.rotate(qkv, slots, positions, self.turns[op.rope], norms, op.eps, kept, op.heads, keep)

    def _rotate_attend(self, op: RotateAttend, step: Step) -> None:
        kept = self.caches[op.attend.cache]
        if self.rows > attend_row.MAX_ROWS or len(step.inputs["tile_rows"]) or kept.units:
            self._rotate(op.rotate, step)
            self._attend(op.attend, step)
            return
        inputs, vectors, (rotate, attend) = step.inputs, self.weights.vectors, (op.rotate, op.attend)
        qkv = self._view(attend.src, self.rows, (attend.heads + 2 * attend.kv_heads) * attend.head_size)
        norms = (vectors[rotate.q_norm], vectors[rotate.k_norm]) if rotate.q_norm else None
        attend_row.attend(
            qkv, inputs["slots"], inputs["positions"], self.turns[rotate.rope], norms, rotate.eps, kept,
            self._view(attend.dst, self.rows, attend.heads * attend.head_size), step.table, inputs["stride"],
            inputs["decode_rows"], inputs["decode_sequences"], self.buffers["attention"], self.buffers["arrived"], attend.scale,
            attend.window, attend.heads,
        )  # fmt: skip

    def _attend(self, op: Attend, step: Step) -> None:
        qkv = self._view(op.src, self.rows, (op.heads + 2 * op.kv_heads) * op.head_size)
        out = self._view(op.dst, self.rows, op.heads * op.head_size)
        inputs = step.inputs
        paged = (qkv, self.caches[op.cache], out, step.table, inputs["stride"])
        how = (op.scale, op.window, op.heads)
        if len(inputs["decode_rows"]):
            space = self.buffers["attention"]
            attention.decode(*paged, inputs["decode_rows"], inputs["decode_sequences"], inputs["positions"], space, *how)
        if len(inputs["tile_rows"]):
            prefill.prefill(*paged, *(inputs[name] for name in TILES), inputs["positions"], *how)

    def _select(self, op: Select, step: Step) -> None:
        width = self.program.widths[op.src]
        src = self._view(op.src, step.rows, width)
        self.names[op.dst] = f"{op.dst} selected"
        torch.index_select(src, 0, step.inputs["wanted"], out=self._view(op.dst, step.wanted, width))
        self.rows = step.wanted


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out (rows, N) = x (rows, K) · weightᵀ + bias, by PyTorch; `out` may be float32 where the others are narrower."""
    if out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    elif x.is_cuda:
        torch.ops.aten.mm.dtype_out(x, weight.t(), out.dtype, out=out)
    else:
        torch.mm(x.to(out.dtype), weight.t().to(out.dtype), out=out)
    if bias is not None:
        out += bias
