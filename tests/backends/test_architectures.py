"""Settings of a config that are not built are refused by name; what may be left out has transformers' default."""

from __future__ import annotations

import pytest

from nano_vllm import registry
from nano_vllm.errors import ModelFileError, UnsupportedModel

from . import tiny

FAMILY = ["llama", "qwen2", "qwen3"]
REFUSED = [
    ("hidden_act", "gelu"),
    ("quantization_config", {"quant_method": "awq"}),
    ("rope_interleaved", True),
    ("partial_rotary_factor", 0.5),
    ("final_logit_softcapping", 30.0),
    ("logits_scaling", 8.0),
    ("num_experts", 8),
    ("layer_types", ["linear_attention", "full_attention"]),
    ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
]


def module_and_config(name: str) -> tuple:
    module = registry.load("architectures", name)
    return module, tiny.configs(module)[0]


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("setting, value", REFUSED, ids=str)
def test_refused_by_name(name, setting, value):
    module, config = module_and_config(name)
    if setting == "layer_types":
        config = config | {"num_hidden_layers": 2}
    with pytest.raises(UnsupportedModel, match=setting.split("_")[0]):
        module.describe(config | {setting: value})


def test_windows_are_mistrals_alone_among_llamas():
    module, config = module_and_config("llama")
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        module.describe(config | {"sliding_window": 8})
    layers = module.describe(config | {"model_type": "mistral", "sliding_window": 8}).layers
    assert {layer.attention.window for layer in layers} == {8}
    with pytest.raises(UnsupportedModel, match="layer_types"):
        module.describe(config | {"model_type": "mistral", "layer_types": ["full_attention"] * 2})


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(
    "setting", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"]
)
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, "8", True])
def test_sizes_are_whole_numbers(name, setting, value):
    module, config = module_and_config(name)
    with pytest.raises(ModelFileError, match=setting):
        module.describe(config | {setting: value})


@pytest.mark.parametrize("name", FAMILY)
def test_defaults_are_transformers(name):
    from transformers import AutoConfig

    module, config = module_and_config(name)
    left_out = ("head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "use_sliding_window")
    bare = {key: value for key, value in config.items() if key not in left_out}
    filled = AutoConfig.for_model(**bare).to_dict()
    assert module.describe(bare) == module.describe(filled)


@pytest.mark.parametrize("name", FAMILY)
def test_names_of_tensors(name):
    module, _ = module_and_config(name)
    assert module.rename("model.layers.11.self_attn.o_proj.weight") == "layers.11.attention.out"
    assert module.rename("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    for unknown in ("model.layers.0.self_attn.q_proj.qweight", "model.layers.x.mlp.up_proj.weight", "transformer.wte.weight"):
        with pytest.raises(KeyError):
            module.rename(unknown)
