"""The spec lowered once to a flat list of ops over named buffers. Every backend executes this list.

A buffer is (rows, width) float32; rows are the tokens of a step. Ops are fused where fusing is always right:
q, k and v share one linear, so do gate and up; a residual is added by the linear that produces it; norm of
q and k, rotation and the cache write are one op.
"""

from __future__ import annotations

from dataclasses import dataclass

from .spec import Model, Rope, parameters


@dataclass(frozen=True)
class Embed:
    """dst = weight[token ids]"""

    name: str
    weight: str
    dst: str


@dataclass(frozen=True)
class Normalize:
    """dst = rmsnorm(src) · weight"""

    name: str
    weight: str
    eps: float
    src: str
    dst: str


@dataclass(frozen=True)
class Linear:
    """dst = concat(src @ w.T + b for each weight), or dst += … with `accumulate`.

    `biases` is parallel to `weights`; None is no bias.
    """

    name: str
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]
    src: str
    dst: str
    accumulate: bool = False


@dataclass(frozen=True)
class Rotate:
    """On each row of `buffer` = [q heads | k heads | v heads]: norm of each q and k head (where the weights are named), rotation
    of q and k in place, then k and v are rounded to the cache's type and stored in the slots of `cache`."""

    name: str
    buffer: str
    heads: int
    kv_heads: int
    head_size: int
    rope: int  # index into Program.ropes
    q_norm: str | None
    k_norm: str | None
    eps: float
    cache: int  # index into Program.caches


@dataclass(frozen=True)
class Attend:
    """dst = softmax(scale · q·Kᵀ) V per head over the row's own sequence in `cache`, causal, within `window` if given."""

    name: str
    src: str
    dst: str
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    window: int | None
    cache: int


@dataclass(frozen=True)
class Gate:
    """dst = activation(src[:, :size]) · src[:, size : 2 · size]"""

    name: str
    activation: str
    size: int
    src: str
    dst: str


@dataclass(frozen=True)
class Select:
    """dst = the rows of src whose next token is wanted. Later ops run on those rows only; more Selects follow it at once."""

    name: str
    src: str
    dst: str


Op = Embed | Normalize | Linear | Rotate | Attend | Gate | Select


@dataclass(frozen=True)
class Cache:
    """Keys and values of one layer: per token `kv_heads · head_size` numbers each."""

    kv_heads: int
    head_size: int


@dataclass(frozen=True)
class Program:
    """Attributes:
    widths: buffer name -> width.
    parameters: canonical weight name -> shape.
    """

    ops: tuple[Op, ...]
    widths: dict[str, int]
    ropes: tuple[Rope, ...]
    caches: tuple[Cache, ...]
    parameters: dict[str, tuple[int, ...]]
    vocab_size: int
    context: int


def lower(model: Model) -> Program:
    """Model -> Program. The only place that knows the order of a decoder's parts."""
    shapes = parameters(model)
    ropes = tuple(dict.fromkeys(layer.attention.rope for layer in model.layers))
    ops: list[Op] = [Embed("embedding", "embedding", "x")]
    widths = {"x": model.hidden_size, "h": model.hidden_size, "logits": model.vocab_size}

    def widen(buffer: str, width: int) -> None:
        widths[buffer] = max(widths.get(buffer, 0), width)

    def linear(name: str, weights: tuple[str, ...], src: str, dst: str, accumulate: bool = False) -> None:
        biases = tuple(f"{w}.bias" if f"{w}.bias" in shapes else None for w in weights)
        ops.append(Linear(name, weights, biases, src, dst, accumulate))

    for i, layer in enumerate(model.layers):
        a, at, mlp = layer.attention, f"layers.{i}.attention", f"layers.{i}.mlp"
        widen("qkv", (a.heads + 2 * a.kv_heads) * a.head_size)
        widen("attended", a.heads * a.head_size)
        widen("gate_up", 2 * layer.mlp.size)
        widen("gated", layer.mlp.size)
        ops.append(Normalize(f"{at}_norm", f"{at}_norm", layer.attention_norm.eps, "x", "h"))
        linear(f"{at}.qkv", (f"{at}.q", f"{at}.k", f"{at}.v"), "h", "qkv")
        norms = (f"{at}.q_norm", f"{at}.k_norm") if a.qk_norm else (None, None)
        eps = a.qk_norm.eps if a.qk_norm else 0.0
        ops.append(Rotate(f"{at}.rotate", "qkv", a.heads, a.kv_heads, a.head_size, ropes.index(a.rope), *norms, eps, i))
        ops.append(Attend(f"{at}.attend", "qkv", "attended", a.heads, a.kv_heads, a.head_size, a.scale, a.window, i))
        if i == len(model.layers) - 1:  # of the last layer all rows leave keys and values, but few are read further
            ops += [Select("select.attended", "attended", "attended"), Select("select.x", "x", "x")]
        linear(f"{at}.out", (f"{at}.out",), "attended", "x", accumulate=True)
        ops.append(Normalize(f"{mlp}_norm", f"{mlp}_norm", layer.mlp_norm.eps, "x", "h"))
        linear(f"{mlp}.gate_up", (f"{mlp}.gate", f"{mlp}.up"), "h", "gate_up")
        ops.append(Gate(f"{mlp}.activation", layer.mlp.activation, layer.mlp.size, "gate_up", "gated"))
        linear(f"{mlp}.down", (f"{mlp}.down",), "gated", "x", accumulate=True)
    ops.append(Normalize("final_norm", "final_norm", model.final_norm.eps, "x", "h"))
    linear("head", ("embedding",) if model.tied else ("head",), "h", "logits")
    caches = tuple(Cache(layer.attention.kv_heads, layer.attention.head_size) for layer in model.layers)
    return Program(tuple(ops), widths, ropes, caches, shapes, model.vocab_size, model.context)
