"""The operations that the next frame carries, in the order in which they are to be applied.

At most four a slot (keep and release of the stream that leaves it, start and attach of the one that takes it)
and one a kept entry (evict) come together before a frame takes them.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np

from cascadia_p2p.ring.streams import StreamRequest
from cascadia_p2p.types import StreamId
from cascadia_p2p.wire.frames import OPERATION, OperationKind, Table, operation_table

_START: Final = int(OperationKind.START)
_RELEASE: Final = int(OperationKind.RELEASE)
_ATTACH: Final = int(OperationKind.ATTACH)
_KEEP: Final = int(OperationKind.KEEP)
_EVICT: Final = int(OperationKind.EVICT)
_NO_OPERATIONS: Final = operation_table()

_Operation: TypeAlias = tuple[int, int, int, int, int, int, float, float, int, int]
"""Fields of `OPERATION`: stream, seed, position, slot, entry, top_k, temperature, top_p, kind, logprobs."""


class Operations:
    """What waits for the next frame."""

    def __init__(self) -> None:
        self._list: list[_Operation] = []
        self._evicted: set[int] = set()

    def __len__(self) -> int:
        return len(self._list)

    def start(self, request: StreamRequest, slot: int) -> None:
        """A stream takes a slot."""
        how = request.sampling
        options = (how.top_k, how.temperature, how.top_p, _START, request.alternatives)
        self._list.append((request.stream, how.seed, 0, slot, 0, *options))

    def attach(self, stream: StreamId, slot: int, position: int, entry: int) -> None:
        """A stream takes over a kept prefix."""
        self._list.append((stream, 0, position, slot, entry, 0, 0.0, 0.0, _ATTACH, 0))

    def keep(self, stream: StreamId, slot: int, position: int, entry: int) -> None:
        """What a stream holds is kept; an eviction of the entry that waits is in this."""
        if entry in self._evicted:
            self._evicted.discard(entry)
            self._list = [each for each in self._list if (each[8], each[4]) != (_EVICT, entry)]
        self._list.append((stream, 0, position, slot, entry, 0, 0.0, 0.0, _KEEP, 0))

    def evict(self, entry: int) -> None:
        """An entry keeps nothing any more."""
        self._evicted.add(entry)
        self._list.append((0, 0, 0, 0, entry, 0, 0.0, 0.0, _EVICT, 0))

    def release(self, stream: StreamId, slot: int) -> None:
        """A stream leaves its slot."""
        self._list.append((stream, 0, 0, slot, 0, 0, 0.0, 0.0, _RELEASE, 0))

    def take_back_start(self, stream: StreamId) -> None:
        """A stream whose start waits will not start."""
        self._list = [each for each in self._list if each[0] != stream or each[8] not in (_START, _ATTACH)]

    def take(self) -> Table:
        """The `OPERATION` table of all that waits; nothing waits then."""
        if not self._list:
            return _NO_OPERATIONS
        table: Table = np.array(self._list, OPERATION)
        self.clear()
        return table

    def clear(self) -> None:
        """Nothing waits."""
        self._list.clear()
        self._evicted.clear()
