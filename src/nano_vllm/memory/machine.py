"""What this process may use: memory and cores, container limits included."""

from __future__ import annotations

import math
import os
from pathlib import Path

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(value: int | float | str) -> int:
    """Bytes from 1500000, 1.5e6, "512MB", "1.2 GiB", "512m"; ValueError for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number, unit = float(value), ""
    elif isinstance(value, str):
        text = value.strip().upper().removesuffix("B")
        digits = text.rstrip("KMGTI ")
        number, unit = float(digits), text[len(digits) :].strip()
    else:
        raise ValueError(f"{value!r} is no number of bytes")
    if unit not in _UNITS or not 0 <= number < 2**63 / _UNITS[unit]:
        raise ValueError(f"{value!r} is no number of bytes")
    return int(number * _UNITS[unit])


def format_bytes(n: float) -> str:
    """1234567 -> "1.2 MB", in powers of ten as disks and options count."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 999.5 or unit == "GB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().split()[0]
        return None if text == "max" else int(text)
    except (OSError, ValueError, IndexError):
        return None


def free_memory() -> int:
    """Bytes that can still be had; where the system does not tell, half of what the machine has."""
    measured = measured_free_memory()
    if measured is not None:
        return measured
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return 4 * 10**9


def measured_free_memory() -> int | None:
    """The machine's available memory, or what the container leaves, if less; None where the system does not tell.

    Reclaimable page cache counts as free on the machine (MemAvailable) and inside the container (inactive_file).
    """
    free = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    for limit_file, usage_file, stat_file in _memory_cgroups():
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is not None and usage is not None and limit < 2**60:
            free.append(max(0, limit - usage + _inactive_file(stat_file)))
    return min(free, default=None)


def trim() -> None:
    """Hands memory that was freed back to the system: glibc keeps what was freed in small pieces, over 100 MB after a model."""
    import ctypes

    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library, which has no such call
        pass


def _memory_cgroups() -> list[tuple[str, str, str]]:
    """(limit, usage, stat) files of this process's memory cgroup and of the root as a container sees it, v2 and v1."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, root = ("memory.max", "memory.current", "memory.stat"), "/sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names, root = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"), "/sys/fs/cgroup/memory"
        else:
            continue
        for folder in {root + path.rstrip("/"), root}:
            found.append(tuple(f"{folder}/{n}" for n in names))
    return found


def _inactive_file(stat_file: str) -> int:
    try:
        for line in Path(stat_file).read_text().splitlines():
            key, value = line.split()
            if key in ("inactive_file", "total_inactive_file"):
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def physical_cores() -> tuple[int, str]:
    """Cores for compute threads, and why: one per physical core this process may run on, within the container's CPU quota."""
    siblings = set()
    for cpu in _allowed_cpus():
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            siblings.add(str(cpu))
    cores, reason = len(siblings), "physical cores this process may use"
    quota = _cpu_quota()
    if quota is not None and quota < cores:
        cores, reason = max(1, int(quota)), f"the container's CPU quota of {quota:.3g}"
    return cores, reason


def usable_cpus() -> int:
    """Processors (hardware threads) that this process can keep busy at once, the container's CPU quota rounded up."""
    cpus, quota = len(_allowed_cpus()), _cpu_quota()
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))


def _allowed_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _cpu_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        quota, period = _number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), _number("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
        return quota / period if quota and period and quota > 0 else None
