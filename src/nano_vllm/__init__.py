"""Nano-vLLM: the LLM engine that fits. Public names are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_NAMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "SamplingParams": "sampling.params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "StreamPiece": "outputs",
    "NanoVLLMError": "errors",
}
__all__ = [*_NAMES, "__version__"]

if TYPE_CHECKING:  # for editors and type checkers, which do not run __getattr__
    from .async_llm import AsyncLLM as AsyncLLM
    from .errors import NanoVLLMError as NanoVLLMError
    from .llm import LLM as LLM
    from .outputs import CompletionOutput as CompletionOutput
    from .outputs import RequestOutput as RequestOutput
    from .outputs import StreamPiece as StreamPiece
    from .sampling.params import SamplingParams as SamplingParams


def __getattr__(name: str):
    if name in _NAMES:
        return getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    if name == "__version__":
        from .version import version

        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
