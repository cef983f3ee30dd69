"""Small model files with random numbers, written by the `gguf` and `safetensors` packages."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

from nano_vllm.model.spec import parameters

from . import ggml

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
NAMES = {  # Hugging Face's part of a name, GGUF's
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def numbers(config: dict = CONFIG) -> dict[str, np.ndarray]:
    """Hugging Face name -> float32 values, all different; with a head."""
    h, m, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, k = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], h),
        "model.norm.weight": (h,),
        "lm_head.weight": (config["vocab_size"], h),
    }
    inner = [(h,), (q, h), (k, h), (k, h), (h, q), (h,), (m, h), (m, h), (h, m)]
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{part}.weight": shape for part, shape in zip(NAMES, inner)}
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outside:
        return outside[name]
    _, _, layer, part = name.split(".", 3)
    part, _, kind = part.rpartition(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as files of the architecture "llama" have them: row i of the first half of a head, then i of the second."""
    first, second = np.split(rows.reshape(heads, -1, *rows.shape[1:]), 2, axis=1)
    return np.stack((first, second), axis=2).reshape(rows.shape)


METADATA = {
    "llama.block_count": 2, "llama.context_length": 128, "llama.embedding_length": 64, "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.attention.key_length": 32,
    "llama.attention.value_length": 32, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 32,
}  # fmt: skip


def write_gguf(
    path: Path, tensors: dict[str, np.ndarray] | None = None, types: dict | None = None, arch: str = "llama", **changes
) -> Path:
    """A model of CONFIG's sizes. `types`: Hugging Face name -> ggml's type, else F32; `changes`: metadata, None drops a key
    (dots in keys are written as two underscores)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (METADATA | {key.replace("__", "."): value for key, value in changes.items()}).items():
        key = key.replace("llama.", f"{arch}.", 1)
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, values in (numbers() if tensors is None else tensors).items():
        kind = (types or {}).get(name, gguf.GGMLQuantizationType.F32)
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleaved(values, 4 if "q_proj" in name else 2)
        theirs = gguf_name(name) if name.startswith(("model", "lm_head")) else name
        writer.add_tensor(theirs, ggml.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(folder: Path, tensors: dict[str, np.ndarray] | None = None, shards: int = 0, **changes) -> Path:
    """config.json of CONFIG with `changes` (None drops a setting), and one file, or so many shards with an index."""
    folder.mkdir(exist_ok=True)
    tensors = numbers() if tensors is None else tensors
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    if not shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    index = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(index.values())):
        save_file({name: values for name, values in tensors.items() if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def canonical(name: str) -> str:
    """Our name, by the order of `parameters`: an independent way to `rename`."""
    parts = [
        "attention_norm",
        "attention.q",
        "attention.k",
        "attention.v",
        "attention.out",
        "mlp_norm",
        "mlp.gate",
        "mlp.up",
        "mlp.down",
    ]
    outside = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "final_norm", "lm_head.weight": "head"}
    if name in outside:
        return outside[name]
    _, _, layer, part = name.split(".", 3)
    part, _, kind = part.rpartition(".")
    return f"layers.{layer}.{parts[list(NAMES).index(part)]}" + (".bias" if kind == "bias" else "")


def same_values(model, tensors: dict[str, np.ndarray]) -> None:
    """The opened model has exactly these values under our names."""
    assert set(model.weights) == set(parameters(model.spec)) == {canonical(name) for name in tensors}
    for name, values in tensors.items():
        tensor = model.weights[canonical(name)]
        assert tensor.info == model.weights.infos[canonical(name)] and tensor.info.shape == values.shape
        assert tensor.info.nbytes == sum(plane.nbytes for plane in tensor.planes.values())
        np.testing.assert_array_equal(tensor.unpack(), values)
