"""Qwen3, dense (Yang et al. 2025): a norm on each head of q and k, and a head size of its own."""

from __future__ import annotations

from ..model.spec import Model
from ._llama_family import decoder, flag, integer, rename, windows

__all__ = ["NAMES", "TINY", "describe", "rename"]

NAMES = ("Qwen3ForCausalLM", "qwen3")


def describe(config: dict) -> Model:
    """Without a `head_dim` heads have 128, whatever the hidden size, as in transformers."""
    layers, bias = integer(config, "num_hidden_layers"), flag(config, "attention_bias")
    return decoder(config, "qwen3", head_size=128, windows=windows(config, layers), bias=bias, out_bias=bias, qk_norm=True)


_PLAIN = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "rms_norm_eps": 0.02, "rope_theta": 1000.0, "use_sliding_window": False,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TINY = (
    _PLAIN | {"tie_word_embeddings": True},
    _PLAIN | {"attention_bias": True, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_scaling": _YARN},
    _PLAIN | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "head_dim": 8},
)
