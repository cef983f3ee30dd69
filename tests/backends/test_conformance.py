"""Every architecture and each of its TINY configs against transformers in float32, from a folder on the disk to logits; and a
proof that the comparison would notice any field of the spec and any tensor being wrong."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nano_vllm import registry
from nano_vllm.backends import reference
from nano_vllm.errors import NanoVLLMError
from nano_vllm.formats import pack
from nano_vllm.model.program import lower
from nano_vllm.model.spec import Norm
from nano_vllm.model.weights import open_model

from . import files, tiny

BOUND = 1e-4  # of any logit; logits are of about unit size
BUDGETS = json.loads((Path(__file__).parents[1] / "fixtures" / "format_budgets.json").read_text())
FORMATS = {
    "f32": ("f32", {}),
    "f16": ("f16", {}),
    "bf16": ("bf16", {}),
    "q8": ("q8", {}),
    "q4": ("q4", {}),
    "q4 with minimum": ("q4", {"minimum": True}),
    "q4_k": ("q4_k", {}),
    "q5_k": ("q5_k", {}),
    "q6_k": ("q6_k", {}),
}


@pytest.fixture(scope="module", params=tiny.variants(), ids=lambda v: f"{v[0]}{v[1]}")
def case(request, tmp_path_factory):
    """A random model saved in both spellings, a prompt, and transformers' logits for it."""
    name, index = request.param
    config = tiny.configs(registry.load("architectures", name))[index]
    model = tiny.theirs(config)
    ids = tiny.tokens(config["vocab_size"])
    folders = {
        "new": tiny.save(model, tmp_path_factory.mktemp("new")),
        "old": tiny.save(model, tmp_path_factory.mktemp("old"), old=config),
    }
    return SimpleNamespace(folders=folders, ids=ids, expected=tiny.their_logits(model, ids))


def error(backend, spec, weights, case) -> float:
    """Largest difference of a logit from transformers', with a float32 cache."""
    session = backend.open(lower(spec), weights, tiny.plan(backend.__name__.rpartition(".")[2]))
    try:
        return float(np.abs(tiny.logits(session, case.ids) - case.expected).max())
    finally:
        session.close()


@pytest.mark.parametrize(
    "backend, spelling", [("reference", "new"), ("reference", "old"), ("cpu", "new"), ("cpu", "old"), ("cuda", "new")]
)
def test_logits_equal_transformers(case, backend, spelling):
    opened = open_model(case.folders[spelling])
    assert error(registry.load("backends", backend), opened.spec, opened.weights, case) <= BOUND
    opened.close()


def test_prompts_reach_beyond_windows_and_original_contexts():
    """And the TINY configs together have a window, and each scaling that a config file can ask for."""
    scalings, windows = set(), 0
    for name, index in tiny.variants():
        config = tiny.configs(registry.load("architectures", name))[index]
        scaling = config.get("rope_scaling") or {}
        scalings.add(scaling.get("rope_type", "default"))
        assert scaling.get("original_max_position_embeddings", 0) < tiny.LENGTH / 2
        if config.get("sliding_window"):
            windows += 1
            assert config["sliding_window"] < tiny.LENGTH / 2
    assert scalings == {"default", "linear", "llama3", "yarn"} and windows >= 3


def test_attention_is_sharp(case):
    """A model that looks at everything alike would hide faults in rotation and masks."""
    opened = open_model(case.folders["new"])
    session = reference.open(lower(opened.spec), opened.weights, tiny.plan())
    copies = session.trace(tiny.batch([(case.ids, 0, [0, 1, 2])]))
    for i, layer in enumerate(opened.spec.layers):
        attention = layer.attention
        heads = copies[f"layers.{i}.attention.rotate"].reshape(len(case.ids), -1, attention.head_size)
        scores = heads[:, 0] @ heads[:, attention.heads].T * attention.scale
        assert np.std(scores) > 1.5


# Flips: a spec or a tensor that is wrong in one place must not pass

NOT_ARITHMETIC = {"Model.architecture", "Model.context"}
FLIPS = {
    "Norm.eps": lambda v: (v * 1.2,),
    "Rope.frequencies": lambda v: [(*v[:i], v[i] * 1.1, *v[i + 1 :]) for i in range(len(v))],
    "Rope.scale": lambda v: (v * 1.01,),
    "Attention.heads": lambda v: (2 * v,),
    "Attention.kv_heads": lambda v: (2 * v,),
    "Attention.head_size": lambda v: (v + 2,),
    "Attention.scale": lambda v: (v * 1.01,),
    "Attention.window": lambda v: (6,) if v is None else (v - 1, v + 1, None),
    "Attention.bias": lambda v: (not v,),
    "Attention.out_bias": lambda v: (not v,),
    "Attention.qk_norm": lambda v: (Norm(0.05),) if v is None else (None,),
    "MLP.size": lambda v: (v - 8, v + 8),
    "MLP.activation": lambda v: ("gelu_tanh",),
    "MLP.bias": lambda v: (not v,),
    "Model.architecture": lambda v: ("other",),
    "Model.vocab_size": lambda v: (v - 1, v + 1),
    "Model.hidden_size": lambda v: (v - 8, v + 8),
    "Model.layers": lambda v: (v[:-1], v[::-1]) if v[0] != v[-1] else (v[:-1],),
    "Model.context": lambda v: (8 * v, 1),
    "Model.tied": lambda v: (not v,),
}


def flips(part, where: str = ""):
    """(place, field, the part with that one field changed) over all fields of a part and of the parts inside it."""
    for field in dataclasses.fields(part):
        value, kind, place = getattr(part, field.name), f"{type(part).__name__}.{field.name}", f"{where}.{field.name}"
        inside = value if isinstance(value, tuple) and dataclasses.is_dataclass(value[0]) else (value,)
        for i, item in enumerate(inside):
            if dataclasses.is_dataclass(item):
                for below, below_kind, changed in flips(item, f"{place}[{i}]"):
                    whole = (*inside[:i], changed, *inside[i + 1 :]) if isinstance(value, tuple) else changed
                    yield below, below_kind, dataclasses.replace(part, **{field.name: whole})
        # a field of plain values must be in the table: a new one without a flip is a KeyError here
        for changed in FLIPS[kind](value) if kind in FLIPS or not dataclasses.is_dataclass(inside[0]) else ():
            yield place, kind, dataclasses.replace(part, **{field.name: changed})


def passes(spec, weights, case) -> bool:
    try:
        return error(reference, spec, weights, case) <= BOUND
    except NanoVLLMError:
        return False


def test_every_field_of_the_spec_matters(case):
    opened = open_model(case.folders["new"])
    weights = dict(opened.weights)
    seen = set()
    for place, kind, spec in flips(opened.spec):
        seen.add(kind)
        assert passes(spec, weights, case) == (kind in NOT_ARITHMETIC), f"{place} changed and nobody noticed"
    assert seen == set(FLIPS)


def test_one_value_of_each_tensor_matters(case):
    opened = open_model(case.folders["new"])
    weights = dict(opened.weights)
    assert passes(opened.spec, weights, case)
    for name, tensor in weights.items():
        values = tensor.unpack()
        if name == "embedding":
            values[case.ids[0], 0] += 0.5
        else:
            values.flat[values.size // 2] += 0.5
        assert not passes(opened.spec, weights | {name: pack(name, values, "f32")}, case), f"{name} changed and nobody noticed"


# Weight formats: the error of computing, held against llama.cpp's


@cache
def widened(architecture: str, format: str):
    """(program, weights in a format, prompts, exact logits of these weights) of the model that the budgets were made with."""
    module = registry.load("architectures", architecture)
    config = tiny.wide(tiny.configs(module)[0], files.columns(format))
    name, options = FORMATS[format]
    program = lower(module.describe(config))
    weights = tiny.rounded(tiny.values(tiny.theirs(config), module), name, **options)
    prompts = [tiny.tokens(config["vocab_size"], seed=seed) for seed in range(BUDGETS["sequences"])]
    session = reference.open(program, weights, tiny.plan())
    return program, weights, prompts, np.stack([tiny.logits(session, ids) for ids in prompts])


def rms_error(session, prompts, exact) -> float:
    got = np.stack([tiny.logits(session, ids) for ids in prompts])
    return float(np.sqrt(np.mean((got - exact).astype(np.float64) ** 2)))


def budget(architecture: str, format: str) -> float:
    if architecture not in BUDGETS["rms_error"]:
        pytest.fail(f"no budget for {architecture}: run tests/fixtures/make_format_budgets.py")
    return BUDGETS["rms_error"][architecture][format]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("architecture", registry.names("architectures"))
def test_cpu_error_is_within_llama_cpps(architecture, format):
    program, weights, prompts, exact = widened(architecture, format)
    session = registry.load("backends", "cpu").open(program, weights, tiny.plan("cpu", "f16"))
    assert rms_error(session, prompts, exact) <= budget(architecture, format)
    session.close()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("architecture", registry.names("architectures"))
def test_the_roundings_that_are_defined_are_within_llama_cpps(architecture, format):
    program, weights, prompts, exact = widened(architecture, format)
    session = reference.open(program, weights, tiny.plan(kv_cache_dtype="f16"), activations="int8")
    measured = rms_error(session, prompts, exact)
    assert 1e-5 < measured <= budget(architecture, format)


@pytest.mark.parametrize("format", ["q4_k", "q5_k", "q6_k", "mixed"])
@pytest.mark.parametrize("architecture", registry.names("architectures"))
def test_gguf_files_are_within_llama_cpps(architecture, format, tmp_path):
    """The very file that llama.cpp's error was measured with; "mixed" has weights of several formats in one linear."""
    module = registry.load("architectures", architecture)
    config = tiny.wide(tiny.configs(module)[0], files.columns(format))
    model = tiny.theirs(config)
    files.write_gguf(tmp_path / "tiny.gguf", model, module, format)
    opened = open_model(tmp_path / "tiny.gguf")
    prompts = [tiny.tokens(config["vocab_size"], seed=seed) for seed in range(BUDGETS["sequences"])]
    exact = np.stack([tiny.their_logits(model, ids) for ids in prompts])
    session = registry.load("backends", "cpu").open(lower(opened.spec), opened.weights, tiny.plan("cpu", "f16"))
    assert 1e-5 < rms_error(session, prompts, exact) <= budget(architecture, format)
    session.close()
    opened.close()
