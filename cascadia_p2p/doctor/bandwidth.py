"""Measures how many bytes a second the CPU reads from memory, because decoding is bound by that."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import psutil

_BUFFER: Final = 512 * 2**20
"""Bytes that are read: much more than any cache holds."""

_LEAST_BUFFER: Final = 64 * 2**20
_SHARE: Final = 8
_LEAST_SAMPLES: Final = 5
_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What was measured.

    Args:
        rate: bytes a second, the median.
        lowest, highest: of all samples.
        samples: how many, the warming up not counted.
        threads: that read at once.
    """

    rate: float
    lowest: float
    highest: float
    samples: int
    threads: int


def measure_bandwidth(threads: int, seconds: float = _SECONDS, size: int | None = None) -> Bandwidth:
    """Read a buffer with so many threads for about so many seconds.

    Args:
        threads: that read at once.
        seconds: to go on.
        size: bytes of the buffer; None for much more than any cache, or less where little is free.
    """
    if size is None:
        available = int(psutil.virtual_memory().available)
        size = max(min(_BUFFER, available // _SHARE), _LEAST_BUFFER)
    # Written, not only reserved: untouched pages are all one page of zeros.
    buffer = np.full(size, 1, np.uint8)
    parts = np.array_split(buffer, threads)
    with ThreadPoolExecutor(threads) as pool:
        rates = sample_rates(partial(_read, pool, parts), size, seconds, time.perf_counter)
    return Bandwidth(statistics.median(rates), min(rates), max(rates), len(rates), threads)


def sample_rates(
    work: Callable[[], object], size: int, seconds: float, clock: Callable[[], float]
) -> list[float]:
    """Bytes a second of each call of `work`, which goes through `size` bytes.

    The first call warms up and does not count. Calls go on until so many seconds are over, and at least five
    times; what a short disturbance does to one of them leaves their median alone.
    """
    work()
    rates: list[float] = []
    end = clock() + seconds
    while len(rates) < _LEAST_SAMPLES or clock() < end:
        start = clock()
        work()
        rates.append(size / max(clock() - start, 1e-9))
    return rates


def _read(pool: ThreadPoolExecutor, parts: list[npt.NDArray[np.uint8]]) -> None:
    # Exclusive or runs as wide vectors and without the interpreter's lock.
    for _ in pool.map(np.bitwise_xor.reduce, parts):
        pass
