"""SamplingParams: how one request's tokens are chosen. Names, defaults and meanings are vLLM's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from .. import registry
from ..errors import ParameterError, UnknownOption

LARGEST = 2**31 - 1  # ids, positions and counts travel as int32
GREEDY_BELOW = 1e-5  # vLLM's bound; above it a float32 logit divided by the temperature keeps its meaning

# field -> (lower, upper, lower bound belongs to the range); NaN and infinities are in none of them
FLOATS = {
    "temperature": (0.0, float(np.finfo(np.float64).max), True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (1e-4, 1e4, True),
}
INTEGERS = {"top_k": (-1, LARGEST), "max_tokens": (1, LARGEST), "min_tokens": (0, LARGEST), "seed": (-(2**63), 2**64 - 1)}
NULLABLE = {"max_tokens", "seed"}
BOOLEANS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
MENDS = {
    "temperature": "Use 0 for greedy decoding, or a number such as 0.7.",
    "top_p": "Use 1 to keep every token.",
    "min_p": "Use 0 to keep every token.",
    "presence_penalty": "Use 0 for no penalty.",
    "frequency_penalty": "Use 0 for no penalty.",
    "repetition_penalty": "Use 1 for no penalty.",
    "top_k": "Use 0 or -1 to keep every token, 1 for the likeliest alone.",
    "max_tokens": "Use None for as many as the context holds.",
    "min_tokens": "Use 0 for no minimum.",
    "seed": "Use None for a seed drawn anew.",
}

# names in a model's generation_config.json -> ours
GENERATION_CONFIG = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


def _shown(value: object) -> str:
    """A value as an error message shows it, short enough for one line."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no int of more than some thousand digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def _float(name: str, value: object) -> float:
    """A finite float inside the field's range; -0.0 becomes 0.0."""
    low, high, closed = FLOATS[name]
    span = f"{'at least' if closed else 'above'} {low:g}" + (f" and at most {high:g}" if high < 1e300 else " and finite")
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ParameterError(name, f"it must be a number {span}, not {_shown(value)}", MENDS[name])
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not (low <= number <= high and (closed or number != low)):
        raise ParameterError(name, f"it must be {span}, not {_shown(value)}", MENDS[name])
    return number + 0.0


def _integer(name: str, value: object) -> int | None:
    """An int inside the field's range, or None where the field may be None."""
    low, high = INTEGERS[name]
    if value is None and name in NULLABLE:
        return None
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not (whole and low <= int(value) <= high):
        kind = "a whole number" + (" or None" if name in NULLABLE else "")
        raise ParameterError(name, f"it must be {kind} from {low} to {high}, not {_shown(value)}", MENDS[name])
    return int(value)


def _stop(value: object) -> tuple[str, ...]:
    """Stop strings as a tuple; their number and length are not bounded."""
    strings = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
        raise ParameterError("stop", f"it must be a string or a list of strings, not {_shown(value)}")
    if "" in strings:
        raise ParameterError("stop", "an empty string would end every answer at once", "Leave it out, or use None.")
    return tuple(str(s) for s in strings)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    """Stop ids as a tuple; that they are below the vocabulary is checked when the model is known."""
    ids = () if value is None else value
    if not isinstance(ids, (list, tuple, set, frozenset)):
        raise ParameterError("stop_token_ids", f"it must be a list of token ids, not {_shown(value)}")
    for i in ids:
        whole = isinstance(i, (int, np.integer)) and not isinstance(i, bool)
        if not (whole and 0 <= int(i) <= LARGEST):
            raise ParameterError(
                "stop_token_ids",
                f"token ids are whole numbers from 0 to {LARGEST}, not {_shown(i)}",
                "Use `encode` to find a token's id.",
            )
    return tuple(sorted(map(int, ids))) if isinstance(ids, (set, frozenset)) else tuple(map(int, ids))


def _names_checked(cls: type) -> type:
    """Makes construction with an unknown keyword raise `UnknownOption` with the nearest name."""
    init, known = cls.__init__, tuple(f.name for f in fields(cls))

    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        for name in kwargs:
            if name not in known:
                mend = registry.nearest(str(name), known) or f"Sampling parameters are: {', '.join(known)}."
                raise UnknownOption(f"no sampling parameter {name!r}", "", mend)
        init(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


@_names_checked
@dataclass(frozen=True)
class SamplingParams:
    """Checked on construction: a wrong value raises `ParameterError` naming the field, an unknown name `UnknownOption`.

    Types are strict: True is not 1, "0.7" is not 0.7; an int serves as a float, NumPy scalars as Python's.

    Attributes:
        temperature: 0 is greedy, and so is anything below 1e-5 (stored as 0): the likeliest token, the lowest id of equals.
            Any finite number may be given; beyond float32's range it counts as that range's end.
        top_k: keeps the k likeliest tokens; 0 or -1 (stored as 0) keeps all.
        top_p: above 0 to 1; keeps the smallest set of tokens whose probability reaches it.
        min_p: 0 to 1; keeps tokens at least this fraction as likely as the likeliest.
        presence_penalty, frequency_penalty: -2 to 2, on tokens of the answer.
        repetition_penalty: 0.0001 to 10000, on tokens of prompt and answer (Keskar et al. 2019).
        seed: same seed, same request, same answer. From -2^63 to 2^64 - 1, used modulo 2^64. None or -1 (stored as None) draws
            one.
        stop: strings that end the answer; not part of the text unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the answer, besides the model's own unless `ignore_eos`.
        include_stop_str_in_output: the stop string, or the text of the stop id, ends the text.
        ignore_eos: the model's own end-of-text ids do not end the answer.
        max_tokens: of the answer, at least 1. None: up to the context.
        min_tokens: before which no end-of-text or stop id is drawn.
        skip_special_tokens: control tokens leave nothing in the text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        values: dict[str, object] = {name: _float(name, getattr(self, name)) for name in FLOATS}
        values |= {name: _integer(name, getattr(self, name)) for name in INTEGERS}
        for name in BOOLEANS:
            value = getattr(self, name)
            if not isinstance(value, (bool, np.bool_)):
                raise ParameterError(name, f"it must be True or False, not {_shown(value)}")
            values[name] = bool(value)
        values["stop"], values["stop_token_ids"] = _stop(self.stop), _stop_token_ids(self.stop_token_ids)
        if values["max_tokens"] is not None and values["min_tokens"] > values["max_tokens"]:
            why = f"it is {values['min_tokens']}, and max_tokens is {values['max_tokens']}"
            raise ParameterError("min_tokens", why, "Raise max_tokens, or lower min_tokens.")
        if values["temperature"] < GREEDY_BELOW:
            values["temperature"] = 0.0
        values["top_k"] = max(values["top_k"], 0)
        if values["seed"] == -1:
            values["seed"] = None
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> SamplingParams:
        """Parameters by name, as a configuration file or a request's body has them."""
        return cls(**{str(name): value for name, value in given.items()})

    def check_against(self, vocab_size: int) -> None:
        """Raises `ParameterError` for a stop id that a vocabulary of this size does not have."""
        for i in self.stop_token_ids:
            if i >= vocab_size:
                why = f"{i} is not an id of this model, whose vocabulary ends at {vocab_size - 1}"
                raise ParameterError("stop_token_ids", why, "Use `encode` to find a token's id.")


def merged(defaults: Mapping[str, object], explicit: Mapping[str, object]) -> SamplingParams:
    """A request's explicit values over a model's defaults over `SamplingParams`' own.

    Args:
        defaults: a generation_config.json; names without a counterpart here and nulls are passed over, and
            `do_sample: false` means temperature 0.
        explicit: parameters by name, as the request gave them; each of them wins.
    """
    values = {ours: defaults[theirs] for theirs, ours in GENERATION_CONFIG.items() if defaults.get(theirs) is not None}
    if defaults.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        return SamplingParams.from_dict({**values, **explicit})
    except ParameterError as error:
        if error.field in explicit or error.field not in values:
            raise
        why = f"{error.why} (the model's generation_config.json sets it)"
        raise ParameterError(error.field, why, f"Give {error.field} with the request.") from None
