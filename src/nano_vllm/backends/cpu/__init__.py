"""The native CPU backend: a step is one call into `native/`, in which all ops of the program run with the GIL released."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType

from ...engine.backend import Ceilings, Probe
from ...errors import BackendUnavailable, OptionError
from ...formats import Tensor
from ...memory.machine import physical_cores
from ...memory.plan import Plan
from ...model.program import Program

RANK = 100
KV_DTYPE = "int16"
CACHE_TYPES = ("f32", "f16", "bf16", "int16", "int8")
OPTIONS = frozenset({"threads", "isa"})
MEND = "Build it with `pip install .` in the project's folder; that needs a C++20 compiler."


def probe(options) -> Probe:
    """Usable where the native module was built and has the instruction set that was asked for."""
    try:
        native = _native()
    except BackendUnavailable as error:
        return Probe(False, error.why, error.mend)
    sets, isa = native.instruction_sets(), getattr(options, "isa", None)
    if isa and isa not in sets:
        return Probe(False, f"no instruction set {isa!r} here", f"There are {', '.join(sets)}.")
    cores, why = physical_cores()
    details = {"instruction sets": ", ".join(sets), "cores": f"{cores} ({why})"}
    return Probe(True, f"native kernels for {isa or sets[0]} on {cores} cores", "", details)


def open(program: Program, weights: Mapping[str, Tensor], plan: Plan):
    """Packs one weight after the other; at most one is in memory twice.

    Raises:
        BackendUnavailable: the native module is not built.
        OptionError: an instruction set or cache type that is not here.
        ModelFileError: a weight is missing or has another shape.
        UnsupportedModel: a part that the kernels do not have.
        NotEnoughMemory: weights, cache or buffers cannot be allocated.
    """
    native = _native()
    if plan.isa and plan.isa not in native.instruction_sets():
        sets = ", ".join(native.instruction_sets())
        raise OptionError(
            f"no instruction set {plan.isa!r} here", f"this processor and build have {sets}", "Leave `isa` out for the widest."
        )
    if plan.kv_cache_dtype not in CACHE_TYPES:
        raise OptionError(f"the cpu backend has no cache type {plan.kv_cache_dtype!r}", f"there are {', '.join(CACHE_TYPES)}")
    from .session import Session

    return Session(native, program, weights, plan)


def ceilings(options) -> Ceilings:
    """What memory and multipliers do with the threads that a session would have; takes seconds."""
    from .rates import int8_peak, read_bandwidth

    threads = options.threads or physical_cores()[0]
    return Ceilings(read_bandwidth(threads), int8_peak(threads, options.isa), "int8")


def _native() -> ModuleType:
    try:
        return importlib.import_module("nano_vllm._native")
    except ImportError as error:
        raise BackendUnavailable(
            "the cpu backend cannot run here", f"its native module cannot be loaded: {error}", MEND
        ) from error
