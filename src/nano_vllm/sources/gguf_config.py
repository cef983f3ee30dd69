"""GGUF metadata in Hugging Face's spelling, so that architectures know one spelling, and our names of its tensors.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section "LLM".
"""

from __future__ import annotations

import math
import re

import numpy as np

from ..errors import ModelFileError, UnsupportedModel
from .gguf import GGUFHeader, read

OUTSIDE = {
    "token_embd.weight": "embedding",
    "output_norm.weight": "final_norm",
    "output.weight": "head",
    "rope_freqs.weight": None,
}
INSIDE = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.q",
    "attn_k": "attention.k",
    "attn_v": "attention.v",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "attn_output": "attention.out",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}
LAYER = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(\w+)\.(weight|bias)", re.ASCII)


def rename(tensor: str) -> str | None:
    """A file's name of a tensor -> the canonical one; None: known, and not a parameter. KeyError: not known."""
    found = LAYER.fullmatch(tensor)
    if not found:
        return OUTSIDE[tensor]
    return f"layers.{found[1]}.{INSIDE[found[2]]}{'.bias' if found[3] == 'bias' else ''}"


def architecture(header: GGUFHeader) -> str:
    """The file's own name of its architecture."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelFileError(f"{header.path} does not name its architecture", "the key 'general.architecture' is no text", "")
    return name


def config(header: GGUFHeader) -> dict:
    """The settings as a config.json would have them. Counts that differ per layer are not supported.

    Raises:
        ModelFileError: a key is missing, or its value cannot be meant; it names the key.
        UnsupportedModel: what no setting of ours can say.
    """
    name = architecture(header)
    get = _Keys(header, name)
    hidden, heads = get.integer("embedding_length"), get.integer("attention.head_count")
    head_dim = get.integer("attention.key_length", hidden // heads)
    if get.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel("values of another size than keys are not supported", f"{name}.attention.value_length differs")
    settings = {
        "model_type": name,
        "architectures": [name],
        "hidden_size": hidden,
        "num_hidden_layers": _layers(header, get.integer("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": get.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": get.integer("feed_forward_length"),
        "rms_norm_eps": get.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": get.number("rope.freq_base", 10000.0),
        "max_position_embeddings": get.integer("context_length"),
        "vocab_size": _vocabulary(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": any(f"blk.0.attn_{part}.bias" in header.tensors for part in ("q", "output")),
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        "hidden_act": "silu",
    }
    rotated = get.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        settings["partial_rotary_factor"] = rotated / head_dim
    if f"{name}.attention.sliding_window" in header.metadata:
        settings |= {
            "sliding_window": get.integer("attention.sliding_window"),
            "use_sliding_window": True,
            "max_window_layers": 0,
        }
    if get.integer("expert_count", 0, least=0):
        settings["num_experts"] = get.integer("expert_count")
    scaling = _scaling(header, get)
    return settings | ({"rope_scaling": scaling} if scaling else {})


def _layers(header: GGUFHeader, count: int) -> int:
    """The number of layers, once the file has tensors of exactly so many: nothing is built for layers that are not there."""
    there = {int(found[1]) for found in map(LAYER.fullmatch, header.tensors) if found}
    if count != len(there) or max(there) != count - 1:
        raise ModelFileError(
            f"{header.path} does not have the layers it names", f"block_count is {count}, tensors are of {len(there)}"
        )
    return count


def _vocabulary(header: GGUFHeader) -> int:
    """Rows of the embedding, which the file's list of tokens must fit."""
    embedding, tokens = header.tensors.get("token_embd.weight"), header.metadata.get("tokenizer.ggml.tokens")
    if embedding is None:
        raise ModelFileError(
            f"{header.path} has no tensor 'token_embd.weight'", "every model needs it", "Fetch or convert it again."
        )
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        why = f"{len(tokens)} tokens, {embedding.shape[0]} rows"
        raise ModelFileError(f"{header.path} has a list of tokens longer than its tensor 'token_embd.weight'", why)
    return embedding.shape[0]


def _scaling(header: GGUFHeader, get: _Keys) -> dict | None:
    """The rotary scaling as `rope_scaling`.

    Where a tensor gives a divisor per frequency (llama3 is stored so), it is all there is. YaRN's own factor on cosine and
    sine, 0.1 · ln(factor) + 1, is multiplied by the file's attn_factor; Hugging Face's attention_factor is the product.
    """
    if "rope_freqs.weight" in header.tensors:
        return {"rope_type": "factors", "factors": _factors(header)}
    kind = header.metadata.get(f"{get.architecture}.rope.scaling.type", "none")
    if not isinstance(kind, str):
        raise ModelFileError(f"the key '{get.architecture}.rope.scaling.type' must be a text", f"it is {kind!r:.50}")
    if f"{get.architecture}.rope.scale_linear" in header.metadata:  # the key's name before 2023-10
        return {"rope_type": "linear", "factor": get.number("rope.scale_linear")}
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": get.number("rope.scaling.factor")}
    if kind != "yarn":
        raise UnsupportedModel(f"rope scaling {kind!r} is not supported", "none, linear and yarn are", "")
    factor = get.number("rope.scaling.factor")
    original = get.integer("rope.scaling.original_context_length", get.integer("context_length"))
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if f"{get.architecture}.rope.scaling.{theirs}" in header.metadata:
            scaling[ours] = get.number(f"rope.scaling.{theirs}")
    magnitude = get.number("rope.scaling.attn_factor", 1.0)
    if magnitude != 1.0:
        scaling["attention_factor"] = magnitude * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return scaling


def _factors(header: GGUFHeader) -> tuple[float, ...]:
    tensor = header.tensors["rope_freqs.weight"]
    if len(tensor.shape) != 1 or tensor.type != "F32":
        why = f"it is {tensor.type} of shape {tensor.shape}, not a row of F32"
        raise ModelFileError(f"{header.path} has a tensor 'rope_freqs.weight' that is none", why)
    with open(header.path, "rb", buffering=0) as file:
        return tuple(read(file, tensor, tensor.name).planes["values"].tolist())


class _Keys:
    """Settings of one architecture, checked. Arrays pass where all their values are one, as for heads given per layer."""

    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        self.header, self.architecture = header, architecture

    def _get(self, key: str, default: object) -> object:
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelFileError(
                f"{self.header.path} has no key '{self.architecture}.{key}'", "every model needs it", "Convert it again."
            )
        if isinstance(value, np.ndarray) and value.size:
            if (value != value[0]).any():
                raise UnsupportedModel(f"'{self.architecture}.{key}' differs between layers", f"it is {value[:8].tolist()} …")
            value = value[0].item()
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._get(key, default)
        if type(value) is not int or not least <= value < 1 << 31:
            raise ModelFileError(
                f"the key '{self.architecture}.{key}' must be a whole number from {least}", f"it is {value!r:.50}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ModelFileError(f"the key '{self.architecture}.{key}' must be a positive number", f"it is {value!r:.50}")
        return float(value)
