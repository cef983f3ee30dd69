"""Fixtures shared by all rings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Without a card, Triton's kernels are interpreted. Triton reads this when it is imported, which transformers may do.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file in the cache folder; fetched by `nano-vllm pull smollm2` when it is not there."""
    from nano_vllm.sources.catalog import fetch

    return fetch("smollm2")
