"""The faulty twin of the data plane: drops, repeats, swaps and delays messages by a seeded plan."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cascadia_p2p.transport.interfaces import FrameReceiver, FrameSender, FrameTransport
from cascadia_p2p.types import Endpoint


@dataclass(frozen=True, slots=True)
class Faults:
    """How often each fault happens, as shares of the messages (their sum at most 1); the delay in seconds.

    After `most` faults all is well.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.001
    seed: int = 0
    most: int = 1 << 62


@dataclass(slots=True)
class FaultCounts:
    """What has been done so far."""

    sent: int = 0
    dropped: int = 0
    duplicated: int = 0
    reordered: int = 0
    delayed: int = 0

    @property
    def faults(self) -> int:
        """Of any kind."""
        return self.dropped + self.duplicated + self.reordered + self.delayed


class FaultyTransport:
    """Wraps a transport; every sender made by it commits the planned faults, receivers are honest."""

    def __init__(
        self, inner: FrameTransport, faults: Faults, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._inner = inner
        self._faults = faults
        self._sleep = sleep
        self._made = 0
        self.counts = FaultCounts()
        self.active = True
        """Faults happen only while this is true."""

    def bind(self, host: str, port: int, *, max_part: int) -> FrameReceiver:
        """An honest receiver."""
        return self._inner.bind(host, port, max_part=max_part)

    def connect(self, endpoint: Endpoint) -> FaultySender:
        """A faulty sender with a plan of its own."""
        self._made += 1
        draw = random.Random(f"{self._faults.seed}/{self._made}")
        return FaultySender(self, self._inner.connect(endpoint), self._faults, draw, self._sleep)


class FaultySender:
    """A sender that now and then does not what it should; see `FrameSender`."""

    def __init__(
        self,
        owner: FaultyTransport,
        inner: FrameSender,
        faults: Faults,
        draw: random.Random,
        sleep: Callable[[float], None],
    ) -> None:
        self._owner = owner
        self._inner = inner
        self._faults = faults
        self._draw = draw
        self._sleep = sleep
        self._held: tuple[bytes | bytearray, npt.NDArray[np.float32] | None] | None = None

    def send(self, header: bytes | bytearray, payload: npt.NDArray[np.float32] | None) -> bool:
        """Hand over one message, or not, or twice, or behind the next one."""
        counts, faults = self._owner.counts, self._faults
        counts.sent += 1
        at = self._draw.random() if self._owner.active and counts.faults < faults.most else 1.0
        if at < faults.drop:
            counts.dropped += 1
            return True
        at -= faults.drop
        if at < faults.duplicate:
            counts.duplicated += 1
            return self._pass(header, payload) and self._inner.send(header, payload)
        at -= faults.duplicate
        if at < faults.reorder and self._held is None:
            counts.reordered += 1
            self._held = (header, payload)
            return True
        at -= faults.reorder
        if 0 <= at < faults.delay:
            counts.delayed += 1
            self._sleep(faults.delay_s)
        return self._pass(header, payload)

    def wait(self, timeout_ms: int) -> None:
        """As the wrapped sender."""
        self._inner.wait(timeout_ms)

    def look(self) -> None:
        """As the wrapped sender."""
        self._inner.look()

    def close(self) -> None:
        """As the wrapped sender; a held message is lost."""
        self._inner.close()

    def _pass(self, header: bytes | bytearray, payload: npt.NDArray[np.float32] | None) -> bool:
        """Send a message and, behind it, the one that was held back."""
        if not self._inner.send(header, payload):
            return False
        held, self._held = self._held, None
        return held is None or self._inner.send(*held)
