"""The backend for NVIDIA GPUs: PyTorch for memory, matrix products and streams, Triton kernels for what stands around them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ...engine.backend import Ceilings, Probe
from ...errors import BackendUnavailable, OptionError
from ...formats import Tensor, TensorInfo
from ...memory.machine import free_memory
from ...memory.plan import Device, Plan
from ...model.program import Program

RANK = 200
KV_DTYPE = "bf16"
OPTIONS = frozenset({"dtype", "gpu_memory_utilization", "device_memory_budget", "enforce_eager", "tensor_parallel_size"})
INSTALL = "pip install nano-vllm[cuda]"
DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvmap", "/dev/kfd", "/dev/dxg")  # what a card's driver makes on Linux
LEAST_BLOCK = 16  # tokens of a block at least: tables of larger ones are shorter
ROWS = 8192  # tokens of a step where none are asked for
OTHERS = 512 * 2**20  # for what is measured only when a session has run: the libraries' workspaces, kernels, graphs
COLLECTIVES = 2**30  # more, of several ranks: NCCL's buffers, and what a process of its own takes


def probe(options) -> Probe:
    """Usable where PyTorch sees a card and Triton is installed; with Triton's interpreter switched on (TRITON_INTERPRET=1), on
    the CPU, for tests, where it is asked for by name."""
    asked = getattr(options, "backend", None) == "cuda"
    if not asked and not any(Path(driver).exists() for driver in DRIVERS):
        return Probe(False, "there is no GPU here", notable=False)  # told before anything heavy is imported
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return Probe(False, f"{package} is not installed", f"Install it: {INSTALL}")
    import torch
    import triton

    if interpreted():
        if asked:
            return Probe(True, f"Triton {triton.__version__} interpreted on the CPU, very slow: for tests")
        return Probe(False, "Triton interprets its kernels (TRITON_INTERPRET)", "Unset TRITON_INTERPRET.", notable=False)
    if not torch.cuda.is_available():
        return Probe(False, "PyTorch sees no GPU", f"Install a PyTorch built for it ({INSTALL}), and its driver.")
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    details = {"device": name, "memory": f"{memory / 1e9:.1f} GB", "torch": torch.__version__, "triton": triton.__version__}
    return Probe(True, f"{name}, PyTorch {torch.__version__}, Triton {triton.__version__}", "", details)


def interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def device(options, infos: Mapping[str, TensorInfo]) -> Device:
    """What the plan must know of the card, or of the machine where kernels are interpreted. infos: of the weights."""
    import torch

    size = options.tensor_parallel_size
    how = (ROWS, partial(needs, infos, size), partial(part, size))
    if interpreted():
        free = free_memory() // size
        return Device("Triton's interpreter", free, free // 4, "f32", *how)
    if size > 1:
        _check_cards(size)
        free, total = (min(numbers) for numbers in zip(*map(torch.cuda.mem_get_info, range(size))))
        dtype = "bf16" if min(map(torch.cuda.get_device_capability, range(size))) >= (8, 0) else "f16"
        return Device(f"each of {size} GPUs ({torch.cuda.get_device_name(0)})", total, free, dtype, *how)
    from .memory import context_bytes

    context = context_bytes(torch.cuda.current_device())
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    dtype = "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "f16"
    name = torch.cuda.get_device_name()
    return Device(name, total, free + context, dtype, ROWS, lambda *sizes: context + needs(infos, 1, *sizes))


def _check_cards(size: int) -> None:
    import torch

    if (there := torch.cuda.device_count()) < size:
        raise OptionError(
            f"tensor_parallel_size = {size} needs as many GPUs",
            f"PyTorch sees {there}",
            f"Ask for at most {there}, or let it see more (CUDA_VISIBLE_DEVICES).",
        )


def part(size: int, program: Program) -> Program:
    """What each of `size` ranks runs of the program."""
    if size == 1:
        return program
    from .parallel.split import share

    return share(program, 0, size).program


def needs(
    infos: Mapping[str, TensorInfo], size: int, program: Program, dtype: str, rows: int, sequences: int, length: int
) -> int:
    """Bytes that a session takes beside its cache and CUDA's context, on each of `size` devices."""
    from .kernels.draw import Sampler
    from .layout import capacity
    from .steps import sizes
    from .weights import DTYPES, nbytes

    others = OTHERS
    if size > 1:
        from .parallel.split import cut_infos, share

        mine = share(program, 0, size)
        infos, program = cut_infos(infos, mine), mine.program
        others += 0 if interpreted() else COLLECTIVES
    buffers = sizes(program, DTYPES[dtype], rows, sequences).values()
    turns = sum(2 * 4 * len(rope.frequencies) * length for rope in program.ropes)
    inputs = 4 * (rows + capacity(rows, sequences, sequences * -(-length // LEAST_BLOCK)))
    total = sum(count * kind.itemsize for count, kind in buffers) + turns + inputs + Sampler.bytes(program.vocab_size, sequences)
    return nbytes(program, DTYPES[dtype], infos) + total + others


def open(program: Program, weights: Mapping[str, Tensor], plan: Plan):
    """Takes weights to the device one after the other. q8 and q4 stay packed, other quantised ones are unpacked.

    Raises:
        BackendUnavailable: PyTorch or Triton cannot be loaded, or there is no card.
        OptionError: a type that is not here, or a tensor_parallel_size that the model or the machine does not have.
        ModelFileError: a weight is missing or has another shape.
        UnsupportedModel: a part that the kernels do not have.
        NotEnoughMemory: weights, cache or buffers cannot be allocated.
        RankLost: of several processes, one ended.
    """
    size = plan.tensor_parallel_size
    try:
        import torch

        from .session import Session
    except ImportError as error:
        raise BackendUnavailable("the cuda backend cannot run here", str(error), f"Install it: {INSTALL}") from error
    card = not interpreted()
    if card and not torch.cuda.is_available():
        raise BackendUnavailable("the cuda backend cannot run here", "PyTorch sees no GPU", "Use backend cpu.")
    if size > 1:
        from .parallel.session import ParallelSession

        if card:
            _check_cards(size)
        return ParallelSession(program, weights, plan, size, card)
    if not card:
        return Session(program, weights, plan, torch.device("cpu"))
    return Session(program, weights, plan, torch.device("cuda", torch.cuda.current_device()))


def ceilings(options) -> Ceilings | None:
    """What the card reads and multiplies in the type that weights would have; None where kernels are interpreted."""
    if interpreted():
        return None
    from .rates import measured

    return measured(options.dtype)
