"""Plan: what was decided, with a reason per line. Resolved once per loaded model, then frozen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import NotEnoughMemory, OptionError
from ..model.program import Program
from ..options import Options
from .machine import format_bytes, free_memory, measured_free_memory, parse_bytes, physical_cores

# Cache type -> bytes of a number, and of the scale that a token's numbers share in each head.
CACHE_BYTES = {"f32": (4, 0), "f16": (2, 0), "bf16": (2, 0), "int16": (2, 4), "int8": (1, 4), "fp8": (1, 4)}
UTILIZATION = 0.9  # of a device's memory where nothing is asked for
HOST_ROWS = 512  # tokens of a step on the host, where none are asked for


@dataclass(frozen=True)
class Device:
    """A card with memory of its own, as its backend sees it before anything is loaded.

    Attributes:
        total, free: bytes; `free` before this process took any for CUDA itself.
        dtype: of weights and activations where none is asked for.
        rows: tokens of a step where none are asked for.
        needs: (program, dtype, rows, sequences, positions) -> bytes beside the cache, what CUDA itself takes included.
        part: program -> the part of it that the device runs, where several share a model.
    """

    name: str
    total: int
    free: int
    dtype: str
    rows: int
    needs: Callable[[Program, str, int, int, int], int]
    part: Callable[[Program], Program] = lambda program: program


@dataclass(frozen=True)
class Share:
    """What a device is to hold of this process.

    Attributes:
        budget: bytes at most.
        beside: bytes beside the cache: by arithmetic before loading, measured once the model has run (`settle`).
        block_bytes: of a block of the cache.
        least, most: blocks that will do, and that can be of use; the same where their number was asked for.
        promised: bytes that it was to hold as planned before loading, the cache included.
    """

    budget: int
    beside: int
    block_bytes: int
    least: int
    most: int
    promised: int


@dataclass(frozen=True)
class Plan:
    """Ceilings the session allocates from and the engine stays beneath.

    Attributes:
        kv_cache_dtype: a name of CACHE_BYTES.
        num_blocks: cache blocks of block_size tokens.
        threads, isa: of the CPU backend; isa "" is the widest there is.
        reasons: field name -> why it has its value.
        dtype, enforce_eager: of the CUDA backend: of weights and activations, "" elsewhere; no graphs.
        share: of a device with memory of its own, else None.
        tensor_parallel_size: GPUs; what the cache holds is then of each GPU's part.
    """

    backend: str
    kv_cache_dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    threads: int
    isa: str
    reasons: dict[str, str]
    dtype: str = "f32"
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    share: Share | None = None

    @property
    def device_bytes(self) -> int:
        """What the device will hold of this process, the cache included; 0 where there is no device."""
        return self.share.beside + self.num_blocks * self.share.block_bytes if self.share else 0


def kv_bytes_per_token(program: Program, dtype: str) -> int:
    """Keys and values of all layers, with their scales."""
    number, scale = CACHE_BYTES[dtype]
    return sum(2 * c.kv_heads * (c.head_size * number + scale) for c in program.caches)


def resolve(options: Options, program: Program, backend: str, default_kv_dtype: str, device: Device | None = None) -> Plan:
    """Options and model -> Plan. Raises NotEnoughMemory with the arithmetic, OptionError for what cannot be had together."""
    why: dict[str, str] = {name: "as asked or by default" for name in ("block_size", "max_num_seqs", "max_num_batched_tokens")}
    why["tensor_parallel_size"] = "as asked; bytes are of each of them"
    numbers, why["dtype"] = options.dtype, "as asked"
    if numbers == "auto":
        numbers, why["dtype"] = (device.dtype, f"the best of {device.name}") if device else ("", "")
    dtype, why["kv_cache_dtype"] = options.kv_cache_dtype, "as asked"
    if dtype == "auto":
        dtype, why["kv_cache_dtype"] = default_kv_dtype, f"the {backend} backend's default"
        if device:
            dtype, why["kv_cache_dtype"] = numbers, "that of the activations"
    block_bytes = options.block_size * kv_bytes_per_token(device.part(program) if device else program, dtype)
    batched = options.max_num_batched_tokens or (device.rows if device else HOST_ROWS)
    memory = _Memory.of(options, program, device, numbers, batched)
    num_blocks, why["num_blocks"] = _blocks(options, program, block_bytes, memory)
    tokens = num_blocks * options.block_size
    max_model_len, why["max_model_len"] = _max_model_len(options, program, tokens, block_bytes)
    if batched > tokens:
        batched, why["max_num_batched_tokens"] = tokens, f"what the cache holds, which is less than {batched:,}"
    threads, why["threads"] = (options.threads, "as asked") if options.threads else physical_cores()
    why["isa"] = "as asked" if options.isa else "the widest this processor has"
    why["backend"] = "as asked" if options.backend != "auto" else "the fastest that is usable here"
    return Plan(
        backend=backend,
        kv_cache_dtype=dtype,
        block_size=options.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=batched,
        threads=threads,
        isa=options.isa or "",
        reasons=why,
        dtype=numbers,
        enforce_eager=options.enforce_eager,
        tensor_parallel_size=options.tensor_parallel_size,
        share=memory.share(options, program, num_blocks, block_bytes) if device else None,
    )


def settle(plan: Plan, beside: int) -> Plan:
    """The plan of a device once it was measured to hold `beside` bytes beside the cache: the cache gets what the budget leaves.

    Raises NotEnoughMemory where that is less than was asked for.
    """
    share = plan.share
    left = max(0, share.budget - beside)
    blocks = min(share.most, left // share.block_bytes)
    if blocks < share.least:
        raise NotEnoughMemory(
            f"a cache of {share.least:,} blocks does not fit the device",
            f"{format_bytes(share.least * share.block_bytes)} are needed; of {format_bytes(share.budget)} the model took "
            f"{format_bytes(beside)} once it ran, {format_bytes(share.beside)} were expected",
            "Give a larger device_memory_budget or gpu_memory_utilization, or ask for a smaller cache or max_model_len.",
        )
    reason = f"{format_bytes(left)} left of {format_bytes(share.budget)}, measured / {format_bytes(share.block_bytes)} per block"
    if blocks == share.most:
        reason = plan.reasons.get("num_blocks", "") if blocks == plan.num_blocks else "all that can be of use"
    return replace(with_blocks(plan, blocks, reason), share=replace(share, beside=beside))


def with_blocks(plan: Plan, blocks: int, reason: str) -> Plan:
    """The plan with another number of blocks; requests and steps are no longer than they hold."""
    tokens = blocks * plan.block_size
    return replace(
        plan,
        num_blocks=blocks,
        max_model_len=min(plan.max_model_len, tokens),
        max_num_batched_tokens=min(plan.max_num_batched_tokens, tokens),
        reasons=plan.reasons | {"num_blocks": reason},
    )


@dataclass(frozen=True)
class _Memory:
    """Where the cache goes.

    Attributes:
        free: bytes that it may take (None: the system does not tell).
        budget: bytes that it gets unasked.
        beside: bytes that a device holds beside it.
    """

    free: int | None
    budget: int
    reason: str
    beside: int = 0

    @classmethod
    def of(cls, options: Options, program: Program, device: Device | None, dtype: str, rows: int) -> _Memory:
        if device is None:
            free = free_memory()
            return cls(measured_free_memory(), free // 4, f"a quarter of {format_bytes(free)} free")
        need = device.needs(program, dtype, rows, options.max_num_seqs, options.max_model_len or program.context)
        if options.device_memory_budget is not None:
            limit = budget = parse_bytes(options.device_memory_budget)
            source = "device_memory_budget"
            if budget > device.free:
                raise NotEnoughMemory(
                    "device_memory_budget is more than the device has free",
                    f"it is {format_bytes(budget)}; {format_bytes(device.free)} of {device.name} are free",
                    f"Ask for at most {device.free}.",
                )
        else:
            share = options.gpu_memory_utilization or UTILIZATION
            budget, source = int(share * device.total) - (device.total - device.free), f"{share:.3g} of {device.name}'s memory"
            limit = budget if options.gpu_memory_utilization else device.free
        reason = f"{source}, {format_bytes(budget)} of it free, without {format_bytes(need)} for weights and buffers"
        return cls(max(0, limit - need), max(0, budget - need), reason, need)

    def share(self, options: Options, program: Program, blocks: int, block_bytes: int) -> Share:
        """Of a device, for a cache of so many blocks."""
        promised = self.beside + blocks * block_bytes
        if options.num_blocks is not None or options.kv_cache_memory is not None:
            return Share(self.beside + self.free, self.beside, block_bytes, blocks, blocks, promised)
        least = -(-(options.max_model_len or 1) // options.block_size)
        return Share(self.beside + self.budget, self.beside, block_bytes, least, _enough(options, program), promised)


def _blocks(options: Options, program: Program, block_bytes: int, memory: _Memory) -> tuple[int, str]:
    if options.num_blocks is not None:
        _check_fits(options.num_blocks, block_bytes, memory.free)
        return options.num_blocks, "num_blocks as asked"
    if options.kv_cache_memory is not None:
        budget, source = parse_bytes(options.kv_cache_memory), "kv_cache_memory"
    else:
        budget, source = memory.budget, memory.reason
    blocks = budget // block_bytes
    if blocks < 1:
        raise NotEnoughMemory(
            "the cache holds no block",
            f"one block of {options.block_size} tokens takes {format_bytes(block_bytes)}; {source} gives {format_bytes(budget)}",
            f"Give kv_cache_memory at least {format_bytes(block_bytes)}.",
        )
    _check_fits(blocks, block_bytes, memory.free)
    enough = _enough(options, program)
    if options.kv_cache_memory is None and blocks > enough:
        return enough, f"{options.max_num_seqs} requests of {options.max_model_len or program.context:,} tokens"
    return blocks, f"{format_bytes(budget)} ({source}) / {format_bytes(block_bytes)} per block"


def _enough(options: Options, program: Program) -> int:
    """Blocks beyond which no request could use any."""
    return options.max_num_seqs * -(-(options.max_model_len or program.context) // options.block_size)


def _check_fits(blocks: int, block_bytes: int, free: int | None) -> None:
    """The system would hand out addresses for more than it has, and end the process once they are written to."""
    need = blocks * block_bytes
    if free is not None and need > free:
        raise NotEnoughMemory(
            f"a cache of {blocks:,} blocks does not fit the memory",
            f"{blocks:,} x {format_bytes(block_bytes)} are {format_bytes(need)}; {format_bytes(free)} are free",
            f"Ask for num_blocks of at most {free // block_bytes}, or for a smaller kv_cache_memory.",
        )


def _max_model_len(options: Options, program: Program, tokens: int, block_bytes: int) -> tuple[int, str]:
    if options.max_model_len is None:
        if program.context <= tokens:
            return program.context, "what the model was trained for"
        return tokens, f"what the cache holds; the model was trained for {program.context:,}"
    if options.max_model_len > program.context:
        raise OptionError(
            f"max_model_len {options.max_model_len:,} is beyond the model's context",
            f"it was trained for {program.context:,} positions",
            f"Ask for at most {program.context}.",
        )
    if options.max_model_len > tokens:
        need = -(-options.max_model_len // options.block_size) * block_bytes
        raise NotEnoughMemory(
            f"a request of max_model_len {options.max_model_len:,} does not fit the cache",
            f"it needs {format_bytes(need)}; the cache holds {tokens:,} tokens",
            f"Ask for max_model_len of at most {tokens}, or raise kv_cache_memory or num_blocks.",
        )
    return options.max_model_len, "as asked"
