"""GGUF files against what the `gguf` package writes and reads, and files with each defect."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from nano_vllm.errors import ModelFileError, ModelNotFound, UnsupportedModel
from nano_vllm.model.weights import half_split, open_model
from nano_vllm.sources import gguf_config
from nano_vllm.sources.gguf import TYPES, read, read_header

from . import ggml
from .models import CONFIG, interleaved, numbers, same_values, write_gguf

LISTS = {
    "plain": [f"token{i}" for i in range(5000)],
    "one": ["a"],
    "one empty": [""],
    "all empty": [""] * 3000,
    "some empty": ["" if i % 7 == 0 else f"t{i}" for i in range(3000)],
    "first empty": ["", *(f"t{i}" for i in range(100))],
    "zeros inside": [f"\0{i}\0\0\0\0\0\0\0\0\0" for i in range(2000)],
    "zeros only": ["\0" * (i % 20) for i in range(500)],
    "long": ["x" * n for n in (1, 255, 256, 257, 65535, 65536, 70000, 3)],
    "letters beyond ASCII": ["Ġé", "日本語", "😀👩‍👩‍👧", "щё", "ÿ" * 200] * 300,
    "looks like lengths": [chr(i % 128) + "\0" * (i % 9) + chr(1 + i % 90) for i in range(3000)],
    "longer than the first read": ["abcdefgh" * 30] * 40_000,
}


def write(path: Path, **values: object) -> Path:
    """A file without tensors and with `values` as metadata: a list of strings, a string, or an array of numbers."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", LISTS)
def test_lists_of_strings(tmp_path: Path, case: str) -> None:
    wanted = LISTS[case]
    found = read_header(write(tmp_path / "a.gguf", before="x", list=wanted, after="\0é")).metadata
    assert found["list"] == wanted and isinstance(found["list"], list)
    assert (found["before"], found["after"]) == ("x", "\0é")


def test_numbers_of_every_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    values = {
        "uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 2**32 - 1, "int32": -(2**31), "uint64": 2**64 - 1,
        "int64": -(2**63), "float32": 0.1, "float64": 0.1, "bool": True,
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
        writer.add_key_value(f"{kind}s", [value] * 3, gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType[kind.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_header(tmp_path / "a.gguf").metadata
    values["float32"] = float(np.float32(0.1))
    for kind, value in values.items():
        assert found[kind] == value and type(found[kind]) is type(value)
        array = found[f"{kind}s"]
        assert array.dtype == np.dtype(kind) and array.tolist() == [value] * 3


KINDS = (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0)
SHAPES = [(1, 32), (7, 96), (33, 1056), (1200, 1024), (64,), (3, 5, 64)]
CASES = [(kind, shape) for kind in KINDS for shape in SHAPES]
CASES += [(kind, shape) for kind in ggml.SUPER for shape in [(1, 256), (7, 768), (1200, 1024), (256,), (3, 5, 256)]]


@pytest.mark.parametrize(("kind", "shape"), CASES, ids=str)
def test_tensors_of_every_type(tmp_path: Path, kind: Type, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    path = write_gguf(tmp_path / "a.gguf", {"first": np.ones(5, np.float32), "w": values}, {"w": kind})
    header, theirs = read_header(path), {t.name: t for t in gguf.GGUFReader(path).tensors}
    entry = header.tensors["w"]
    assert (entry.type, entry.shape, entry.nbytes) == (kind.name, shape, theirs["w"].n_bytes)
    assert entry.offset == theirs["w"].data_offset
    with open(path, "rb", buffering=0) as file:
        tensor = read(file, entry, "w")
    assert tensor.info.nbytes == sum(p.nbytes for p in tensor.planes.values())
    more = {Type.Q5_0: 17 / 11}.get(kind, 1.03 if kind in ggml.SUPER else 1)
    assert entry.nbytes <= tensor.info.nbytes <= more * entry.nbytes
    np.testing.assert_array_equal(tensor.unpack(), gguf.dequantize(theirs["w"].data, kind).reshape(shape))


def test_names_of_types_are_ggmls() -> None:
    assert {number: name for number, name in TYPES.items() if name not in ("Q4_2", "Q4_3")} | {} == {
        number: name for number, name in TYPES.items() if number in Type._value2member_map_
    }
    for kind in Type:
        assert TYPES.get(kind.value, kind.name) == kind.name


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_a_model_of_every_type(tmp_path: Path, kind: Type) -> None:
    types = {name: kind for name, values in numbers().items() if values.ndim == 2}
    model = open_model(write_gguf(tmp_path / "a.gguf", types=types))
    wanted = {n: gguf.dequantize(gguf.quantize(v, types[n]), types[n]) if n in types else v for n, v in numbers().items()}
    same_values(model, wanted)
    assert model.metadata["general.architecture"] == "llama" and model.generation_config == {}
    model.close()


def test_any_super_blocks_that_a_file_may_have(tmp_path: Path) -> None:
    for kind in ggml.SUPER:
        raw = np.random.default_rng(kind).integers(0, 256, (64, 4, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        for at in {Type.Q6_K: (208,)}.get(kind, (0, 2)):  # float16 without infinities: their products have no agreed NaN
            raw[..., at + 1] &= 0xBF
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
        writer.add_tensor("w", raw.reshape(64, -1), raw_dtype=kind)
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
            write()
        with open(tmp_path / "a.gguf", "rb", buffering=0) as file:
            tensor = read(file, read_header(tmp_path / "a.gguf").tensors["w"], "w")
        wanted = gguf.dequantize(raw.reshape(64, -1), kind)
        np.testing.assert_array_equal(tensor.unpack().view(np.uint32), wanted.view(np.uint32))


def test_a_model_of_mixed_super_blocks(tmp_path: Path) -> None:
    """As Q4_K_M files have them, and the rows of q and k in the order of llama's files."""
    config = CONFIG | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    types = {n: Type.Q6_K if "v_proj" in n or "down" in n else Type.Q4_K for n, v in numbers(config).items() if v.ndim == 2}
    types["model.layers.1.self_attn.k_proj.weight"] = Type.Q5_K
    sizes = {"embedding_length": 256, "feed_forward_length": 512, "rope__dimension_count": 64}
    sizes |= {"attention__key_length": 64, "attention__value_length": 64}
    changes = {f"llama__{key}": size for key, size in sizes.items()}
    model = open_model(write_gguf(tmp_path / "a.gguf", numbers(config), types, **changes))
    wanted = numbers(config)
    same_values(model, wanted | {n: gguf.dequantize(ggml.quantize(wanted[n], kind), kind) for n, kind in types.items()})
    assert {info.format for info in model.weights.infos.values()} == {"f32", "q4_k", "q5_k", "q6_k"}
    model.close()


def test_version_2(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    raw = bytearray(path.read_bytes())
    raw[4] = 2
    path.write_bytes(raw)
    assert read_header(path).version == 2
    same_values(open_model(path), numbers())


def test_rows_go_back_to_half_split_order() -> None:
    """Scores of interleaved rotation on a file's rows are those of half-split rotation on ours."""
    heads, size = 3, 8
    rng = np.random.default_rng(1)
    q = rng.standard_normal((heads * size, 16))
    order, stored = half_split(heads, size), interleaved(q, heads)
    np.testing.assert_array_equal(stored[order], q)
    angles = rng.standard_normal(size // 2)
    cos, sin = np.cos(angles), np.sin(angles)
    x = rng.standard_normal(16)
    mine, theirs = (stored[order] @ x).reshape(heads, size), (stored @ x).reshape(heads, size)
    first, second = mine[:, : size // 2], mine[:, size // 2 :]
    turned = np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1)
    even, odd = theirs[:, ::2], theirs[:, 1::2]
    pairs = np.stack((even * cos - odd * sin, odd * cos + even * sin), axis=-1).reshape(heads, size)
    np.testing.assert_allclose((turned**2).sum(1), (pairs**2).sum(1))
    np.testing.assert_allclose(turned.reshape(-1), pairs.reshape(-1)[order])


def test_rows_go_back_as_transformers_has_it() -> None:
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    stored = np.random.default_rng(2).standard_normal((6 * 10, 4))
    theirs = LlamaTensorProcessor()._reverse_permute_weights(stored, 6, 6)
    np.testing.assert_array_equal(stored[half_split(6, 10)], theirs)


def test_other_architectures_keep_their_rows(tmp_path: Path) -> None:
    tensors = numbers()
    for i in range(2):
        for part, rows in (("q", 128), ("k", 64), ("v", 64)):
            tensors[f"model.layers.{i}.self_attn.{part}_proj.bias"] = np.arange(rows, dtype=np.float32)
    same_values(open_model(write_gguf(tmp_path / "a.gguf", tensors, arch="qwen2")), tensors)


def test_biases_of_llama_go_back_too(tmp_path: Path) -> None:
    tensors = numbers()
    for i in range(2):
        for part, rows in (("q", 128), ("k", 64), ("v", 64), ("o", 64)):
            tensors[f"model.layers.{i}.self_attn.{part}_proj.bias"] = np.arange(rows, dtype=np.float32)
    model = open_model(write_gguf(tmp_path / "a.gguf", tensors))
    assert model.config["attention_bias"]
    same_values(model, tensors)


def test_no_output_is_tied(tmp_path: Path) -> None:
    tensors = {name: values for name, values in numbers().items() if name != "lm_head.weight"}
    model = open_model(write_gguf(tmp_path / "a.gguf", tensors))
    assert model.spec.tied
    same_values(model, tensors)


@pytest.mark.parametrize("name", [n for n in numbers() if n != "lm_head.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = {n: values for n, values in numbers().items() if n != name}
    with pytest.raises(ModelFileError, match="token_embd" if "embed" in name else "no tensor for"):
        open_model(write_gguf(tmp_path / "a.gguf", tensors))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("blk.0.attn_qkv.weight", "does not know"),
        ("blk.7.attn_q.weight", "block_count is 2, tensors are of 3"),
        ("blk.1.attn_q_norm.weight", "no place for"),
        ("v.patch_embd.weight", "does not know"),
    ],
)
def test_a_tensor_without_a_place_is_named(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(ModelFileError, match=why):
        open_model(write_gguf(tmp_path / "a.gguf", numbers() | {name: np.zeros(64, np.float32)}))


def test_config_in_hugging_faces_spelling(tmp_path: Path) -> None:
    found = gguf_config.config(read_header(write_gguf(tmp_path / "a.gguf")))
    assert found == {
        "model_type": "llama", "architectures": ["llama"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "rms_norm_eps": float(np.float32(1e-5)),
        "rope_theta": 10000.0, "max_position_embeddings": 128, "vocab_size": 40, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
    }  # fmt: skip


def test_config_of_rotary_scaling(tmp_path: Path) -> None:
    def scaling(tensors: dict | None = None, **changes) -> dict:
        return gguf_config.config(read_header(write_gguf(tmp_path / "a.gguf", tensors, **changes))).get("rope_scaling")

    assert scaling(llama__rope__scaling__type="none") is None
    assert scaling(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0) == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    assert scaling(llama__rope__scale_linear=2.0) == {"rope_type": "linear", "factor": 2.0}
    yarn = {
        "llama__rope__scaling__type": "yarn",
        "llama__rope__scaling__factor": 4.0,
        "llama__rope__scaling__original_context_length": 32,
    }
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert scaling(**yarn) == wanted
    assert scaling(**yarn, llama__rope__scaling__yarn_beta_fast=16.0) == wanted | {"beta_fast": 16.0}
    factor = scaling(**yarn, llama__rope__scaling__attn_factor=0.5)["attention_factor"]
    assert factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    assert scaling(numbers() | {"rope_freqs.weight": factors}) == {"rope_type": "factors", "factors": tuple(factors.tolist())}
    with pytest.raises(UnsupportedModel, match="longrope"):
        scaling(llama__rope__scaling__type="longrope")
    with pytest.raises(ModelFileError, match="scaling.type"):
        scaling(llama__rope__scaling__type=[1, 2])
    with pytest.raises(ModelFileError, match="scaling.factor"):
        scaling(llama__rope__scaling__type="linear")
    model = open_model(write_gguf(tmp_path / "b.gguf", numbers() | {"rope_freqs.weight": factors}))
    plain = open_model(write_gguf(tmp_path / "a.gguf"))
    ratio = np.divide(*(m.spec.layers[0].attention.rope.frequencies for m in (plain, model)))
    np.testing.assert_allclose(ratio, factors, rtol=1e-6)
    same_values(model, numbers())


def test_rotation_of_a_part_of_the_head_is_told(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", llama__rope__dimension_count=16)
    assert gguf_config.config(read_header(path))["partial_rotary_factor"] == 0.5
    with pytest.raises(UnsupportedModel, match="part of each head"):
        open_model(path)


def test_counts_given_per_layer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", llama__attention__head_count_kv=[2, 2])
    assert gguf_config.config(read_header(path))["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedModel, match="head_count_kv"):
        open_model(write_gguf(path, llama__attention__head_count_kv=[2, 1]))


NEEDED = ["embedding_length", "block_count", "attention.head_count", "feed_forward_length", "context_length"]


@pytest.mark.parametrize("key", [*NEEDED, "attention.layer_norm_rms_epsilon"])
@pytest.mark.parametrize("value", [None, 0, 10**6, 2**32 - 1, "many", float("nan"), []], ids=str)
def test_a_key_that_is_missing_or_cannot_be_meant(tmp_path: Path, key: str, value: object) -> None:
    if (
        key == "attention.layer_norm_rms_epsilon"
        and isinstance(value, int)
        and value
        or (key, value) == ("context_length", 10**6)
    ):
        return
    if value == []:
        value = ["a"]
    path = write_gguf(tmp_path / "a.gguf", **{f"llama.{key}".replace(".", "__"): value})
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError):
            open_model(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * path.stat().st_size
    finally:
        tracemalloc.stop()


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    for key in NEEDED:
        with pytest.raises(ModelFileError, match=f"llama.{key}"):
            open_model(write_gguf(tmp_path / "a.gguf", **{f"llama.{key}".replace(".", "__"): None}))


def test_unsupported_is_told_from_the_header(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'rwkv7'.*llama"):
        open_model(write_gguf(tmp_path / "a.gguf", arch="rwkv7"))
    path = tmp_path / "b.gguf"
    path.write_bytes(header(tensors=(tensor(shape=(256, 4), kind=Type.Q3_K),), data=4096))
    with pytest.raises(UnsupportedModel, match="Q3_K.*'w'.*Q8_0"):
        open_model(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        read_header(tmp_path / "nothing.gguf")


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def header(
    *entries: bytes, tensors: tuple[bytes, ...] = (), counts: tuple[int, int] | None = None, version: int = 3, data: int = 256
) -> bytes:
    """A file's bytes; `counts` of tensors and keys where they are to be other than true."""
    body = b"".join(entries) + b"".join(tensors)
    start = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(entries)))) + body
    return start + b"\0" * (-len(start) % 32) + b"\0" * data


def tensor(
    name: str = "w", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0, dimensions: int | None = None
) -> bytes:
    count = len(shape) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, offset)


def number(key: str, kind: int, layout: str, value) -> bytes:
    return text(key) + struct.pack(f"<I{layout}", kind, value)


def array(key: str, kind: int, count: int, data: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", 9, kind, count) + data


DEFECTS = {  # what the error says, and a file's bytes
    "empty": ("letters GGUF", b""),
    "four letters": ("letters GGUF", b"GGUF"),
    "other letters": ("letters GGUF", b"GGML" + header()[4:]),
    "version 1": ("version is 1", header(version=1)),
    "version 4": ("version is 4", header(version=4)),
    "version 0": ("version is 0", header(version=0)),
    "2^63 tensors": ("9223372036854775808 tensors", header(counts=(2**63, 0))),
    "2^64 - 1 keys": ("18446744073709551615 keys", header(counts=(0, 2**64 - 1))),
    "counts that wrap": ("tensors and", header(counts=(2**59, 2**59))),
    "more keys than bytes": ("100 keys", header(counts=(0, 100))),
    "key of 2^48": ("281474976710656 bytes long", header(struct.pack("<Q", 2**48) + b"key", counts=(0, 1))),
    "key of 2^64 - 1": ("18446744073709551615 bytes long", header(struct.pack("<Q", 2**64 - 1), counts=(0, 1))),
    "key not UTF-8": ("not UTF-8", header(text(b"\xff\xfe") + struct.pack("<II", 4, 1))),
    "key twice": ("'a' is there twice", header(number("a", 4, "I", 1), number("a", 4, "I", 1))),
    "unknown type": ("unknown type 13", header(number("a", 13, "I", 1))),
    "string of 2^63": ("cut short", header(text("a") + struct.pack("<IQ", 8, 2**63))),
    "string not UTF-8": ("not UTF-8", header(text("a") + struct.pack("<I", 8) + text(b"\xc3"))),
    "array of 2^62 bytes": ("cut short", header(array("a", 0, 2**62))),
    "array of doubles that wraps": ("cut short", header(array("a", 12, 2**61 + 1))),
    "array of 2^61 strings": ("cut short", header(array("a", 8, 2**61))),
    "array of strings, cut": ("cut short", header(array("a", 8, 5, text("x")), data=0)),
    "string in an array of 2^64 - 1": ("cut short", header(array("a", 8, 2, text("x") + struct.pack("<Q", 2**64 - 1)))),
    "string in an array of 2^63": ("cut short", header(array("a", 8, 3, struct.pack("<Q", 2**63)))),
    "last string beyond the end": ("cut short", header(array("a", 8, 2, text("x") + struct.pack("<Q", 4000)))),
    "string in an array not UTF-8": ("not UTF-8", header(array("a", 8, 2, text("x") + text(b"\xc3")))),
    "letter over two strings": ("not UTF-8", header(array("a", 8, 2, text(b"\xc3") + text(b"\xa9")))),
    "nested array": ("array of arrays", header(array("a", 9, 1, struct.pack("<IQ", 4, 0)))),
    "array of unknown type": ("unknown type 99", header(array("a", 99, 1))),
    "alignment 3": ("alignment is 3", header(number("general.alignment", 4, "I", 3))),
    "alignment 0": ("alignment is 0", header(number("general.alignment", 4, "I", 0))),
    "alignment 2^31": ("alignment is 2147483648", header(number("general.alignment", 4, "I", 2**31))),
    "alignment float": ("alignment is 32.0", header(number("general.alignment", 6, "f", 32.0))),
    "alignment true": ("alignment is True", header(number("general.alignment", 7, "B", 1))),
    "0 dimensions": ("has 0 dimensions", header(tensors=(tensor(shape=()),))),
    "5 dimensions": ("has 5 dimensions", header(tensors=(tensor(shape=(1,) * 5),))),
    "2^32 - 1 dimensions": ("4294967295 dimensions", header(tensors=(tensor(dimensions=2**32 - 1),))),
    "dimension 0": (r"shape \(0, 4\)", header(tensors=(tensor(shape=(4, 0)),))),
    "product wraps to 0": ("ends at byte 73786976294838206", header(tensors=(tensor(shape=(2**32, 2**32)),))),
    "product wraps to 16": ("ends at byte", header(tensors=(tensor(shape=(2**62 + 4, 4)),))),
    "bytes wrap": ("ends at byte", header(tensors=(tensor(shape=(2**62 + 4,)),))),
    "rows not whole blocks": ("blocks of 32", header(tensors=(tensor(shape=(33, 2), kind=8),))),
    "rows not whole super-blocks": ("blocks of 256", header(tensors=(tensor(shape=(128, 2), kind=Type.Q4_K),))),
    "offset beyond the end": ("ends at byte", header(tensors=(tensor(offset=4096),))),
    "offset 2^64 - 32": ("ends at byte 18446744073709551", header(tensors=(tensor(offset=2**64 - 32),))),
    "offset not aligned": ("not aligned", header(tensors=(tensor(offset=4),))),
    "data cut short": ("ends at byte", header(tensors=(tensor(shape=(65,)),))),
    "overlap": ("'a' and 'b' overlap", header(tensors=(tensor("a", (16,)), tensor("b", (16,), offset=32)))),
    "the same bytes": ("overlap", header(tensors=(tensor("a"), tensor("b")))),
    "tensor twice": ("'a' is there twice", header(tensors=(tensor("a"), tensor("a", offset=32)))),
    "directory cut": ("cut short|2 tensors", header(tensors=(tensor("a"),), counts=(2, 0), data=0)),
    "no architecture": ("general.architecture", header(tensors=(tensor("a"),))),
    "architecture a number": ("general.architecture", header(number("general.architecture", 4, "I", 1), tensors=(tensor("a"),))),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_malformed_files(tmp_path: Path, defect: str) -> None:
    why, raw = DEFECTS[defect]
    path = tmp_path / "a.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=f"a.gguf.*({why})"):
            gguf_config.architecture(read_header(path))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_empty_arrays(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(
        header(array("a", 8, 0), array("b", 5, 0), text("c") + struct.pack("<I", 8) + text(""), data=0)
    )
    found = read_header(tmp_path / "a.gguf").metadata
    assert found["a"] == [] and found["b"].size == 0 and found["c"] == ""


def test_big_endian_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(UnsupportedModel, match="big endian"):
        read_header(tmp_path / "a.gguf")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    raw = write_gguf(tmp_path / "a.gguf", {"w": np.ones(64, np.float32)}, list=["a", "bc", ""]).read_bytes()
    # the writer pads the end of the data; the tensor itself ends before
    end = read_header(tmp_path / "a.gguf").tensors["w"]
    for keep in range(end.offset + end.nbytes):
        (tmp_path / "a.gguf").write_bytes(raw[:keep])
        with pytest.raises(ModelFileError):
            read_header(tmp_path / "a.gguf")


def test_a_tensor_cut_after_opening_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", types={"lm_head.weight": Type.Q4_0})
    model = open_model(path)
    path.write_bytes(path.read_bytes()[:3000])
    for name in ("head", "layers.1.mlp.down"):
        with pytest.raises(ModelFileError, match="weight.*cut short"):
            model.weights[name]
