"""The documentation is true: its code runs, its links lead somewhere, docs/cli.md is what the commands say.

The rule for code blocks in README.md, CONTRIBUTING.md, docs/*.md and the docstrings of the public names:

- `python` blocks are run, each in a process of its own.
- `bash` blocks are run line by line, except lines that begin with make or pip (with variables before it or not). Of those it is
  checked that the make target exists, and that pip installs the project (`.`) or packages that pyproject.toml names.
- Blocks without a language are pictures. Other languages are not used.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import nano_vllm

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCKS = [(page, language, text) for page in PAGES for language, text in BLOCK.findall(page.read_text("utf-8"))]
BLOCKS += [
    (Path(name), language, text)
    for name in nano_vllm.__all__
    for language, text in BLOCK.findall(inspect.getdoc(getattr(nano_vllm, name)) or "")
]


def lines(language: str, built: bool) -> list:
    """Lines of the blocks of a language; `built`: only those with make or pip, or only the others."""
    found = []
    for page, kind, text in BLOCKS:
        for line in text.splitlines() if kind == language else []:
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words = words[1:]
            if words and (words[0] in ("make", "pip")) == built:
                found.append(pytest.param(words if built else line, id=f"{page.name}: {line[:60]}"))
    return found


@pytest.fixture(scope="session")
def environment(tmp_path_factory, smollm2_path) -> dict[str, str]:
    """With `nano-vllm` and `python` on the path as these tests run it, installed or not."""
    folder = tmp_path_factory.mktemp("bin")
    for name, module in (("nano-vllm", "-m nano_vllm "), ("python", "")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
        script.chmod(0o755)
    package = Path(nano_vllm.__file__).parents[1]
    return os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(package)}


def test_only_known_languages():
    assert {language for _, language, _ in BLOCKS} <= {"", "python", "bash"}


@pytest.mark.parametrize(
    "code", [pytest.param(text, id=f"{page.name}: block {i}") for i, (page, kind, text) in enumerate(BLOCKS) if kind == "python"]
)
def test_python_blocks_run(code, environment, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and done.stdout.endswith("\n")


@pytest.mark.parametrize("line", lines("bash", built=False))
def test_bash_lines_run(line, environment):
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("words", lines("bash", built=True))
def test_make_targets_and_pip_arguments_exist(words):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    if words[0] == "make":
        assert {w for w in words[1:] if "=" not in w} <= set(targets)
    else:
        project = (ROOT / "pyproject.toml").read_text()
        assert words[1] == "install"
        for word in words[2:]:
            assert word == "." or word.startswith("-") or re.fullmatch(r"\.\[(\w+)\]", word) or f'"{word}' in project


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in LINK.findall(page.read_text("utf-8")):
        if "://" not in target:
            file, _, heading = target.partition("#")
            found = (page.parent / file).resolve()
            assert found.exists(), target
            assert not heading or re.search(rf"^#+ {heading}$", found.read_text("utf-8"), re.MULTILINE | re.IGNORECASE), target


def test_paths_that_are_named_exist():
    """`src/…`-relative files and folders in the text, such as `engine/backend.py` or `tests/core`."""
    places = [ROOT, ROOT / "src" / "nano_vllm"]
    for page in PAGES:
        for path in re.findall(r"`((?:\w+/)+(?:\w+\.(?:py|md|cpp|h))?)`", page.read_text("utf-8")):
            assert any((place / path).exists() for place in places), f"{page.name}: {path}"


def test_the_command_line_page_is_what_the_commands_say():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import write_cli
    finally:
        sys.path.remove(str(ROOT / "docs"))
    assert (ROOT / "docs" / "cli.md").read_text("utf-8") == write_cli.page(), "run make docs"


def test_makefile_targets_and_continuous_integration_agree():
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec make test"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
