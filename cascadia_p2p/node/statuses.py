"""The status that others ask for, made anew only so often: whoever asks without pause gets the last one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from pydantic import JsonValue

FRESH_A_SECOND: Final = 20
"""Making one takes milliseconds of the event loop."""


class StatusDesk:
    """Hands out the status.

    Args:
        make: makes it.
        clock: seconds of a steady clock.
    """

    def __init__(
        self, make: Callable[[], dict[str, JsonValue]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = make
        self._clock = clock
        self._since = float("-inf")
        self._made = 0
        self._last: dict[str, JsonValue] = {}

    def get(self) -> dict[str, JsonValue]:
        """The status now, or while many ask one that is at most a second old."""
        now = self._clock()
        if now - self._since >= 1.0:
            self._since, self._made = now, 0
        if self._made < FRESH_A_SECOND:
            self._made += 1
            self._last = self._make()
        return self._last
