"""`.nano` files: what was converted reads back as it was; what is damaged says so."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from nano_vllm.conversion import convert_model
from nano_vllm.errors import ModelFileError, OptionError, UnsupportedModel
from nano_vllm.model.weights import open_model
from nano_vllm.sources import nano

from . import models

KINDS = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0]


@pytest.fixture
def gguf_path(tmp_path):
    """Matrices in every type that 64 columns allow, and a tokenizer's lists."""
    types = {name: KINDS[i % len(KINDS)] for i, (name, v) in enumerate(models.numbers().items()) if v.ndim == 2}
    lists = {"tokenizer.ggml.model": "none", "tokenizer.ggml.tokens": [f"t{i}é" for i in range(40)]}
    lists |= {"tokenizer.ggml.scores": [i / 3 for i in range(40)], "general.name": "of a test"}
    return models.write_gguf(tmp_path / "model.gguf", types=types, **lists)


@pytest.fixture
def path(gguf_path):
    return convert_model(gguf_path, gguf_path.with_name("model.nano"))


def same_model(path, other) -> None:
    one, two = open_model(path), open_model(other)
    assert one.spec == two.spec and one.generation_config == two.generation_config
    assert list(one.weights) == list(two.weights)
    for name, tensor in two.weights.items():
        got = one.weights[name]
        if len(tensor.info.shape) == 2:
            assert got.info == tensor.info == one.weights.infos[name]
            assert set(got.planes) == set(tensor.planes)
            for plane, values in tensor.planes.items():
                np.testing.assert_array_equal(got.planes[plane], values, err_msg=f"{name} {plane}")
        else:
            assert got.info.format == "f32"
            np.testing.assert_array_equal(got.unpack(), tensor.unpack(), err_msg=name)


def test_a_gguf_file_reads_back_as_it_was(gguf_path, path):
    same_model(path, gguf_path)
    made, original = open_model(path), open_model(gguf_path)
    assert made.metadata.keys() == original.metadata.keys()
    assert made.metadata["tokenizer.ggml.tokens"] == original.metadata["tokenizer.ggml.tokens"]
    np.testing.assert_array_equal(np.float32(made.metadata["tokenizer.ggml.scores"]), original.metadata["tokenizer.ggml.scores"])


@pytest.mark.parametrize("shards, tied", [(0, False), (2, True)])
def test_a_folder_reads_back_as_it_was(tmp_path, shards, tied):
    tensors = models.numbers()
    if tied:
        del tensors["lm_head.weight"]
    folder = models.write_folder(tmp_path / "model", tensors, shards, tie_word_embeddings=tied)
    (folder / "generation_config.json").write_text('{"temperature": 0.25}')
    (folder / "tokenizer.json").write_text('{"a": "é"}')
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (folder / "tokenizer_config.json").write_text("")  # nothing to carry along
    made = convert_model(folder, tmp_path / "m.nano")
    same_model(made, folder)
    opened = open_model(made)
    assert opened.metadata is None and opened.generation_config == {"temperature": 0.25}
    assert opened.files.read("tokenizer.json") == '{"a": "é"}'.encode() and opened.files.read("chat_template.jinja") == b"{{ x }}"
    assert opened.files.read("tokenizer_config.json") is None


def test_a_nano_file_is_converted_to_itself(path):
    again = convert_model(path, path.with_name("again.nano"))
    same_model(again, path)
    assert nano.read_header(again).hash == nano.read_header(path).hash


def test_the_hash_tells_models_apart(path, tmp_path):
    other = models.numbers()
    other["model.layers.1.mlp.up_proj.weight"][5, 7] += 1
    one, two = (models.write_gguf(tmp_path / f"{i}.gguf", t) for i, t in enumerate((models.numbers(), other)))
    hashes = [nano.read_header(convert_model(p, p.with_suffix(".nano"))).hash for p in (one, two)]
    assert hashes[0] != hashes[1]


def test_places_are_what_the_file_holds(path, gguf_path):
    from nano_vllm.sources import _n32

    weights, content = open_model(path).weights, path.read_bytes()
    for name, tensor in weights.items():
        place = weights.place(name)
        stored = np.frombuffer(content, np.uint8, place.nbytes, place.offset)
        assert place.path == path and place.offset % 64 == 0 and (place.nbytes < 65536 or place.offset % 4096 == 0)
        matrix = len(tensor.info.shape) == 2
        expected = _n32.pack(tensor).reshape(-1) if matrix else tensor.planes["values"].view(np.uint8)
        np.testing.assert_array_equal(stored, expected)
    assert open_model(gguf_path).weights.place("embedding") is None


def test_large_tensors_begin_a_sector(tmp_path):
    tensors = models.numbers() | {"model.embed_tokens.weight": np.ones((400, 64), np.float32)}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    folder = models.write_folder(tmp_path / "m", tensors, vocab_size=400)
    weights = open_model(convert_model(folder, tmp_path / "m.nano")).weights
    assert weights.place("head").nbytes > 65536 and weights.place("head").offset % 4096 == 0


@pytest.mark.parametrize("first, count", [(0, 1), (0, 32), (31, 2), (5, 40), (64, 32), (95, 1), (0, 96)])
def test_lines_are_rows_of_the_whole(path, first, count):
    weights = open_model(path).weights
    for name in ("layers.0.mlp.gate", "layers.1.mlp.up"):
        part, whole = weights.lines(name, first, count), weights[name]
        assert part.info.shape == (count, 64)
        np.testing.assert_array_equal(part.unpack(), whole.unpack()[first : first + count])
    np.testing.assert_array_equal(weights.lines("final_norm", 3, 9).unpack(), weights["final_norm"].unpack()[3:12])


def test_verify_names_what_is_damaged(path):
    header = nano.read_header(path)
    nano.verify(header)
    content = bytearray(path.read_bytes())
    tensor = header.tensors["layers.1.mlp.down"]
    content[tensor.offset + tensor.nbytes // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="layers.1.mlp.down"):
        nano.verify(nano.read_header(path))


def test_a_damaged_tokenizer_is_noticed_when_it_is_read(path):
    header, content = nano.read_header(path), bytearray(path.read_bytes())
    content[header.parts[nano.METADATA].offset + 10] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="metadata.json"):
        open_model(path)


def test_a_newer_version_says_so(path):
    content = bytearray(path.read_bytes())
    content[8] = 2
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match="version 2.*reads version 1.*Update"):
        open_model(path)


def test_every_cut_and_every_changed_byte_of_the_header_is_noticed(path):
    content, header = path.read_bytes(), nano.read_header(path)
    start = int.from_bytes(content[16:24], "little")
    for size in (8, 63, 64, 4096, start, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ModelFileError):
            open_model(path)
    rng = np.random.default_rng(0)
    places = [*range(8, 12), *range(16, 48), *rng.integers(start, len(content), 200).tolist()]
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        with pytest.raises((ModelFileError, UnsupportedModel)):
            open_model(path)
    path.write_bytes(content)
    assert nano.read_header(path) == header


def rewritten(path, change) -> None:
    """The file with a header that `change` made of its own, with the right checksum."""
    import hashlib

    content = path.read_bytes()
    start = int.from_bytes(content[16:24], "little")
    header = json.loads(content[start:])
    text = json.dumps(change(header) or header).encode()
    head = nano.HEAD.pack(nano.MAGIC, 1, 0, start, len(text), hashlib.blake2b(text, digest_size=16).digest())
    path.write_bytes(head + content[len(head) : start] + text)


UP = "layers.0.mlp.up"
CRAFTED = [
    lambda h: [1],
    lambda h: h["tensors"].update({UP: 7}),
    lambda h: h["tensors"][UP].update(shape=[2**62, 2**62]),
    lambda h: h["tensors"][UP].update(shape=[96, 64, 1]),
    lambda h: h["tensors"][UP].update(shape=[96, -64]),
    lambda h: h["tensors"][UP].update(shape=[96, 64.0]),
    lambda h: h["tensors"][UP].update(shape=[95, 63]),
    lambda h: h["tensors"][UP].update(format="q3"),
    lambda h: h["tensors"][UP].update(format=["q4"]),
    lambda h: h["tensors"][UP].update(group=7),
    lambda h: h["tensors"][UP].update(group="32"),
    lambda h: h["tensors"][UP].update(offset=-64),
    lambda h: h["tensors"][UP].update(offset=0),
    lambda h: h["tensors"][UP].update(offset=2**70),
    lambda h: h["tensors"][UP].update(offset=h["tensors"][UP]["offset"] + 1),
    lambda h: h["tensors"][UP].update(offset=h["tensors"]["embedding"]["offset"]),
    lambda h: h["tensors"][UP].update(nbytes=1),
    lambda h: h["tensors"][UP].pop("blake2b"),
    lambda h: h["tensors"].pop(UP) and None,
    lambda h: h["tensors"].update(more=h["tensors"][UP] | {"offset": 2**40}),
    lambda h: h["parts"]["metadata.json"].update(offset=64),
    lambda h: h["parts"]["metadata.json"].update(nbytes=2**50),
    lambda h: h.update(parts=[]),
    lambda h: h.update(config="x"),
    lambda h: h["config"].update(num_hidden_layers=10**6),
    lambda h: h["config"].pop("architectures") and h["config"].pop("model_type") and None,
]


@pytest.mark.parametrize("change", range(len(CRAFTED)))
def test_a_crafted_header_is_refused(path, change):
    def changed(header):
        made = CRAFTED[change](header)
        return made if isinstance(made, list) else None

    rewritten(path, changed)
    with pytest.raises((ModelFileError, UnsupportedModel)) as error:
        open_model(path)
    assert str(path) in str(error.value) or "config" in str(error.value)


def test_another_layout_is_refused(path):
    rewritten(path, lambda h: h.update(layout="n64"))
    with pytest.raises(UnsupportedModel, match="n64"):
        open_model(path)


def test_an_attempt_that_was_broken_off_is_taken_up(gguf_path, monkeypatch):
    from nano_vllm.sources import nano_writer

    whole = convert_model(gguf_path, gguf_path.with_name("whole.nano")).read_bytes()
    made, written = gguf_path.with_name("m.nano"), []
    write = nano_writer.Writer.write

    def counted(self, name, pieces):
        if len(written) == 7:
            raise KeyboardInterrupt
        write(self, name, pieces)
        written.append(name)

    monkeypatch.setattr(nano_writer.Writer, "write", counted)
    with pytest.raises(KeyboardInterrupt):
        convert_model(gguf_path, made)
    assert not made.exists() and len(written) == 7
    partial = made.with_name("m.nano.partial")
    content = bytearray(partial.read_bytes())
    content[4096] ^= 1  # of the first tensor: it must be written again
    partial.write_bytes(content)
    monkeypatch.setattr(nano_writer.Writer, "write", lambda self, name, pieces: (write(self, name, pieces), written.append(name)))
    convert_model(gguf_path, made)
    names = list(open_model(made).weights)
    assert written == names[:7] + names[:1] + names[7:]
    assert made.read_bytes() == whole and sorted(p.name for p in made.parent.glob("m.nano*")) == ["m.nano"]


def test_another_model_takes_nothing_up(gguf_path, monkeypatch):
    from nano_vllm.sources import nano_writer

    made, write = gguf_path.with_name("m.nano"), nano_writer.Writer.write
    monkeypatch.setattr(nano_writer.Writer, "finish", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert_model(gguf_path, made)
    monkeypatch.undo()
    other = models.numbers()
    for values in other.values():
        values += 1
    types = {name: KINDS[i % len(KINDS)] for i, (name, v) in enumerate(models.numbers().items()) if v.ndim == 2}
    models.write_gguf(gguf_path, other, types)
    written = []
    monkeypatch.setattr(nano_writer.Writer, "write", lambda self, name, pieces: (write(self, name, pieces), written.append(name)))
    convert_model(gguf_path, made)
    assert written == list(open_model(made).weights)
    same_model(made, gguf_path)


def test_what_is_there_is_kept_unless_forced(gguf_path, path):
    before = path.read_bytes()
    with pytest.raises(OptionError, match="is there already.*--force"):
        convert_model(gguf_path, path)
    assert path.read_bytes() == before
    convert_model(gguf_path, path, force=True)
    with pytest.raises(OptionError, match="the model itself"):
        convert_model(path, path, force=True)
    with pytest.raises(OptionError, match="model.nano"):
        convert_model(gguf_path, gguf_path.with_name("model.bin"))


def test_a_folder_that_cannot_be_written_says_so(gguf_path):
    with pytest.raises(ModelFileError, match="cannot write"):
        convert_model(gguf_path, gguf_path.parent / "none" / "m.nano")


def test_info_compares_checksums_when_asked(path, gguf_path, capsys):
    from nano_vllm import cli

    asked = ["info", str(path), "--verify", "--backend", "reference", "--num-blocks", "1"]
    assert cli.main(asked) == 0 and "of 21 tensors and 1 texts are right" in capsys.readouterr().out
    content, tensor = bytearray(path.read_bytes()), nano.read_header(path).tensors["head"]
    content[tensor.offset + 5] ^= 16
    path.write_bytes(content)
    assert cli.main(asked) == 1 and "the checksum of 'head' is wrong" in capsys.readouterr().err
    assert cli.main(["info", str(gguf_path), "--verify"]) == 2 and "has no checksums" in capsys.readouterr().err


def test_the_command_converts(gguf_path, capsys):
    from nano_vllm import cli

    made = gguf_path.with_name("by-command.nano")
    assert cli.main(["convert", str(gguf_path), str(made)]) == 0 and capsys.readouterr().out == f"{made}\n"
    same_model(made, gguf_path)
    assert cli.main(["convert", str(gguf_path), str(made)]) == 2 and "is there already" in capsys.readouterr().err


def test_a_folder_with_one_nano_file_is_it(path, gguf_path):
    from nano_vllm.sources.resolve import resolve

    gguf_path.unlink()
    assert resolve(str(path.parent)) == path
