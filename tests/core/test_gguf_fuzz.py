"""Damaged headers of a small real file: only typed errors, in bounded memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_vllm.errors import ModelFileError, UnsupportedModel
from nano_vllm.model.weights import open_model
from nano_vllm.sources.gguf import read_header

from .models import numbers, write_gguf

INTERESTING = st.sampled_from([0, 1, 2, 8, 9, 13, 31, 32, 127, 128, 254, 255])
WORDS = st.sampled_from([n.to_bytes(8, "little") for n in (0, 1, 2**16, 2**31, 2**32, 2**48, 2**61, 2**63, 2**64 - 1)])


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """A folder to write in, a sound file's bytes, and where its header ends."""
    folder = tmp_path_factory.mktemp("fuzz")
    tokens = [f"<{i}>" for i in range(40)]
    changes = {
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__scores": [0.5] * 40,
        "tokenizer__chat_template": "{{ messages }}",
    }
    path = write_gguf(folder / "sound.gguf", numbers(), **changes)
    for _ in range(2):  # what is loaded on first use is not the header's memory
        open_model(path)
    return folder, path.read_bytes(), min(t.offset for t in read_header(path).tensors.values())


@st.composite
def damages(draw) -> list[tuple[str, float, bytes]]:
    kind = st.sampled_from(["set", "word", "insert", "remove", "cut"])
    return [
        (draw(kind), draw(st.floats(0, 1, exclude_max=True)), bytes([draw(INTERESTING)]) + draw(WORDS))
        for _ in range(draw(st.integers(1, 3)))
    ]


def damage(raw: bytes, end: int, changes: list[tuple[str, float, bytes]]) -> bytes:
    for kind, where, data in changes:
        at = int(where * min(end, len(raw)))
        if kind == "set":
            raw = raw[:at] + data[:1] + raw[at + 1 :]
        elif kind == "word":
            raw = raw[:at] + data[1:] + raw[at + 8 :]
        elif kind == "insert":
            raw = raw[:at] + data[:1] + raw[at:]
        elif kind == "remove":
            raw = raw[:at] + raw[at + 1 :]
        else:
            raw = raw[:at]
    return raw


def opens_or_says_why(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        model = open_model(path)
        for name in model.weights:
            model.weights[name]
        model.close()
    except (ModelFileError, UnsupportedModel) as error:
        assert error.what and str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 200_000 + 4 * len(raw)


@given(changes=damages())
@settings(max_examples=400, deadline=None)
def test_damaged_headers(sound: tuple[Path, bytes, int], changes: list[tuple[str, float, bytes]]) -> None:
    folder, raw, end = sound
    opens_or_says_why(folder / "damaged.gguf", damage(raw, end, changes))


@given(tail=st.binary(max_size=200), version=st.sampled_from([2, 3]), counts=st.tuples(st.integers(0, 4), st.integers(0, 4)))
@settings(max_examples=300, deadline=None)
def test_anything_behind_a_sound_start(tmp_path_factory, tail: bytes, version: int, counts: tuple[int, int]) -> None:
    path = tmp_path_factory.getbasetemp() / "anything.gguf"
    raw = b"GGUF" + version.to_bytes(4, "little") + b"".join(c.to_bytes(8, "little") for c in counts) + tail
    opens_or_says_why(path, raw)


def test_the_highest_bit_of_header_bytes(sound: tuple[Path, bytes, int]) -> None:
    """Every third byte; counts, lengths and types become huge."""
    folder, raw, end = sound
    path = folder / "byte.gguf"
    for at in range(0, end, 3):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x80]) + raw[at + 1 :])
        try:
            open_model(path)
        except (ModelFileError, UnsupportedModel):
            continue
