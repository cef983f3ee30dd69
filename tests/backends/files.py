"""Tiny models as GGUF files, for llama.cpp and for us."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from ..core import ggml

# A format -> ggml's type of all matrices, or of those with a part of a name in them; "" is of the others.
TYPES: dict[str, Type | dict[str, Type]] = {
    "f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q8": Type.Q8_0, "q4": Type.Q4_0, "q4 with minimum": Type.Q4_1,
    "q4_k": Type.Q4_K, "q5_k": Type.Q5_K, "q6_k": Type.Q6_K,
    # as llama-quantize makes Q4_K_M, and one matrix in each of three other types
    "mixed": {"v_proj": Type.Q6_K, "down_proj": Type.Q6_K, "lm_head": Type.Q6_K, "embed": Type.Q6_K, "o_proj": Type.Q5_K,
              "up_proj": Type.Q8_0, "layers.1.self_attn.k_proj": Type.F16, "": Type.Q4_K},
}  # fmt: skip


def type_of(format: str, name: str) -> Type:
    """ggml's type of a matrix by its Hugging Face name."""
    types = TYPES[format]
    return types if isinstance(types, Type) else next(kind for part, kind in types.items() if part in name)


def columns(format: str) -> int:
    """What the rows of a model in this format must be whole multiples of."""
    return 256 if format == "mixed" or TYPES[format] in ggml.SUPER else 128


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from halves to neighbouring pairs, the order of llama's GGUF files."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model, module, format: str) -> None:
    """The model as a GGUF file without a tokenizer, matrices rounded to a format of TYPES; the model's weights
    become the rounded ones."""
    import torch

    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, last = name.rpartition(".")
        values = weight.numpy()
        wanted = type_of(format, name) if values.ndim == 2 else Type.F32
        stored = ggml.quantize(values, wanted)
        weight.copy_(torch.from_numpy(gguf.quants.dequantize(stored, wanted)))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stem.rpartition(".")[2])
        if heads and getattr(module, "GGUF_INTERLEAVED_ROPE", False):
            stored = interleave(stored, heads)
        writer.add_tensor(f"{names.get_name(stem)}.{last}", np.ascontiguousarray(stored), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
