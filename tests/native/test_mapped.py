"""A session over a `.nano` file uses its matrices where they lie, with the same bits as one that packs them."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

from nano_vllm import _native
from nano_vllm.backends import cpu
from nano_vllm.conversion import convert_model
from nano_vllm.errors import ModelFileError
from nano_vllm.model.program import lower
from nano_vllm.model.weights import open_model
from tests.backends import tiny
from tests.core.models import write_gguf
from tests.core.test_nano import KINDS, models


@pytest.fixture
def paths(tmp_path) -> tuple[Path, Path]:
    types = {name: KINDS[i % len(KINDS)] for i, (name, v) in enumerate(models.numbers().items()) if v.ndim == 2}
    source = write_gguf(tmp_path / "m.gguf", types=types)
    return source, convert_model(source, tmp_path / "m.nano")


def opened(path: Path):
    model = open_model(path)
    session = cpu.open(lower(model.spec), model.weights, tiny.plan("cpu", "f16"))
    model.close()
    return session


def logits(session) -> np.ndarray:
    return session.submit(tiny.batch([(list(range(1, 38)), 0, [0, 1, 2])], "all")).result().logits


def maps(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_logits_have_the_same_bits(paths):
    packed, mapped = (opened(path) for path in paths)
    np.testing.assert_array_equal(logits(packed), logits(mapped))
    there, copied = mapped.memory(), packed.memory()
    assert copied["mapped"] == 0 and there["mapped"] + there["weights"] == mapped.weight_bytes
    matrices = sum(t.nbytes for t in open_model(paths[1]).weights._entries.values() if len(t.shape) == 2)
    assert there["mapped"] == matrices and there["weights"] < copied["weights"] - matrices // 2
    assert packed.weight_bytes == pytest.approx(mapped.weight_bytes, rel=0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_mapping_ends_with_the_session(paths):
    session = opened(paths[1])
    assert maps(paths[1]) == 1
    expected = logits(session)
    native = session.native
    session.close()
    assert maps(paths[1]) == 1, "the native session still reads it"
    del native
    gc.collect()
    assert maps(paths[1]) == 0
    session = opened(paths[1])
    paths[1].unlink()  # the name goes, what is mapped stays
    np.testing.assert_array_equal(logits(session), expected)
    session.close()


def test_what_is_read_ahead_is_all_of_it(paths, monkeypatch):
    seen = []
    model = open_model(paths[1])
    native = type("Native", (), {"populate": lambda array: seen.append(bytes(array))})
    from nano_vllm.backends.cpu.mapped import Mapped

    monkeypatch.setattr("nano_vllm.backends.cpu.mapped.PIECE", 1000)
    mapped = Mapped(model.weights)
    names = [name for name in model.weights if len(model.weights.infos[name].shape) == 2]
    arrays = [mapped.packed(name) for name in names]
    ahead = mapped.read_ahead(native)
    ahead.wait()
    assert b"".join(seen) == b"".join(bytes(array) for array in arrays) and max(map(len, seen)) == 1000
    monkeypatch.setattr("nano_vllm.backends.cpu.mapped.free_memory", lambda: 1000)
    assert mapped.read_ahead(native) is None
    assert Mapped({}).read_ahead(native) is None


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which parts are resident")
def test_populate_makes_bytes_resident(paths):
    import mmap

    with open(paths[1], "rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def resident() -> int:
        text = Path("/proc/self/smaps").read_text()
        after = text[text.index(str(paths[1])) :]
        return int(after[after.index("Rss:") :].split()[1]) * 1024

    assert resident() < len(content)
    _native.populate(content[100:-100])
    assert resident() >= len(content) // 4096 * 4096


def test_a_file_that_became_shorter_is_not_mapped(paths):
    model = open_model(paths[1])
    paths[1].write_bytes(paths[1].read_bytes()[:9000])
    with pytest.raises(ModelFileError, match="became shorter|cut short"):
        cpu.open(lower(model.spec), model.weights, tiny.plan("cpu", "f16"))


@pytest.mark.parametrize("size, offset", [(1024, 0), (2048, 4), (2112, 0)])
def test_packed_bytes_must_fit_the_shape(size, offset):
    memory = np.zeros(8192, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    session = _native.Session(threads=1, isa="", max_rows=1, vocab=32, kv_type="f16", block_size=16, num_blocks=1)
    with pytest.raises(ValueError, match="packed matrix"):
        session.add_packed(format="f16", n=32, k=32, group=0, minimum=False, data=memory[begin : begin + size])
