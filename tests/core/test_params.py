"""SamplingParams: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_vllm.errors import NanoVLLMError, ParameterError, RequestError, UnknownOption
from nano_vllm.sampling.params import SamplingParams, merged

FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
INTEGERS = ["top_k", "max_tokens", "min_tokens", "seed"]
BOOLEANS = ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens"]


def refused(field: str, value: object) -> ParameterError:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert repr(field) in str(caught.value)
    json.loads(json.dumps({"message": str(caught.value)}, allow_nan=False))
    return caught.value


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize(
    "literal", ["NaN", "Infinity", "-Infinity", "1e309", "-1e309", '"0.7"', "true", "false", "null", "[1]", "{}"]
)
def test_floats_refuse_what_json_can_say(field, literal):
    refused(field, json.loads(literal))


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("value", [np.float32("nan"), np.float64("inf"), np.bool_(True), 10**400, 1j, b"1", np.ones(1)])
def test_floats_refuse_what_python_can_say(field, value):
    refused(field, value)


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("temperature", [-1e-300, -1.0, -1], [0, -0.0, 5e-324, 1, 2.5, 1e30, 1.7e308, np.float32(0.7), np.int64(1)]),
        ("top_p", [-1, 0, 0.0, -0.0, 1.0000001, 2], [1e-300, 0.5, 1, np.float16(0.5)]),
        ("min_p", [-1e-9, 1.0000001], [0, 0.5, 1]),
        ("presence_penalty", [-2.0001, 2.0001], [-2, 2, 0]),
        ("frequency_penalty", [-2.0001, 2.0001], [-2, 2, 0]),
        ("repetition_penalty", [0, -1, 9e-5, 1e-320, 10001, 1e300], [1e-4, 0.5, 1, 10000]),
        (
            "top_k",
            [-2, 2**31, 1.0, "5", True, None, math.nan, np.float64(3)],
            [-1, 0, 1, 2**31 - 1, np.int32(7), np.uint8(7)],
        ),
        ("max_tokens", [0, -1, 2**31, 1.0, "5", True, math.inf], [None, 1, 2**31 - 1, np.int64(7)]),
        ("min_tokens", [-1, 17, 1.0, "5", True, None], [0, 16]),
        ("seed", [-(2**63) - 1, 2**64, 1.5, "5", True], [None, -(2**63), 2**64 - 1, 0, np.uint64(2**64 - 1)]),
        ("stop", ["", [""], ["a", ""], b"a", ["a", 1], [None], 5, {"a": 1}, {"a"}], [None, [], (), "a", ["a", "b"], ("a",)]),
        (
            "stop_token_ids",
            [[-1], [2**31], [10**20], [1.0], ["1"], [True], 5, "12", {1: 2}, [None]],
            [None, [], (0,), [2**31 - 1], {3, 1}, [np.int32(5)]],
        ),
        *((name, [0, 1, "true", None], [True, False, np.bool_(True)]) for name in BOOLEANS),
    ],
)
def test_ranges_and_types(field, bad, good):
    for value in bad:
        refused(field, value)
    for value in good:
        stored = getattr(SamplingParams(**{field: value}), field)
        assert type(stored) in (int, float, bool, tuple, type(None))


def test_values_are_normalised():
    params = SamplingParams(
        temperature=1, top_k=-1, stop="end", stop_token_ids=[3, 1], seed=np.int64(5), ignore_eos=np.bool_(True)
    )
    assert (params.temperature, params.top_k, params.stop, params.stop_token_ids, params.seed) == (1.0, 0, ("end",), (3, 1), 5)
    assert type(params.temperature) is float and type(params.seed) is int and params.ignore_eos is True
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert math.copysign(1, SamplingParams(presence_penalty=-0.0).presence_penalty) == 1
    assert SamplingParams(seed=-1).seed is None and SamplingParams(seed=-2).seed == -2


def test_numbers_that_python_will_not_print_are_refused_like_others():
    for field in ("temperature", "top_k"):
        refused(field, 10**5000)
    refused("stop_token_ids", [10**5000])


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-9, 1e-20, 5e-324, 9.9e-6])
def test_tiny_temperatures_are_greedy(temperature):
    assert SamplingParams(temperature=temperature).temperature == 0


def test_min_tokens_within_max_tokens():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500
    with pytest.raises(ParameterError, match="max_tokens is 4") as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.field == "min_tokens"


@pytest.mark.parametrize(
    ("name", "near"),
    [("topk", "top_k"), ("temprature", "temperature"), ("max_new_tokens", "max_tokens"), ("stop_tokens", "stop_token_ids")],
)
def test_unknown_keyword_names_the_nearest(name, near):
    for make in (lambda: SamplingParams(**{name: 1}), lambda: SamplingParams.from_dict({name: 1})):
        with pytest.raises(UnknownOption, match=f"{name!r}.*{near!r}") as caught:
            make()
        assert isinstance(caught.value, TypeError) and caught.value.status == 400


def test_unknown_keyword_without_neighbour_lists_all():
    with pytest.raises(UnknownOption, match="temperature, top_p"):
        SamplingParams(zzzzzz=1)
    with pytest.raises(UnknownOption):
        SamplingParams.from_dict({5: 1})


def test_errors_are_bad_requests_that_say_range_and_mend():
    error = refused("top_p", 1.5)
    assert isinstance(error, (RequestError, ValueError)) and error.status == 400
    assert "above 0 and at most 1" in str(error) and "1.5" in str(error) and error.mend
    assert len(str(refused("stop", ""))) < 300
    assert len(str(refused("temperature", "x" * 10000))) < 300


def test_check_against_vocabulary():
    SamplingParams(stop_token_ids=[0, 99]).check_against(100)
    with pytest.raises(ParameterError, match="100.*99") as caught:
        SamplingParams(stop_token_ids=[5, 100]).check_against(100)
    assert caught.value.field == "stop_token_ids"


def test_frozen_hashable_and_copied_whole():
    params = SamplingParams(temperature=0.5, stop=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1
    assert hash(params) == hash(SamplingParams(temperature=0.5, stop="a"))
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
    assert dataclasses.replace(params, top_k=3).top_k == 3
    with pytest.raises(ParameterError):
        dataclasses.replace(params, top_p=2)
    assert list(inspect.signature(SamplingParams).parameters) == [f.name for f in dataclasses.fields(SamplingParams)]


MODEL = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": None,
    "repetition_penalty": 1.1,
    "max_new_tokens": 99,
    "eos_token_id": 2,
}


def test_model_defaults_and_request_values():
    """C13: what the request says wins, also when it says the plain default."""
    params = merged(MODEL, {})
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 20, 0.95, 0.0)
    assert (params.repetition_penalty, params.max_tokens) == (1.1, 99)
    params = merged(MODEL, {"top_k": 1, "temperature": 1, "top_p": 1.0, "max_tokens": None})
    assert (params.top_k, params.temperature, params.top_p, params.max_tokens) == (1, 1.0, 1.0, None)
    assert merged({}, {}) == SamplingParams()


def test_do_sample():
    assert merged({**MODEL, "do_sample": False}, {}).temperature == 0
    assert merged({**MODEL, "do_sample": False}, {"temperature": 0.3}).temperature == 0.3
    assert merged({**MODEL, "do_sample": True}, {}).temperature == 0.6


def test_merged_refuses_unknown_and_says_whose_value_is_wrong():
    with pytest.raises(UnknownOption, match="top_k"):
        merged(MODEL, {"topk": 1})
    with pytest.raises(ParameterError, match="generation_config"):
        merged({"top_p": 5}, {})
    with pytest.raises(ParameterError) as caught:
        merged({"top_p": 0.5}, {"top_p": 5})
    assert "generation_config" not in str(caught.value)
    assert merged({"top_p": 5}, {"top_p": 0.5}).top_p == 0.5


anything = st.one_of(
    st.sampled_from([None, True, False, b"a", {}, {"a": 1}]), st.integers(), st.floats(), st.text("1é", max_size=3),
    st.lists(st.integers(-2, 9), max_size=3), st.lists(st.text("1é", max_size=2), max_size=3),
)  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a loaded machine is not a fault
@given(st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)]), anything, max_size=4))
def test_whatever_is_given_ends_in_sound_params_or_a_typed_error(given_values):
    try:
        params = SamplingParams.from_dict(given_values)
    except NanoVLLMError as error:
        assert isinstance(error, ParameterError) and error.field in given_values and error.why
        return
    assert all(type(getattr(params, name)) is float and math.isfinite(getattr(params, name)) for name in FLOATS)
    assert all(type(getattr(params, name)) in (int, type(None)) for name in INTEGERS)
    assert 0 < params.top_p <= 1 and 0 <= params.min_p <= 1 and params.temperature >= 0 and params.repetition_penalty > 0
    assert "" not in params.stop and all(i >= 0 for i in params.stop_token_ids)
    assert SamplingParams.from_dict(dataclasses.asdict(params)) == params
