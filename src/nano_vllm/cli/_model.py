"""Opening the model a command asks for."""

from __future__ import annotations

import argparse
from contextlib import contextmanager
from dataclasses import replace

from ..errors import OptionError
from . import _flags


def checked(args: argparse.Namespace) -> dict:
    """The sampling parameters that were given, checked before a model is loaded."""
    from ..sampling.params import SamplingParams

    given = _flags.asked(args, _flags.sampling_flags())
    SamplingParams(**given)
    return given


def named(args: argparse.Namespace) -> dict:
    """The options that were given, of a command whose first argument `name` is the model, too."""
    given = _flags.asked(args, _flags.model_flags())
    if args.name and given.setdefault("model", args.name) != args.name:
        raise OptionError("two models are named", f"{args.name!r} and {given['model']!r}", "Name one.")
    return given


@contextmanager
def loaded(args: argparse.Namespace):
    """The LLM of the flags; closed at the end."""
    from ..llm import LLM

    with LLM(**_flags.asked(args, _flags.model_flags())) as llm:
        yield llm


def params(llm, given: dict, **defaults):
    """What was given, else `defaults`, else what the model's own generation_config says."""
    return replace(llm.default_sampling_params(), **{**defaults, **given})
