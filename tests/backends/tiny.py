"""Random tiny Hugging Face models of every architecture's TINY configs, and the batches to run them with."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from nano_vllm import registry
from nano_vllm.engine.backend import Batch
from nano_vllm.formats import Tensor, pack
from nano_vllm.memory.plan import Plan
from nano_vllm.sampling.params import SamplingParams
from nano_vllm.sampling.pipeline import collect

LENGTH = 45  # tokens of a sequence: beyond every window and original context of the TINY configs
BLOCK_SIZE = 16


def variants() -> list[tuple[str, int]]:
    """(architecture, index into its TINY) of all that the folder has."""
    return [(name, i) for name, module in registry.modules("architectures").items() for i in range(len(configs(module)))]


def configs(module) -> tuple[dict, ...]:
    return (module.TINY,) if isinstance(module.TINY, dict) else module.TINY


def theirs(config: dict, seed: int = 0):
    """A transformers model in float32 with weights that leave no part of the arithmetic idle: sharp attention, norms away
    from one, biases away from zero, logits of about unit size."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: dict(value) if isinstance(value, dict) else value for name, value in config.items()}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # by name, so that fixtures made with one version of transformers hold for another
            generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
            noise = torch.from_numpy(generator.standard_normal(tuple(weight.shape), np.float32))
            sharper = 2.5 if "q_proj" in name or "k_proj" in name else 1.8 if "q_norm" in name or "k_norm" in name else 1.0
            if "norm" in name:
                weight.copy_(sharper * (1 + 0.3 * noise))
            elif weight.ndim == 1:
                weight.copy_(0.4 * noise)
            else:
                weight.copy_(sharper * noise / weight.shape[1] ** 0.5)
    return model


def save(model, folder: Path, old: dict | None = None) -> Path:
    """Writes config.json and model.safetensors. `old`: the TINY config, for a config.json as transformers 4 wrote it, without
    the settings that could be left out then."""
    model.save_pretrained(folder)
    if old is not None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        scaling = config.pop("rope_parameters")
        config["rope_theta"] = scaling.pop("rope_theta")
        config["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
        config["torch_dtype"] = config.pop("dtype")
        kept = {name: value for name, value in config.items() if name not in ("layer_types", "head_dim") or name in old}
        path.write_text(json.dumps(kept))
    return folder


def tokens(vocab_size: int, length: int = LENGTH, seed: int = 1) -> np.ndarray:
    """(length,) int32 random ids."""
    return np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.int32)


def their_logits(model, ids: np.ndarray) -> np.ndarray:
    """(length, vocabulary) float32."""
    import torch

    with torch.inference_mode():
        return model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()


def plan(backend: str = "reference", kv_cache_dtype: str = "f32", num_blocks: int = 32, **changed) -> Plan:
    settings = {
        "backend": backend, "kv_cache_dtype": kv_cache_dtype, "block_size": BLOCK_SIZE, "num_blocks": num_blocks,
        "max_model_len": 4096, "max_num_seqs": 32, "max_num_batched_tokens": 1024, "threads": 2, "isa": "", "reasons": {},
    }  # fmt: skip
    return Plan(**settings | changed)


def batch(parts: list[tuple[np.ndarray, int, list[int]]], wanted: str = "all", want_logits: bool = True) -> Batch:
    """One step of sequences given as (ids, position of the first, block ids). Wanted are all rows, or each one's `last`."""
    lengths = [len(ids) for ids, _, _ in parts]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = np.arange(starts[-1]) if wanted == "all" else starts[1:] - 1
    table = np.full((len(parts), max(len(blocks) for _, _, blocks in parts)), -1, np.int32)
    for row, (_, _, blocks) in zip(table, parts):
        row[: len(blocks)] = blocks
    return Batch(
        tokens=np.concatenate([ids for ids, _, _ in parts]).astype(np.int32),
        sources=np.full(starts[-1], -1, np.int32),
        positions=np.concatenate([first + np.arange(n) for n, (_, first, _) in zip(lengths, parts)]).astype(np.int32),
        starts=starts,
        block_tables=(table,),
        wanted=rows.astype(np.int32),
        sampling=greedy(len(rows)),
        want_logits=np.full(len(rows), want_logits),
    )


def greedy(rows: int):
    """Sampling parameters of rows that take the likeliest token."""
    params = SamplingParams(temperature=0.0)
    request = SimpleNamespace(params=params, tokens=[0], prompt_length=1, promised=0, seed=0, index=0, stop_ids=())
    return collect([request] * rows)


def logits(session, ids: np.ndarray) -> np.ndarray:
    """(length, vocabulary) float32 of one sequence in one step; its blocks are in no order."""
    count = -(-len(ids) // BLOCK_SIZE)
    blocks = [(7 * i + 3) % 32 for i in range(count)]
    return session.submit(batch([(ids, 0, blocks)])).result().logits.copy()


def wide(config: dict, columns: int = 128) -> dict:
    """A TINY config with every row in whole groups of `columns`, and vectors long enough for errors to average out."""
    heads = {"num_attention_heads": columns // 32, "num_key_value_heads": 2, "head_dim": 32}
    return config | heads | {"hidden_size": columns, "intermediate_size": 2 * columns, "vocab_size": 256}


def rounded(values: dict[str, np.ndarray], format: str, **options) -> dict[str, Tensor]:
    """Matrices in a format, vectors in float32."""
    return {n: pack(n, v, format, **options) if v.ndim == 2 else pack(n, v, "f32") for n, v in values.items()}


def values(model, module) -> dict[str, np.ndarray]:
    """Canonical name -> float32 values of a transformers model."""
    named = {module.rename(name): weight for name, weight in model.state_dict().items()}
    tied = model.config.tie_word_embeddings
    return {name: weight.numpy().copy() for name, weight in named.items() if name and not (tied and name == "head")}
