"""What llama, mistral, qwen2 and qwen3 share: a pre-norm decoder of grouped-query attention and a gated MLP.

An architecture says which settings it reads and calls `decoder`; settings that would change the arithmetic in a way that
is not built are refused by name, never ignored.
"""

from __future__ import annotations

import re

from ..errors import ModelFileError, UnsupportedModel
from ..model.rope import rope
from ..model.spec import MLP, Attention, Layer, Model, Norm

# Settings of this family's relatives, and the values at which they change nothing.
PLAIN = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "quantization_config": (),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "clip_qkv": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attention_multiplier": (),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "num_nextn_predict_layers": (0,),
    "attention_chunk_size": (),
    "no_rope_layers": (),
    "no_rope_layer_interval": (),
    "is_causal": (True,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
}
INSIDE = {
    "input_layernorm.weight": "attention_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "self_attn.q_norm.weight": "attention.q_norm",
    "self_attn.k_norm.weight": "attention.k_norm",
    "self_attn.rotary_emb.inv_freq": None,  # computed from the config
    "self_attn.rotary_emb.cos_cached": None,
    "self_attn.rotary_emb.sin_cached": None,
}
for _theirs, _ours in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")):
    INSIDE[f"self_attn.{_theirs}_proj.weight"] = f"attention.{_ours}"
    INSIDE[f"self_attn.{_theirs}_proj.bias"] = f"attention.{_ours}.bias"
for _part in ("gate", "up", "down"):
    INSIDE[f"mlp.{_part}_proj.weight"] = f"mlp.{_part}"
    INSIDE[f"mlp.{_part}_proj.bias"] = f"mlp.{_part}.bias"
OUTSIDE = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "final_norm", "lm_head.weight": "head"}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def rename(tensor: str) -> str | None:
    """Hugging Face's name of a tensor -> the canonical one; None: known, and not needed. KeyError: not of this family."""
    found = LAYER.fullmatch(tensor)
    if not found:
        return OUTSIDE[tensor]
    inside = INSIDE[found[2]]
    return inside and f"layers.{int(found[1])}.{inside}"


def integer(config: dict, name: str, default: int | None = None, least: int = 1) -> int:
    """A whole number of the config; ModelFileError where it is missing, none, or below `least`."""
    value = default if config.get(name) is None else config[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelFileError(f"config setting {name!r} must be a whole number from {least}", f"it is {value!r}")
    return value


def flag(config: dict, name: str, default: bool = False) -> bool:
    """A truth value of the config; ModelFileError where it is none."""
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, bool):
        raise ModelFileError(f"config setting {name!r} must be true or false", f"it is {value!r}")
    return value


def windows(config: dict, layers: int) -> list[int | None]:
    """Per layer the window, from `layer_types`, or from `use_sliding_window` and `max_window_layers` (Qwen's way: the first
    `max_window_layers` layers see everything)."""
    window = integer(config, "sliding_window", 4096) if flag(config, "use_sliding_window") else None
    kinds = config.get("layer_types")
    if kinds is None:
        full = layers if window is None else integer(config, "max_window_layers", 28, least=0)
        return [None if i < full else window for i in range(layers)]
    if len(kinds) != layers:
        raise ModelFileError("config setting 'layer_types' must name every layer", f"{len(kinds)} names, {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"layer type {kind!r} is not supported", "full_attention and sliding_attention are")
        if kind == "sliding_attention" and window is None:
            raise UnsupportedModel("layer type 'sliding_attention' needs a window", "use_sliding_window is false")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def decoder(
    config: dict,
    architecture: str,
    *,
    head_size: int | None = None,
    windows: list[int | None] | None = None,
    bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> Model:
    """The spec of a config. `head_size`: where the config has none, else hidden_size / heads; `windows`: one per layer."""
    for name, values in PLAIN.items():
        if config.get(name) is not None and config[name] not in values:
            raise UnsupportedModel(f"config setting {name!r} has a value that is not supported", f"it is {config[name]!r}")
    hidden, heads, layers = (integer(config, n) for n in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kv_heads = integer(config, "num_key_value_heads", heads)
    size = integer(config, "head_dim", head_size or hidden // heads)
    if heads % kv_heads:
        raise ModelFileError("the number of heads must be a multiple of the key-value heads", f"{heads} and {kv_heads}")
    eps = config.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
        raise ModelFileError("config setting 'rms_norm_eps' must be a small number", f"it is {eps!r}")
    norm, rotary = Norm(float(eps)), rope(config, size)
    mlp = MLP(integer(config, "intermediate_size"), "silu", mlp_bias)

    def layer(window: int | None) -> Layer:
        q_and_k = norm if qk_norm else None
        attention = Attention(heads, kv_heads, size, rotary, size**-0.5, window, bias, out_bias, q_and_k)
        return Layer(norm, attention, norm, mlp)

    return Model(
        architecture,
        integer(config, "vocab_size"),
        hidden,
        tuple(layer(window) for window in windows or [None] * layers),
        norm,
        integer(config, "max_position_embeddings"),
        flag(config, "tie_word_embeddings"),
    )
