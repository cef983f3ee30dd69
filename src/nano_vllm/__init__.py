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

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .errors import NanoVLLMError
    from .llm import LLM
    from .outputs import CompletionOutput, RequestOutput, StreamPiece
    from .sampling.params import SamplingParams


def __getattr__(name: str):
    if name in _NAMES:
        return getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    if name == "__version__":
        from .version import version

        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
