"""What of a PC's memory a node may count on.

Memory is sold in binary units under decimal names: the modules of a "64 GB" PC hold 64 GiB. Firmware, what
the graphics reserves and the kernel take some of it before the system counts: such a PC shows about 61 GiB,
and the same share is taken for other sizes. So `64GB` means a PC as sold, `61GiB` what a system shows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cascadia_p2p.engine.footprint import Backend
from cascadia_p2p.errors import UsageError

GIB: Final = 2**30

SHOWN_SHARE: Final = 61 / 64
"""Share of the modules' memory that the system shows."""

LEFT_TO_SYSTEM: Final = 3 * GIB
"""What the system and a desktop need while a node works."""

GPU_SHARE: Final = 1 / 2
"""Share of the shown memory that an integrated GPU may take as shipped, on Linux (ttm) and on Windows."""

LEFT_BY_GPU: Final = 8 * GIB
"""What a lifted limit must leave to everything else, because pages of the GPU can not be reclaimed. Of 61 GiB
52 were in use on PCs that did this for weeks."""

GPU_ALLOCATION: Final = 4_294_959_104
"""Bytes of the largest single allocation of Intel's GPUs, without a slower addressing mode."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_AS_SOLD: Final = {"GB": GIB, "TB": 2**40}
_AS_SHOWN: Final = {"MIB": 2**20, "GIB": GIB, "TIB": 2**40}


class GpuMemory(StrEnum):
    """How much of a PC's memory its integrated GPU may take."""

    SHIPPED = "shipped"
    """Half."""
    LIFTED = "lifted"
    """All but what the rest needs."""

    def limit(self, shown: int) -> int:
        """Bytes for the GPU of a PC that shows so many."""
        half = int(shown * GPU_SHARE)
        return half if self is GpuMemory.SHIPPED else max(half, shown - LEFT_BY_GPU)


@dataclass(frozen=True, slots=True)
class Machine:
    """A PC as a node sees it.

    Args:
        name: for people.
        shown: bytes that the system says it has.
        usable: bytes for a node, the GPU's among them: it has no memory of its own.
        gpu: bytes that the GPU may take of these; None when the CPU multiplies.
    """

    name: str
    shown: int
    usable: int
    gpu: int | None = None


def make_machine(name: str, shown: int, left: int, backend: Backend, gpu: GpuMemory) -> Machine:
    """A PC that shows so many bytes, `left` of which are for others than the node."""
    limit = gpu.limit(shown) if backend.on_gpu else None
    return Machine(name, shown, max(shown - left, 0), limit)


def parse_memory(flag: str, text: str) -> int:
    """Bytes that a system shows, from `64GB` (a PC as sold) or `61GiB` (as shown).

    Raises:
        UsageError: no number with one of these units.
    """
    number, unit = _split(flag, text)
    if unit in _AS_SOLD:
        return int(number * _AS_SOLD[unit] * SHOWN_SHARE)
    return int(number * _AS_SHOWN[unit])


def is_as_sold(text: str) -> bool:
    """Whether an amount of memory that can be parsed is spelled as PCs are sold."""
    return _split("", text)[1] in _AS_SOLD


def parse_amount(flag: str, text: str) -> int:
    """Bytes from `3GiB`, `512MiB` or `3GB`; here GB is 10^9 bytes.

    Raises:
        UsageError: no number with one of these units.
    """
    number, unit = _split(flag, text)
    return int(number * _AS_SHOWN.get(unit, {"GB": 10**9, "TB": 10**12}.get(unit, 0)))


def _split(flag: str, text: str) -> tuple[float, str]:
    match = _SIZE.fullmatch(text)
    unit = "" if match is None else match[2].upper()
    if match is None or unit not in _AS_SOLD | _AS_SHOWN:
        raise UsageError(
            f"{flag} '{text}' is no amount of memory: expected a number with a unit, GB as PCs are sold "
            "(64GB), or GiB and MiB as systems show it (61GiB)"
        )
    return float(match[1]), unit


def gib(count: float) -> str:
    """Bytes in GiB, or in MiB when they are few."""
    return f"{count / GIB:.1f} GiB" if abs(count) >= GIB / 10 else f"{count / 2**20:.0f} MiB"


def gb(count: float) -> str:
    """Bytes in GB, or in MB when they are few."""
    return f"{count / 1e9:.1f} GB" if abs(count) >= 1e8 else f"{count / 1e6:.0f} MB"
