"""Checks how much memory a node may use here, how fast it is, and what the model at hand needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import psutil

from cascadia_p2p.doctor.bandwidth import Bandwidth, measure_bandwidth
from cascadia_p2p.doctor.finding import Finding, Level
from cascadia_p2p.doctor.host import Host
from cascadia_p2p.engine.memory import MemoryNeed, in_words, require_memory
from cascadia_p2p.errors import CapacityError
from cascadia_p2p.types import Promise

_CGROUPS: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_NO_LIMIT: Final = 2**60
_LITTLE: Final = 0.5
"""Less than this share free is worth a word."""

_SLOW: Final = 8e9
_UNEVEN: Final = 1.8


def check_memory(host: Host) -> Finding:
    """What is there and what is free; a GPU without memory of its own takes from the same."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return judge_memory(host, int(memory.total), int(memory.available), int(swap.used))


def judge_memory(host: Host, total: int, available: int, swapped: int) -> Finding:
    """As `check_memory`, of what the system said.

    Args:
        host: tells the limit of a container.
        total: bytes that the system has.
        available: bytes that it can give without paging.
        swapped: bytes that are paged out.
    """
    facts = {"total": total, "available": available, "swapped": swapped}
    limit = container_limit(host)
    message = f"{in_words(available)} of {in_words(total)} free for a node, a GPU's share included"
    if limit is not None and limit[0] - limit[1] < available:
        room = max(limit[0] - limit[1], 0)
        return Finding(
            "memory",
            Level.WARN,
            f"{message}, but this container may take only {in_words(room)} more (limit {in_words(limit[0])})",
            "raise the container's memory limit",
            facts | {"container_limit": limit[0], "container_used": limit[1]},
        )
    if available < _LITTLE * total:
        return Finding("memory", Level.WARN, message, "close other programs before a node loads", facts)
    if swapped > total / 16:
        return Finding(
            "memory",
            Level.WARN,
            f"{message}; {in_words(swapped)} are paged out",
            "close other programs: weights that get paged out make every token wait for the disk",
            facts,
        )
    return Finding("memory", Level.OK, message, facts=facts)


def container_limit(host: Host) -> tuple[int, int] | None:
    """The memory limit of this process's container and what it uses, in bytes; None without a limit."""
    for most, used in _CGROUPS:
        limit, taken = host.number(most), host.number(used)
        if limit is not None and limit < _NO_LIMIT:
            return limit, taken or 0
    return None


def check_bandwidth(threads: int, measure: Callable[[int], Bandwidth] = measure_bandwidth) -> Finding:
    """How fast memory is read."""
    try:
        found = measure(threads)
    except MemoryError:
        return Finding("bandwidth", Level.WARN, "too little memory is free to measure its speed")
    message = (
        f"{found.rate / 1e9:.1f} GB/s read by {found.threads} threads "
        f"({found.lowest / 1e9:.1f} to {found.highest / 1e9:.1f} in {found.samples} samples)"
    )
    facts = {
        "bytes_s": found.rate,
        "lowest": found.lowest,
        "highest": found.highest,
        "samples": found.samples,
        "threads": found.threads,
    }
    if found.rate < _SLOW:
        return Finding(
            "bandwidth",
            Level.WARN,
            message,
            "very slow: see that both memory channels are filled and that the power plan is not saving",
            facts,
        )
    if found.highest > _UNEVEN * found.lowest:
        return Finding(
            "bandwidth",
            Level.WARN,
            message,
            "uneven: other programs compute or read memory at the same time; close them and look again",
            facts,
        )
    return Finding("bandwidth", Level.OK, message, facts=facts)


def check_need(
    shard: int, need_of: Callable[[Promise], MemoryNeed], promise: Promise, available: int
) -> Iterator[Finding]:
    """Whether a shard fits with what would be promised, and how much more would.

    Args:
        shard: its index, for people.
        need_of: memory for any promise.
        promise: what a node would promise.
        available: bytes.
    """
    name = f"shard {shard}"
    try:
        need = require_memory(need_of, promise, available)
    except CapacityError as error:
        yield Finding("room", Level.FAIL, f"{name}: {error}", facts={"shard": shard, "available": available})
        return
    slots = largest(promise.slots, lambda n: need_of(replace(promise, slots=n)).total <= available)
    yield Finding(
        "room",
        Level.OK,
        f"{name} needs {in_words(need.total)} for {promise.slots} slots of {promise.context} positions; "
        f"{in_words(available)} would hold {slots} such slots",
        facts={"shard": shard, "need": need.total, "available": available, "most_slots": slots},
    )


def largest(enough: int, fits: Callable[[int], bool], limit: int = 1 << 16) -> int:
    """The largest number up to `limit` that fits, where `enough` fits and whatever is below one that fits."""
    low = enough
    while low < limit and fits(min(2 * low, limit)):
        low = min(2 * low, limit)
    high = min(2 * low, limit)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
