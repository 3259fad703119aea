"""A team of threads that goes through phases of work together.

Every thread runs the same program. A phase is cut into chunks; whoever is free claims the next one, so
unequal or busy cores balance by themselves, and at the end of a phase each thread waits until every claimed
chunk is done. A thread that comes late finds the chunks of past phases claimed and done, and goes on to
where the others are; if it never comes, the others do all the work. No thread ever waits for one that has
not started.

Two int64 counters a phase, a cache line apart, start at zero: chunks claimed, and chunks done. Where the
number of chunks depends on what an earlier phase found, it is kept beside them: a thread that comes late
must not take the number of a later phase for that of a past one.
"""

from __future__ import annotations

import sys
from typing import Final

import numpy as np
from numba import prange, types

from cascadia_p2p.compiled.addresses import I64, call, fetch_add, load_acquire, longs, pause
from cascadia_p2p.compiled.compiling import part, twin_kernels

STRIDE: Final = 16
"""Int64 numbers a phase."""

_SPINS: Final = 4000
"""Looks at a counter before the core is offered to another thread."""

# What offers the core to another thread, by its name in the system's library.
_yield = types.ExternalFunction("SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32())


@part
def claim(counters: int, phase: int, chunks: int) -> int:
    """The next chunk of a phase for this thread, or -1 when all are claimed."""
    address = counters + phase * 8 * STRIDE
    if load_acquire(address) >= chunks:
        return -1
    chunk = fetch_add(address, 1)
    return chunk if chunk < chunks else -1


@part
def done(counters: int, phase: int) -> None:
    """Tell that a claimed chunk is done."""
    fetch_add(counters + phase * 8 * STRIDE + 64, 1)


@part
def announce(counters: int, phase: int, chunks: int) -> None:
    """Say how many chunks a later phase has; called in a chunk of an earlier one."""
    longs(counters + phase * 8 * STRIDE, 2)[1] = chunks


@part
def announced(counters: int, phase: int) -> int:
    """How many chunks a phase was said to have."""
    return int(longs(counters + phase * 8 * STRIDE, 2)[1])


@part
def wait(counters: int, phase: int, chunks: int) -> None:
    """Wait until all chunks of a phase are done."""
    address = counters + phase * 8 * STRIDE + 64
    looks = 0
    while load_acquire(address) < chunks:
        looks += 1
        if looks < _SPINS:
            pause()
        else:
            _yield()


@twin_kernels("(int64, int64, int64)")
def run_team(work: int, own: int, threads: int) -> None:
    """Let every thread of a team do a piece of work: a kernel that takes a record's address and a thread's
    number.

    Args:
        work: the kernel's address.
        own: the record's, which names counters that stand at zero.
        threads: of the team.
    """
    for thread in prange(threads):
        call(work, (own, thread))


def new_counters(phases: int) -> I64:
    """Counters for so many phases; zero them before every run."""
    whole = np.zeros(phases * STRIDE + STRIDE, np.int64)
    start = -whole.ctypes.data % (8 * STRIDE) // 8
    return whole[start : start + phases * STRIDE]
