"""Options: what was asked. The only module that reads environment variables; each of them is also an option."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from numbers import Integral
from pathlib import Path

from . import registry
from .errors import OptionError, UnknownOption
from .memory.machine import parse_bytes, usable_cpus

ENVIRONMENT = {"cache_dir": "NANO_VLLM_CACHE", "log_level": "NANO_VLLM_LOG_LEVEL", "isa": "NANO_VLLM_ISA"}


@dataclass(frozen=True)
class Options:
    """Options of a model and its engine. vLLM's names where vLLM has one.

    Attributes:
        model: alias, Hugging Face id, folder, .nano or .gguf file.
        tokenizer: folder or tokenizer.json to use instead of the model's own.
        backend: auto, or a file's name in backends/ (cpu, cuda, reference).
        revision: of a Hugging Face id.
        dtype: of weights and activations on a GPU: auto (bf16 where it has that, else f16), bf16, f16, f32.
        kv_cache_dtype: auto (int16 on cpu, f32 on reference, dtype on cuda), f32, f16, bf16, int16 (not on cuda), int8,
            fp8 (e4m3; not on cpu, and on cards from compute capability 8.9 on); the last three with a scale per token and head.
            int8 and fp8 hold nearly twice the tokens of 16-bit types in the same memory. fp8_e4m3 is fp8.
        block_size: tokens per cache block, a power of two from 16 to 1024.
        num_blocks: of the cache; wins over kv_cache_memory.
        kv_cache_memory: bytes for the cache ("512MB", 1.5e9); default a quarter of the free memory, or what is left of a GPU's
            share; no more than max_num_seqs requests of full length need.
        gpu_memory_utilization: share of a GPU's memory that may be filled, what others use already included; default 0.9.
        device_memory_budget: bytes of a GPU that weights, cache, buffers and CUDA itself may take together; one of the two.
        tensor_parallel_size: GPUs that each layer is divided among, a process each.
        max_model_len: longest prompt and answer together, at least 2; default what the model was trained for, if the cache
            holds it.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens computed in one step, no more than the cache holds; longer prompts are computed in chunks;
            default 512, on a GPU 8192.
        enable_prefix_caching: keep the blocks of finished requests for prompts that begin alike.
        scheduler_policy: a file's name in policies/ (fifo, priority); "fcfs" is fifo.
        threads: of the CPU backend, no more than the processors this process may use; default the physical cores among them.
        isa: instruction set of the CPU backend (generic, avx2, avx512, amx, neon, neon_dotprod); default: the processor's widest.
        enforce_eager: on a GPU, launch every kernel of every step instead of capturing steps as graphs.
        seed: from which requests without one draw theirs; None: from the operating system.
        cache_dir: where downloads of aliases go.
        log_level: debug, info, warning, error.
    """

    model: str = "smollm2"
    tokenizer: str | None = None
    revision: str | None = None
    backend: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | float | str | None = None
    gpu_memory_utilization: float | None = None
    device_memory_budget: int | float | str | None = None
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    scheduler_policy: str = "fifo"
    threads: int | None = None
    isa: str | None = None
    enforce_eager: bool = False
    seed: int | None = None
    cache_dir: str | None = None
    log_level: str = "warning"


def options(**asked) -> Options:
    """Options from keywords, then the environment, then defaults. Unknown names and wrong values raise with the mend."""
    known = {f.name for f in fields(Options)}
    for name in asked:
        if name not in known:
            mend = registry.nearest(name, known) or f"Options are: {', '.join(sorted(known))}."
            raise UnknownOption(f"no option {name!r}", "", mend)
    for name, variable in ENVIRONMENT.items():
        if asked.get(name) is None and os.environ.get(variable):
            asked[name] = os.environ[variable]
    return check(Options(**asked))


def cache_dir(opts: Options | None = None) -> Path:
    """The folder for downloads: the option, NANO_VLLM_CACHE, or the user's cache folder (XDG)."""
    asked = (opts.cache_dir if opts else None) or os.environ.get(ENVIRONMENT["cache_dir"])
    try:
        if asked:
            return Path(asked).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nano-vllm"
    except RuntimeError as error:  # a user without a home
        mend = "Name one with NANO_VLLM_CACHE or --cache-dir."
        raise OptionError("there is no folder for downloads", str(error), mend) from None


def check(opts: Options) -> Options:
    """Returns the options, or raises OptionError for the first value that cannot be meant."""

    integers = {f.name: getattr(opts, f.name) for f in fields(opts) if isinstance(getattr(opts, f.name), Integral)}
    opts = replace(opts, **{name: int(value) for name, value in integers.items() if not isinstance(value, bool)})  # NumPy's

    def refuse(name: str, why: str, mend: str = "") -> None:
        raise OptionError(f"option {name} = {getattr(opts, name)!r} is not valid", why, mend)

    for name in ("block_size", "max_num_seqs", "tensor_parallel_size"):
        if not _is_count(getattr(opts, name)):
            refuse(name, "it is a whole number of at least 1")
    for name in ("num_blocks", "max_model_len", "max_num_batched_tokens", "threads"):
        if getattr(opts, name) is not None and not _is_count(getattr(opts, name)):
            refuse(name, "it is a whole number of at least 1")
    if not 16 <= opts.block_size <= 1024 or opts.block_size & (opts.block_size - 1):
        refuse("block_size", "it is a power of two from 16 to 1024")
    if opts.max_model_len == 1:
        refuse("max_model_len", "the least is 2: one token of the prompt, one of the answer")
    if opts.threads is not None and opts.threads > (cpus := usable_cpus()):
        why = f"this process may use {cpus} processors, and a thread without one makes all others wait"
        refuse("threads", why, f"Ask for at most {cpus}, or leave it out to use the physical cores.")
    for name in ("kv_cache_memory", "device_memory_budget"):
        if getattr(opts, name) is not None:
            try:
                parse_bytes(getattr(opts, name))
            except ValueError:
                refuse(name, "it is a number of bytes", 'Write it as 1.5e9, "512MB" or "2GiB".')
    share = opts.gpu_memory_utilization
    if share is not None:
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            refuse("gpu_memory_utilization", "it is a number above 0 and at most 1")
        if opts.device_memory_budget is not None:
            refuse("gpu_memory_utilization", "device_memory_budget says the same in bytes", "Give one of the two.")
    policies = {"fcfs": "fifo"} | {name: name for name in registry.names("policies")}
    for name, choices in (
        ("backend", ("auto", *registry.names("backends"))),
        ("dtype", ("auto", "bf16", "f16", "f32")),
        ("kv_cache_dtype", ("auto", "f32", "f16", "bf16", "int16", "int8", "fp8", "fp8_e4m3")),
        ("scheduler_policy", tuple(policies)),
        ("log_level", ("debug", "info", "warning", "error")),
    ):
        if getattr(opts, name) not in choices:
            refuse(name, f"it is one of {', '.join(choices)}")
    for name in ("enable_prefix_caching", "enforce_eager"):
        if not isinstance(getattr(opts, name), bool):
            refuse(name, "it is True or False")
    if opts.seed is not None and (isinstance(opts.seed, bool) or not isinstance(opts.seed, int) or opts.seed < 0):
        refuse("seed", "it is a whole number of at least 0")
    for name in ("model", "tokenizer", "revision", "isa", "cache_dir"):
        value = getattr(opts, name)
        if not isinstance(value, (str, os.PathLike, type(None))) or (name == "model" and not value):
            refuse(name, "it is a name or a path")
    kept = {"fp8_e4m3": "fp8"}.get(opts.kv_cache_dtype, opts.kv_cache_dtype)
    return replace(opts, scheduler_policy=policies[opts.scheduler_policy], kv_cache_dtype=kept)


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31
