"""What the device holds of this process, as its driver counts it: nvidia-smi's number, less what others hold."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

PIECE = 2**21  # bytes: the device gives memory in multiples of it
MOST_CONTEXT = 2**30  # bytes: what seems to be more is what another process took at the same time


class Held:
    """What a session makes the device hold. Only the device as a whole can be asked: what other processes take while the session
    is opened counts as its own.

    Args:
        context: bytes of CUDA's context, where this process took them for us.

    Attributes:
        before: bytes that others held when the session began to open.
        libraries: bytes of code, handles and stacks that came with the first steps; PyTorch's allocator knows nothing of them.
        graph: bytes of a captured step.
    """

    def __init__(self, device: torch.device, context: int) -> None:
        self.device, self.context, self.libraries, self.graph = device, context, 0, 0
        torch.cuda.empty_cache()  # else tensors would take what is counted already
        self.before = self.used() - context
        self._reserved = self.reserved()

    def used(self) -> int:
        """Bytes in use on the device, by anybody."""
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def reserved(self) -> int:
        """Bytes that PyTorch's allocator holds of the device."""
        return torch.cuda.memory_reserved(self.device)

    def total(self) -> int:
        """Bytes that the device holds for this process now."""
        return self.used() - self.before

    def tensors(self) -> int:
        """Bytes that PyTorch's allocator took for the session, with what it rounds up."""
        return self.reserved() - self._reserved

    def measure_libraries(self) -> None:
        """To be called once every kernel has run, and before graphs."""
        self.libraries = max(0, self.total() - self.tensors() - self.context)


def held(device: torch.device) -> Held | None:
    """None where the device is this machine's own memory."""
    return Held(device, context_bytes(device.index)) if device.type == "cuda" else None


@cache
def context_bytes(index: int) -> int:
    """Bytes that CUDA's context takes of a device. Makes it; 0 if it was there before, which then is not ours to count, or if
    there is no NVML to tell."""
    if torch._C._cuda_hasPrimaryContext(index):
        return 0
    before = nvml_used(index)
    torch.cuda.synchronize(index)  # makes it
    after = nvml_used(index)
    return min(MOST_CONTEXT, max(0, after - before)) if before is not None and after is not None else 0


def nvml_used(index: int) -> int | None:
    """Bytes in use on a device, as nvidia-smi has them; None where NVML is not, or does not tell. Makes no context."""
    memory, handle = (ctypes.c_ulonglong * 3)(), ctypes.c_void_p()  # total, free, used
    name = f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return None
        try:
            failed = library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
            failed = failed or library.nvmlDeviceGetMemoryInfo(handle, memory)
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return None if failed else memory[2]
