"""Programmatic dependent launch, where the card has it (capability 9 and later): a kernel starts while the one before it on the
stream still runs, reads what no kernel of a step writes (weights, the step's inputs, older keys), and waits before the rest.

Of two kernels launched so the later may begin once each program of the earlier has called `release`. Every program must call
`wait`, also one that has nothing to do: that the kernel before has ended must mean that all before it have.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

ENABLED = True  # the one switch


@triton.jit
def release(PDL: tl.constexpr):
    """Lets the next kernel start."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Returns when the kernels before have ended and what they wrote can be read."""
    if PDL:
        cuda.gdc_wait()


@lru_cache
def _has(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip or not hasattr(cuda, "gdc_wait"):
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def options(device: torch.device) -> dict[str, bool]:
    """The arguments with which a kernel that calls `wait` is launched."""
    return {"PDL": True, "launch_pdl": True} if ENABLED and _has(device) else {"PDL": False}
