"""Rotary frequencies against transformers' own, in both spellings of a config; what is not known is refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from nano_vllm.errors import ModelFileError, UnsupportedModel
from nano_vllm.model.rope import rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = [
    None,
    {"rope_type": "default"},
    {"type": "linear", "factor": 2.5},
    LLAMA3 | {"original_max_position_embeddings": 1024},
    LLAMA3,
    YARN,
    YARN | {"beta_fast": 16, "beta_slow": 2},
    YARN | {"attention_factor": 0.75},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    YARN | {"mscale": 0.7},
    YARN | {"truncate": False},
    YARN | {"factor": None},
    YARN | {"original_max_position_embeddings": 8},
    {"rope_type": "yarn", "factor": 2.0},
]


def theirs(config: dict, head_size: int):
    """(frequencies, scale) as transformers computes them."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_size, **config))
    return rotary.inv_freq.numpy(), rotary.attention_scaling


@pytest.mark.parametrize("head_size", [8, 12, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000, 1e6])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_frequencies_equal_transformers(scaling, theta, head_size):
    old = {"max_position_embeddings": 2048, "rope_theta": theta, "rope_scaling": scaling}
    new = {"max_position_embeddings": 2048, "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": theta}}
    if "rope_type" not in new["rope_parameters"]:
        new["rope_parameters"]["rope_type"] = new["rope_parameters"].pop("type")
    expected, scale = theirs({k: dict(v) if isinstance(v, dict) else v for k, v in new.items()}, head_size)
    for config in (old, new):
        ours = rope(config, head_size)
        # float32's last place: transformers' power may be off by one unit, and the scaling doubles that
        np.testing.assert_array_max_ulp(np.float32(ours.frequencies), expected, maxulp=3)
        assert ours.scale == pytest.approx(scale, rel=1e-12)


def test_frequencies_are_float32_values_and_mostly_equal_bit_for_bit():
    expected, _ = theirs({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 128)
    ours = rope({"rope_theta": 1e6}, 128).frequencies
    assert all(float(np.float32(f)) == f for f in ours)
    assert np.mean(np.float32(ours) == expected) > 0.95


def test_original_context_beside_the_scaling_wins():
    config = {"max_position_embeddings": 4096, "original_max_position_embeddings": 256, "rope_theta": 1e4}
    inside = YARN | {"original_max_position_embeddings": 256}
    assert rope(config | {"rope_scaling": YARN}, 64) == rope({"max_position_embeddings": 4096, "rope_scaling": inside}, 64)


def test_factors_divide_each_frequency():
    divisors = np.linspace(1, 8, 32).astype(np.float32)
    plain = np.float32(rope({}, 64).frequencies)
    divided = np.float32(rope({"rope_scaling": {"rope_type": "factors", "factors": tuple(divisors.tolist())}}, 64).frequencies)
    np.testing.assert_array_equal(divided, plain / divisors)
    with pytest.raises(ModelFileError, match="32 positive numbers"):
        rope({"rope_scaling": {"rope_type": "factors", "factors": (1.0, 2.0)}}, 64)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional", "mrope", "su"])
def test_unknown_types_are_named(kind):
    with pytest.raises(UnsupportedModel, match=f"'{kind}'"):
        rope({"rope_scaling": {"type": kind, "factor": 2.0}}, 64)


def test_settings_that_would_be_ignored_are_refused():
    with pytest.raises(UnsupportedModel, match="mrope_section"):
        rope({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, 64)
    with pytest.raises(UnsupportedModel, match="'factor'"):
        rope({"rope_scaling": {"type": "default", "factor": 2.0}}, 64)
    with pytest.raises(UnsupportedModel, match="part of each head"):
        rope({"partial_rotary_factor": 0.5}, 64)
    with pytest.raises(UnsupportedModel, match="kind of layer"):
        rope({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, 64)
    with pytest.raises(UnsupportedModel, match="odd head size"):
        rope({}, 63)


@pytest.mark.parametrize("value", [0, -1.0, "4", True, float("nan"), float("inf"), None])
def test_numbers_are_checked(value):
    with pytest.raises(ModelFileError, match="'factor' must be a positive number"):
        rope({"rope_scaling": {"type": "linear", "factor": value}}, 64)
