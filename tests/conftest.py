"""Fixtures shared by all rings."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file in the cache folder; fetched by `nano-vllm pull smollm2` when it is not there."""
    from nano_vllm.sources.catalog import fetch

    return fetch("smollm2")
