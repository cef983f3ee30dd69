"""Rules that a machine keeps: who may import whom, what import loads, how large files are."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest

import nano_vllm

ROOT = Path(nano_vllm.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
NAMES = [str(f.relative_to(ROOT)) for f in FILES]

# What each folder (or module of the top folder) may import. A name with a dot allows that one module. All may import COMMON.
COMMON = {"errors", "registry", "version"}
TOP = {"engine", "formats", "loading", "memory", "model", "options", "outputs", "sampling", "sources", "text"}
MAY_IMPORT = {
    "errors": set(),
    "registry": set(),
    "version": set(),
    "formats": set(),
    "text": set(),
    "sampling": set(),
    "policies": {"engine.request"},
    "options": {"memory.machine"},
    "sources": {"formats", "options"},
    "architectures": {"formats", "model.rope", "model.spec"},
    "model": {"formats", "sources", "text.files", "text.tokenizer"},
    "memory": {"model.program", "options"},
    "engine": {"memory.plan", "sampling", "text.detokenizer"},
    "backends": {"engine.backend", "formats", "memory.machine", "memory.plan", "model.program", "model.spec", "sampling"},
    "loading": TOP,
    "outputs": {"engine.request", "text.detokenizer"},
    "llm": TOP | {"running"},
    "running": {"engine.thread", "loading", "options"},
    "async_llm": {"engine.request", "llm", "outputs", "sampling"},
    "perplexity": {"engine.backend", "sampling"},
    "conversion": {"formats", "model", "options", "sources", "text.folder"},
    "bench": {"engine.backend", "model.program", "sampling"},
    "cli": TOP | {"bench", "conversion", "llm", "perplexity"},
    "__init__": {"async_llm", "errors", "llm", "outputs", "sampling"},
    "__main__": {"cli"},
}

# The files that explain the engine, to be read in this order.
READING_LIST = """
engine/request.py engine/blocks.py engine/scheduler.py engine/batch.py engine/engine.py model/spec.py model/program.py
architectures/llama.py architectures/_llama_family.py model/weights.py engine/backend.py backends/reference.py
sampling/pipeline.py text/detokenizer.py llm.py
""".split()
READING_LIST_LINES = 2600
FILE_WARNS, FILE_FAILS, FUNCTION_WARNS = 300, 500, 60

HEAVY = {"torch", "triton", "onnxruntime", "wgpu", "fastapi", "transformers"}


@cache
def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text("utf-8"))


def imports(name: str):
    """Dotted names, relative to the package, of what a file imports from it."""
    package = Path(name).parts[:-1]
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                yield ".".join([*base, alias.name])


def allowed(unit: str, target: str) -> bool:
    rules = COMMON | MAY_IMPORT[unit] | {unit}
    return any(target == rule or target.startswith(rule + ".") for rule in rules)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_imports_only_what_it_may(name):
    unit = Path(name).parts[0].removesuffix(".py")
    assert unit in MAY_IMPORT, f"{unit} is new: say in MAY_IMPORT what it may import"
    wrong = sorted({target for target in imports(name) if not allowed(unit, target)})
    assert not wrong, f"{name} may not import {', '.join(wrong)}"


def test_the_package_imports_itself_relatively():
    """Otherwise the rule above would not see it."""
    for name in NAMES:
        for node in ast.walk(tree(name)):
            found = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
            level = getattr(node, "level", 0)
            assert level or not any(f.split(".")[0] == "nano_vllm" for f in found), name


def test_heavy_packages_are_imported_nowhere_outside_their_backends():
    for name in NAMES:
        for node in ast.walk(tree(name)):
            found = set()
            if isinstance(node, ast.Import):
                found = {a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found = {node.module.split(".")[0]}
            assert not found & HEAVY or name.startswith("backends/"), f"{name} imports {found & HEAVY}"


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


def test_import_is_light():
    """`import nano_vllm`, and the classes behind its names, too."""
    code = "import sys, nano_vllm{}; print(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    for more in ("", "; nano_vllm.LLM; nano_vllm.AsyncLLM; nano_vllm.SamplingParams"):
        loaded = set(python(code.format(more)).split())
        assert "nano_vllm" in loaded and not loaded & HEAVY
    bare = set(python(code.format("")).split())
    assert not bare & {"numpy", "tokenizers", "jinja2", "huggingface_hub", "tqdm"}


def test_the_environment_is_read_in_options_alone():
    for name in NAMES:
        for node in ast.walk(tree(name)):
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                reads = any("env" in a.name for a in node.names)
            assert not reads or name == "options.py", f"{name}:{node.lineno} reads the environment"


def test_nothing_is_asserted():
    """An assertion vanishes under -O and tells a user nothing: input is checked with a typed error."""
    for name in NAMES:
        found = [node.lineno for node in ast.walk(tree(name)) if isinstance(node, ast.Assert)]
        assert not found, f"{name}: assert in lines {found}"


def is_plan(node: ast.AST) -> bool:
    return getattr(node, "id", getattr(node, "attr", None)) in ("plan", "_plan")


def test_a_plan_is_decided_once():
    """Nobody assigns to a plan, or makes another of it, outside of `memory/plan.py`."""
    for name in NAMES:
        if name == "memory/plan.py":
            continue
        for node in ast.walk(tree(name)):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            wrong = any(isinstance(t, ast.Attribute) and is_plan(t.value) for t in targets)
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                wrong = called in ("replace", "setattr", "__setattr__") and bool(node.args) and is_plan(node.args[0])
                wrong = wrong or called == "Plan"
            assert not wrong, f"{name}:{node.lineno} changes a plan"


@pytest.mark.parametrize("name", NAMES)
def test_files_and_functions_stay_small(name):
    lines = len((ROOT / name).read_text("utf-8").splitlines())
    assert lines <= FILE_FAILS, f"{name} has {lines} lines; {FILE_FAILS} is the most"
    if lines > FILE_WARNS:
        warnings.warn(f"{name} has {lines} lines", stacklevel=1)
    for node in ast.walk(tree(name)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= FUNCTION_WARNS:
            warnings.warn(f"{name}: {node.name} has {node.end_lineno - node.lineno + 1} lines", stacklevel=1)


def test_the_core_can_be_read_in_an_evening():
    counts = {name: len((ROOT / name).read_text("utf-8").splitlines()) for name in READING_LIST}
    total = sum(counts.values())
    print(*(f"{count:5} {name}" for name, count in counts.items()), f"{total:5} of {READING_LIST_LINES} lines", sep="\n")
    assert total <= READING_LIST_LINES, f"the core reading list has {total} lines; features belong outside it"
