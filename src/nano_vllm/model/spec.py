"""A decoder described by its parts, as frozen data. What a config file says ends up here; no backend sees the config.

Only what changes the arithmetic is a field. Names of weights follow from the structure (`parameters`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Norm:
    """RMSNorm (Zhang & Sennrich 2019): x / sqrt(mean(x²) + eps) · weight."""

    eps: float


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021) over the two halves of a head, as Hugging Face lays them out.

    Every scaling (linear, llama3, yarn) is a change of these numbers, made once by `model/rope.py`.

    Attributes:
        frequencies: (head_size / 2,) radians per position, as float32 values.
        scale: factor on cosine and sine (yarn's attention factor).
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention (Ainslie et al. 2023) with a causal mask.

    Attributes:
        window: how many keys a query sees, itself included; None is all.
        bias: q, k and v have a bias.
        out_bias: the output projection has a bias.
        qk_norm: norm over each head of q and k before rotation.
        scale: factor on the scores.
    """

    heads: int
    kv_heads: int
    head_size: int
    rope: Rope
    scale: float
    window: int | None = None
    bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None


@dataclass(frozen=True)
class MLP:
    """Gated MLP (Shazeer 2020): down(activation(gate(x)) · up(x))."""

    size: int
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True)
class Layer:
    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP


@dataclass(frozen=True)
class Model:
    """Attributes:
    context: positions the model was trained for.
    tied: the head is the embedding.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    final_norm: Norm
    context: int
    tied: bool


def parameters(model: Model) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor the model needs. Matrices are (outputs, inputs)."""
    hidden, shapes = model.hidden_size, {"embedding": (model.vocab_size, model.hidden_size)}

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> None:
        shapes[name] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)

    for i, layer in enumerate(model.layers):
        a, at, mlp = layer.attention, f"layers.{i}.attention", layer.mlp
        shapes[f"layers.{i}.attention_norm"] = (hidden,)
        linear(f"{at}.q", a.heads * a.head_size, hidden, a.bias)
        linear(f"{at}.k", a.kv_heads * a.head_size, hidden, a.bias)
        linear(f"{at}.v", a.kv_heads * a.head_size, hidden, a.bias)
        if a.qk_norm:
            shapes[f"{at}.q_norm"] = shapes[f"{at}.k_norm"] = (a.head_size,)
        linear(f"{at}.out", hidden, a.heads * a.head_size, a.out_bias)
        shapes[f"layers.{i}.mlp_norm"] = (hidden,)
        linear(f"layers.{i}.mlp.gate", mlp.size, hidden, mlp.bias)
        linear(f"layers.{i}.mlp.up", mlp.size, hidden, mlp.bias)
        linear(f"layers.{i}.mlp.down", hidden, mlp.size, mlp.bias)
    shapes["final_norm"] = (hidden,)
    if not model.tied:
        shapes["head"] = (model.vocab_size, hidden)
    return shapes
