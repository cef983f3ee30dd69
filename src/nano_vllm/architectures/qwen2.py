"""Qwen2 and Qwen2.5 (Yang et al. 2024): biases on q, k and v, a window on the upper layers where the config asks for it."""

from __future__ import annotations

from ..model.spec import Model
from ._llama_family import decoder, integer, rename, windows

__all__ = ["NAMES", "TINY", "describe", "rename"]

NAMES = ("Qwen2ForCausalLM", "qwen2")


def describe(config: dict) -> Model:
    return decoder(config, "qwen2", windows=windows(config, integer(config, "num_hidden_layers")), bias=True)


_PLAIN = {
    "model_type": "qwen2", "vocab_size": 96, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 0.02,
    "rope_theta": 1000.0, "use_sliding_window": False,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
TINY = (
    _PLAIN | {"tie_word_embeddings": True, "sliding_window": 4},
    _PLAIN | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    _PLAIN | {"use_sliding_window": True, "sliding_window": 5, "layer_types": _KINDS, "rope_scaling": _YARN},
    _PLAIN | {"num_attention_heads": 3, "num_key_value_heads": 1},
)
