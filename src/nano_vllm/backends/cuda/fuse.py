"""The Program's ops as the device runs them: neighbours that one kernel does together are one op.

What is fused depends on the rows of a step. With one row a product's kernel waits for latencies, not for arithmetic: it takes the
norm before it and the gate after it along. With several, each of its programs would do that work again.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...model.program import Attend, Gate, Linear, Normalize, Op, Program, Rotate, Select


@dataclass(frozen=True)
class Product:
    """A linear of one row, with the norm of what it reads and the gate of what it leaves, where there are such."""

    linear: Linear
    normalize: Normalize | None
    gate: Gate | None

    @property
    def src(self) -> str:
        return self.normalize.src if self.normalize else self.linear.src

    @property
    def dst(self) -> str:
        return self.gate.dst if self.gate else self.linear.dst


@dataclass(frozen=True)
class RotateAttend:
    rotate: Rotate
    attend: Attend


@dataclass(frozen=True)
class Segment:
    """Ops up to where rows are selected.

    Attributes:
        one, many: for one row, and for several.
        selects: what follows them.
    """

    one: tuple[Op | Product | RotateAttend, ...]
    many: tuple[Op | RotateAttend, ...]
    selects: tuple[Select, ...]


def segments(program: Program) -> list[Segment]:
    found, ops = [], list(program.ops)
    while ops:
        until = next((i for i, op in enumerate(ops) if isinstance(op, Select)), len(ops))
        after = next((i for i in range(until, len(ops)) if not isinstance(ops[i], Select)), len(ops))
        many = _pairs(ops[:until])
        found.append(Segment(_products(many), tuple(many), tuple(ops[until:after])))
        ops = ops[after:]
    return found


def _pairs(ops: list[Op]) -> list[Op | RotateAttend]:
    fused: list[Op | RotateAttend] = []
    for op in ops:
        before = fused[-1] if fused else None
        if isinstance(op, Attend) and isinstance(before, Rotate) and (op.src, op.cache) == (before.buffer, before.cache):
            fused[-1] = RotateAttend(before, op)
        else:
            fused.append(op)
    return fused


def _products(ops: list[Op | RotateAttend]) -> tuple[Op | Product | RotateAttend, ...]:
    fused: list[Op | Product | RotateAttend] = []
    for op in ops:
        before = fused[-1] if fused else None
        if isinstance(op, Linear):
            normed = isinstance(before, Normalize) and before.dst == op.src and before.src != op.dst
            if normed:
                fused.pop()
            fused.append(Product(op, before if normed else None, None))
        elif isinstance(op, Gate) and isinstance(before, Product) and before.dst == op.src and not before.linear.accumulate:
            fused[-1] = Product(before.linear, before.normalize, op)
        else:
            fused.append(op)
    return tuple(fused)
