"""Decides when a changed network asks for another address, or for announcing again; pure, clock handed in."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from cascadia_p2p.discovery.interfaces import Address, Interface, choose_address
from cascadia_p2p.errors import UsageError

__all__ = ["Change", "NetworkWatch"]

_JUMP = 10.0
"""Seconds by which the wall clock must outrun the monotonic one to mean that the machine slept."""

_MISSES = 2


class Change(Enum):
    """What a look at the network found."""

    NONE = "none"
    AGAIN = "again"
    """Same address, but the link came back or the machine slept: announce and ask again."""
    MOVED = "moved"
    """Another address."""


class NetworkWatch:
    """Follows the address of a node through changes of the network.

    An address is kept as long as it is usable, and also while nothing better is: a pulled cable must not turn
    a node of a fleet into a lonely one on 127.0.0.1. Moving takes two looks, because a lease that is renewed
    leaves no address for a moment.

    Args:
        bind: what the user asked for, if anything.
        address: the address in use.
    """

    def __init__(self, bind: str | None, address: Address) -> None:
        self.address = address
        self._bind = bind
        self._present = True
        self._misses = 0
        self._clocks: tuple[float, float] | None = None

    def look(self, interfaces: Sequence[Interface], monotonic: float, wall: float) -> Change:
        """Judge the interfaces as they are now.

        Args:
            interfaces: from `list_interfaces`.
            monotonic: seconds of the clock that stands still in sleep.
            wall: seconds of the clock that does not.
        """
        slept = self._slept(monotonic, wall)
        here = any(
            interface.up and self.address.ip in interface.addresses
            for interface in interfaces
            if not self.address.warning
        )
        wanted = None if here else self._wanted(interfaces)
        self._misses = 0 if wanted is None or wanted.ip == self.address.ip else self._misses + 1
        if wanted is not None and self._misses >= _MISSES:
            self.address, self._present, self._misses = wanted, True, 0
            return Change.MOVED
        came_back = here and not self._present
        self._present = here or bool(self.address.warning)
        return Change.AGAIN if came_back or slept else Change.NONE

    def _wanted(self, interfaces: Sequence[Interface]) -> Address | None:
        try:
            wanted = choose_address(self._bind, interfaces)
        except UsageError:
            return None
        return None if wanted.warning or (self._bind is None and wanted.loopback) else wanted

    def _slept(self, monotonic: float, wall: float) -> bool:
        before, self._clocks = self._clocks, (monotonic, wall)
        return before is not None and (wall - before[1]) - (monotonic - before[0]) > _JUMP
