"""The models: SmolLM2 as it is and requantised, and random weights in the shape of Qwen3-0.6B. Written once into a folder.

Random blocks are written as they are, without a quantiser: speed does not depend on what the weights say.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}
EMBEDDING = {"Q4_0": "Q6_K"}  # of a kind of layers, as llama.cpp's quantiser chooses it; of others the same kind
BLOCKS = {
    "Q4_0": np.dtype([("scale", "<f2"), ("quants", "u1", 16)]),
    "Q8_0": np.dtype([("scale", "<f2"), ("quants", "u1", 32)]),
    "Q6_K": np.dtype([("quants", "u1", 128 + 64), ("scales", "i1", 16), ("scale", "<f2")]),
}
# The spread of a block's whole numbers: of four bits, of eight, of six bits times an int8 scale of 64 to 127.
SPREAD = {"Q4_0": 4.6, "Q8_0": 74, "Q6_K": 18.5 * 97}


@dataclass(frozen=True)
class Shape:
    hidden: int = 1024
    mlp: int = 3072
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_size: int = 128
    vocabulary: int = 151936

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """GGUF's names -> shapes, rows first; tied embeddings."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        inner = {
            "attn_norm": (self.hidden,), "attn_q": (q, self.hidden), "attn_k": (kv, self.hidden), "attn_v": (kv, self.hidden),
            "attn_q_norm": (self.head_size,), "attn_k_norm": (self.head_size,), "attn_output": (self.hidden, q),
            "ffn_norm": (self.hidden,), "ffn_gate": (self.mlp, self.hidden), "ffn_up": (self.mlp, self.hidden),
            "ffn_down": (self.hidden, self.mlp),
        }  # fmt: skip
        found = {"token_embd.weight": (self.vocabulary, self.hidden), "output_norm.weight": (self.hidden,)}
        return found | {f"blk.{i}.{name}.weight": shape for i in range(self.layers) for name, shape in inner.items()}


def random_rows(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> np.ndarray:
    """Rows of blocks as a file has them, (rows, bytes) uint8, or (rows, columns) float16; numbers of about ±0.02."""
    rows, columns = shape
    raw = np.frombuffer(rng.bytes(rows * columns * (2 if kind == "F16" else 1)), np.uint8)
    if kind == "F16":  # the sign and the fraction are random, the exponent is that of 1/64
        return ((raw.view(np.uint16) & 0x83FF) | 0x2400).view(np.float16).reshape(shape)
    layout = BLOCKS[kind]
    size, weights = layout["quants"].shape[0], 256 if kind == "Q6_K" else 32
    blocks = np.empty(rows * columns // weights, layout)
    blocks["scale"] = rng.uniform(0.8, 1.2, len(blocks)) * 0.02 / SPREAD[kind]
    blocks["quants"] = raw[: len(blocks) * size].reshape(-1, size)
    if kind == "Q6_K":  # a quantiser's largest scale of a block is 127 or −128
        blocks["scales"] = rng.integers(64, 128, (len(blocks), 16)) * rng.choice((-1, 1), (len(blocks), 16))
    return blocks.view(np.uint8).reshape(rows, -1)


def write_random(target: Path, kind: str, tokenizer: Path, shape: Shape = Shape(), seed: int = 0) -> None:
    """A file of the architecture qwen3 whose matrices are random blocks of `kind`; the embedding is as EMBEDDING says.

    Args:
        tokenizer: a GGUF file whose vocabulary is taken, and filled up with tokens that are not used.
    """
    reader, writer = gguf.GGUFReader(tokenizer), gguf.GGUFWriter(target, "qwen3")
    writer.add_name(f"random weights, {kind}")
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_block_count(shape.layers)
    writer.add_context_length(40960)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocabulary)
    add_tokenizer(writer, reader, shape.vocabulary)
    rng, embedding = np.random.default_rng(seed), EMBEDDING.get(kind, kind)
    for name, size in shape.tensors().items():
        if len(size) == 1:
            writer.add_tensor(name, np.ones(size, np.float32))
        else:
            used = embedding if name == "token_embd.weight" else kind
            writer.add_tensor(name, random_rows(rng, size, used), raw_dtype=Type[used])
    finish(writer)


def add_tokenizer(writer: gguf.GGUFWriter, reader: gguf.GGUFReader, size: int) -> None:
    def value(key: str):
        return reader.fields[f"tokenizer.ggml.{key}"].contents()

    tokens, types = value("tokens"), value("token_type")
    added = size - len(tokens)
    writer.add_tokenizer_model(value("model"))
    writer.add_tokenizer_pre(value("pre"))
    writer.add_token_list((tokens + [f"[unused {i}]" for i in range(added)])[:size])
    writer.add_token_types((types + [gguf.TokenType.UNUSED] * added)[:size])
    writer.add_token_merges(value("merges"))
    writer.add_bos_token_id(value("bos_token_id"))
    writer.add_eos_token_id(value("eos_token_id"))


def requantise(source: Path, target: Path, kind: str) -> None:
    """`source` with the matrices of its layers in `kind`; the embedding stays as it is. Fair for speed, not for quality."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    writer.add_file_type(FILE_TYPES[kind])
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quantize(values, Type[kind]), raw_dtype=Type[kind])
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)


def quantise_k(source: Path, target: Path) -> None:
    """`source` as llama.cpp makes a Q4_K_M of it, where rows that are not whole super-blocks of 256 become Q5_0 and Q8_0."""
    import llama_cpp

    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)  # it tells of every tensor
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = FILE_TYPES["Q4_K_M"], True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params):
        raise RuntimeError(f"llama.cpp cannot quantise {source}")


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


NAMES = ("m1-q4_1", "m1-q4_0", "m1-q8_0", "m2-q4_0", "m2-q8_0", "m2-f16")  # of the whole comparison
KNOWN = (*NAMES, "m1-q4_k_m")


def prepare(name: str, folder: Path) -> Path:
    """The file of a model in KNOWN, written if it is not there; another name is a file's."""
    if name not in KNOWN:
        return Path(name)
    from nano_vllm.sources.catalog import fetch

    smollm2 = Path(fetch("smollm2"))
    if name == "m1-q4_1":
        return smollm2
    kind = name[3:].upper()
    stem = f"{name}-{EMBEDDING[kind].lower()}" if name.startswith("m2") and kind in EMBEDDING else name
    target, part = folder / f"{stem}.gguf", folder / f"{stem}.part"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"writing {target}", flush=True)
        if kind == "Q4_K_M":
            quantise_k(smollm2, part)
        elif name.startswith("m1"):
            requantise(smollm2, part, kind)
        else:
            write_random(part, kind, smollm2)
        part.rename(target)
    return target


def multiply_adds(path: Path) -> tuple[int, int]:
    """Of the layers' matrices per token, and of the head, which a prompt needs once."""
    sizes = {t.name: int(np.prod(t.shape)) for t in gguf.GGUFReader(path).tensors if len(t.shape) == 2}
    head = sizes.get("output.weight") or sizes["token_embd.weight"]
    return sum(n for name, n in sizes.items() if name.startswith("blk.")), head
