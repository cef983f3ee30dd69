"""Folders of safetensors: every parameter filled exactly once, or an error that names the tensor."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from nano_vllm.errors import ModelFileError, ModelNotFound, UnsupportedModel
from nano_vllm.loading import eos_ids
from nano_vllm.model.weights import open_model
from nano_vllm.sources import safetensors

from .models import CONFIG, canonical, numbers, same_values, write_folder, write_gguf

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def without(*names: str) -> dict[str, np.ndarray]:
    return {name: values for name, values in numbers().items() if name not in names}


@pytest.mark.parametrize("shards", [0, 1, 3])
def test_every_tensor_is_read_under_our_name(tmp_path: Path, shards: int) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    model = open_model(write_folder(tmp_path, shards=shards))
    same_values(model, numbers())
    assert model.generation_config == {"eos_token_id": 2} and model.metadata is None and model.path == tmp_path
    assert model.config["hidden_size"] == 64 and not model.spec.tied
    model.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_values_keep_their_files_precision(tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    stored = {name: torch.from_numpy(values).to(getattr(torch, dtype)) for name, values in numbers().items()}
    write_folder(tmp_path)
    save_file(stored, tmp_path / "model.safetensors")
    model = open_model(tmp_path)
    assert {info.format for info in model.weights.infos.values()} == {
        {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}[dtype]
    }
    same_values(model, {name: values.float().numpy() for name, values in stored.items()})


def test_tied_without_a_head(tmp_path: Path) -> None:
    model = open_model(write_folder(tmp_path, without(HEAD), tie_word_embeddings=True))
    assert model.spec.tied
    same_values(model, without(HEAD))


def test_tied_with_an_equal_head_drops_it(tmp_path: Path) -> None:
    tensors = numbers()
    tensors[HEAD] = tensors[EMBEDDING].copy()
    model = open_model(write_folder(tmp_path, tensors, tie_word_embeddings=True))
    assert model.spec.tied
    same_values(model, {name: values for name, values in tensors.items() if name != HEAD})


def test_tied_with_another_head_is_not_tied(tmp_path: Path) -> None:
    model = open_model(write_folder(tmp_path, tie_word_embeddings=True))
    assert not model.spec.tied
    same_values(model, numbers())


def test_tied_with_only_the_head(tmp_path: Path) -> None:
    model = open_model(write_folder(tmp_path, without(EMBEDDING), tie_word_embeddings=True))
    assert model.spec.tied
    np.testing.assert_array_equal(model.weights["embedding"].unpack(), numbers()[HEAD])


@pytest.mark.parametrize("case", ["both equal", "both", "embedding", "head"])
def test_ties_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM

    tensors = without({"embedding": HEAD, "head": EMBEDDING}.get(case, ""))
    if case == "both equal":
        tensors[HEAD] = tensors[EMBEDDING].copy()
    write_folder(tmp_path, tensors, tie_word_embeddings=True)
    theirs, ours = AutoModelForCausalLM.from_pretrained(tmp_path), open_model(tmp_path)
    np.testing.assert_array_equal(ours.weights["embedding"].unpack(), theirs.model.embed_tokens.weight.detach().numpy())
    head = ours.weights["embedding" if ours.spec.tied else "head"].unpack()
    np.testing.assert_array_equal(head, theirs.lm_head.weight.detach().numpy())


@pytest.mark.parametrize(("gone", "named"), [(HEAD, "'head'"), (EMBEDDING, "'embedding'")])
def test_untied_with_only_one_of_two_names_the_mend(tmp_path: Path, gone: str, named: str) -> None:
    write_folder(tmp_path, without(gone))
    with pytest.raises(ModelFileError, match=named) as caught:
        open_model(tmp_path)
    assert "tie_word_embeddings" in caught.value.mend


@pytest.mark.parametrize("name", numbers())
def test_every_parameter_is_missed(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match=f"no tensor for '{canonical(name)}'"):
        open_model(write_folder(tmp_path, without(name)))


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    for name in (HEAD, EMBEDDING, "model.norm.weight", "model.layers.1.mlp.down_proj.weight"):
        tensors = numbers()
        tensors[name] = np.ascontiguousarray(tensors[name][..., :-1])
        with pytest.raises(ModelFileError, match=f"{name}.*shape"):
            open_model(write_folder(tmp_path, tensors))


def test_the_vocabulary_must_fit(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"shape: \(40, 64\), not \(39, 64\)"):
        open_model(write_folder(tmp_path, vocab_size=39))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "model.layers.0.extra.weight", "x"]
)
def test_a_tensor_without_a_place_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match=name):
        open_model(write_folder(tmp_path, numbers() | {name: np.zeros((96, 64), np.float32)}))


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = numbers()
    tensors["model.layers.01.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelFileError, match="twice"):
        open_model(write_folder(tmp_path, tensors))


def test_known_and_not_needed_is_left_out(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16)}  # float64: a type without a format
    same_values(open_model(write_folder(tmp_path, numbers() | extra)), numbers())


def test_a_needed_tensor_of_another_type_is_unsupported(tmp_path: Path) -> None:
    tensors = numbers()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
    with pytest.raises(UnsupportedModel, match="F64.*model.norm.weight"):
        open_model(write_folder(tmp_path, tensors))


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05}-of-00003.safetensors"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard(write_folder(tmp_path, shards=3), 2).unlink()
    with pytest.raises(ModelFileError, match="00002-of-00003.*missing.*tensor"):
        open_model(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_truncated_shard_is_named(tmp_path: Path, keep: int) -> None:
    path = shard(write_folder(tmp_path, shards=3), 2)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match="00002-of-00003.*cut short"):
        open_model(tmp_path)


def test_a_tensor_cut_after_opening_is_named(tmp_path: Path) -> None:
    model = open_model(write_folder(tmp_path))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ModelFileError, match="model.*weight.*cut short"):
        for name in model.weights:
            model.weights[name]


def change_index(folder: Path, **changes) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    path.write_text(json.dumps(index))


def test_the_index_names_a_tensor_its_shard_lacks(tmp_path: Path) -> None:
    change_index(write_folder(tmp_path, shards=3), extra=shard(tmp_path, 2).name)
    with pytest.raises(ModelFileError, match="00002.*'extra'"):
        open_model(tmp_path)


def test_the_index_names_a_file_elsewhere(tmp_path: Path) -> None:
    for elsewhere in ("../model.safetensors", "/etc/passwd", "..", ""):
        change_index(write_folder(tmp_path, shards=3), extra=elsewhere)
        with pytest.raises(ModelFileError, match="not in the folder|missing" if elsewhere in ("", "..") else "not in the folder"):
            open_model(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    first, second = (load_file(shard(write_folder(tmp_path, shards=3), n)) for n in (1, 2))
    save_file(second | {min(first): first[min(first)]}, shard(tmp_path, 2))
    with pytest.raises(ModelFileError, match=f"{min(first)}.*too"):
        open_model(tmp_path)


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    write_folder(tmp_path, shards=3)
    (tmp_path / "other.safetensors").write_bytes(b"nothing of ours")
    same_values(open_model(tmp_path), numbers())


def test_shards_without_an_index_are_no_model(tmp_path: Path) -> None:
    write_folder(tmp_path, shards=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelFileError, match="neither.*00001-of-00003"):
        open_model(tmp_path)


def file(header: object, data: bytes = b"\0" * 64, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape=(4, 4), offsets=(0, 64), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DEFECTS = {
    "empty": b"",
    "header beyond the file": file({}, length=1 << 40),
    "no JSON": file(b"{nonsense"),
    "deep JSON": file(b"[" * 200_000),
    "a huge number": file(b'{"a": ' + b"9" * 5000 + b"}"),
    "no object": file([1]),
    "not UTF-8": file(b'{"\xff": 1}'),
    "a tensor twice": file(
        b'{"a": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}, "a": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    ),
    "entry no object": file({"a": 5}),
    "no shape": file({"a": {"dtype": "F32", "data_offsets": [0, 64]}}),
    "negative shape": file({"a": entry((-4, -4))}),
    "float shape": file({"a": entry((4.0, 4))}),
    "bool shape": file({"a": entry((True, 16))}),
    "wrapping shape": file({"a": entry((1 << 32, 1 << 32), (0, 0))}),
    "offsets turned": file({"a": entry((0,), (8, 4), "F6_NEW")}),
    "three offsets": file({"a": entry(offsets=(0, 64, 64))}),
    "beyond the file": file({"a": entry((5, 4), (0, 80))}),
    "far beyond": file({"a": entry((4, 4), (1 << 70, (1 << 70) + 64))}),
    "size does not fit": file({"a": entry((4, 3))}),
    "overlap": file({"a": entry((8,), (0, 32)), "b": entry((8,), (28, 60))}),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_malformed_files(tmp_path: Path, defect: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DEFECTS[defect])
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match="model.safetensors"):
            safetensors.read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 200_000 + 40 * len(DEFECTS[defect])
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', "\xff"])
def test_a_broken_config(tmp_path: Path, text: str) -> None:
    write_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileError, match="config.json"):
        open_model(tmp_path)


def test_no_config_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="config.json"):
        open_model(tmp_path)
    with pytest.raises(ModelNotFound, match="nowhere"):
        open_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "head_dim", "vocab_size", "num_attention_heads", "intermediate_size"]
)
@pytest.mark.parametrize("value", [10**6, 10**15, 0, -1, "many", 1.5, [1], None])
def test_sizes_that_cannot_be_meant(tmp_path: Path, key: str, value: object) -> None:
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {key: value}))
    if (key, value) == ("head_dim", None):  # may be missing: then it is another
        value = 16
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError):
            open_model(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes", [{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, {"architectures": None, "model_type": None}]
)
def test_an_unsupported_architecture_lists_the_supported(tmp_path: Path, changes: dict) -> None:
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM.*qwen3") as caught:
        open_model(write_folder(tmp_path, **changes))
    assert ("MambaForCausalLM" if changes["model_type"] else "the config names no architecture") in caught.value.what


@pytest.mark.parametrize("value", ["x", 1.5, True, {}, [[1]], [None], float("inf")], ids=str)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_ids_are_ids(tmp_path: Path, file: str, value: object) -> None:
    folder = write_folder(tmp_path / "model")
    config = json.loads((folder / file).read_text()) if file == "config.json" else {}
    (folder / file).write_text(json.dumps(config | {"eos_token_id": value}))
    with pytest.raises(ModelFileError, match="eos_token_id"):
        eos_ids(open_model(folder), SimpleNamespace(eos_ids=frozenset()), 40)
    (folder / file).write_text(json.dumps(config | {"eos_token_id": [3, 99, -1]}))
    assert eos_ids(open_model(folder), SimpleNamespace(eos_ids=frozenset({5})), 40) == {3, 5}


def test_lines_of_a_tensor_are_those_of_the_whole(tmp_path: Path) -> None:
    """In another process, too: of a folder, and of a GGUF file whose heads are put in order."""
    folder = open_model(write_folder(tmp_path / "folder"))
    file = open_model(write_gguf(tmp_path / "a.gguf", types={"lm_head.weight": Type.Q4_1}))
    for model in (folder, file):
        assert "head" in model.weights and "tail" not in model.weights
        model.weights["head"]  # opens the file
        weights = pickle.loads(pickle.dumps(model.weights))
        for name, first, count in (
            ("head", 7, 20), ("embedding", 39, 1), ("final_norm", 3, 61), ("layers.1.attention.q", 32, 64),
            ("layers.0.attention.k", 32, 32),
        ):  # fmt: skip
            part, whole = weights.lines(name, first, count), model.weights[name]
            assert part.info.shape == (count, *whole.info.shape[1:]) and part.info.format == whole.info.format
            for plane, values in part.planes.items():
                np.testing.assert_array_equal(values, whole.planes[plane][first : first + count])
        weights.close()
        model.close()
