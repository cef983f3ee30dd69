"""Llama (Touvron et al. 2023), and what copies it: Mistral, SmolLM2."""

from __future__ import annotations

from ..errors import UnsupportedModel
from ..model.spec import Model
from ._llama_family import decoder, flag, integer, rename

__all__ = ["GGUF_INTERLEAVED_ROPE", "NAMES", "TINY", "describe", "rename"]

NAMES = ("LlamaForCausalLM", "MistralForCausalLM", "llama", "mistral")
GGUF_INTERLEAVED_ROPE = True  # rows of q and k are in the order of the original Llama's rotation, pairs side by side


def describe(config: dict) -> Model:
    """Only mistral has a window, on every layer; only llama has biases."""
    layers = integer(config, "num_hidden_layers")
    if config.get("model_type") == "mistral":
        if config.get("layer_types"):
            raise UnsupportedModel(
                "config setting 'layer_types' is not supported for mistral", f"it is {config['layer_types']!r}"
            )
        window = integer(config, "sliding_window") if config.get("sliding_window") is not None else None
        return decoder(config, "llama", windows=[window] * layers)
    if config.get("sliding_window") is not None:
        why = f"it is {config['sliding_window']!r}, and only mistral has it"
        raise UnsupportedModel("config setting 'sliding_window' is not supported for llama", why)
    bias = flag(config, "attention_bias")
    return decoder(config, "llama", bias=bias, out_bias=bias, mlp_bias=flag(config, "mlp_bias"))


_PLAIN = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 0.02,
}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TINY = (
    _PLAIN | {"tie_word_embeddings": True, "rope_theta": 10000.0},
    _PLAIN | {"attention_bias": True, "mlp_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    _PLAIN | {"head_dim": 12, "rope_theta": 500.0, "rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 16}},
    _PLAIN | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "rope_scaling": _YARN},
    _PLAIN | {"model_type": "mistral", "sliding_window": 7, "head_dim": 10, "num_attention_heads": 3, "num_key_value_heads": 3},
    _PLAIN | {"model_type": "mistral", "sliding_window": None, "num_attention_heads": 3, "num_key_value_heads": 1},
)
