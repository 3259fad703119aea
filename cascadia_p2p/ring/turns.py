"""Whose rows go next: decode rows in the order in which their tokens came, prompts by how soon they are due.

A prompt of p rows that comes when w prompt rows have gone into the ring is due at w + p: a short prompt
overtakes a long one that came earlier, but not for ever, for what comes later is due later. Each of all
the prompts that are served before it has at most as many rows as itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from cascadia_p2p.ring.streams import Stream
from cascadia_p2p.types import StreamId


class Turns:
    """The running streams that have rows to send; every operation costs the same however many there are."""

    def __init__(self) -> None:
        self._decoding: OrderedDict[StreamId, Stream] = OrderedDict()
        self._prompts: list[tuple[int, StreamId, Stream]] = []
        self._due: dict[StreamId, int] = {}
        self._served = 0
        self.pending = 0
        """Rows of all prompts."""

    @property
    def prompts(self) -> int:
        """Prompts that have rows to send."""
        return len(self._prompts)

    @property
    def decoding(self) -> int:
        """Streams whose next row can go."""
        return len(self._decoding)

    def add_prompt(self, stream: Stream) -> None:
        """A stream has all its pending rows to send."""
        due = self._served + stream.pending
        self._due[stream.id] = due
        insort(self._prompts, (due, stream.id, stream), key=_order)
        self.pending += stream.pending

    def add_decoding(self, stream: Stream) -> None:
        """A stream's newest token can be sent."""
        self._decoding[stream.id] = stream

    def take_decoding(self) -> Stream:
        """The stream whose row has waited longest; it has its turn."""
        return self._decoding.popitem(last=False)[1]

    def waiting_prompts(self) -> Iterator[Stream]:
        """The prompts, the one that is due first before the others; not to be changed meanwhile."""
        for _, _, stream in self._prompts:
            yield stream

    def sent(self, stream: Stream, rows: int) -> None:
        """So many rows of a stream have been sent; a prompt of which none is left is none any more."""
        if stream.id not in self._due:
            return
        self._served += rows
        self.pending -= rows
        if not stream.pending:
            self._remove_prompt(stream)

    def remove(self, stream: Stream) -> None:
        """A stream runs no more."""
        if self._decoding.pop(stream.id, None) is None and stream.id in self._due:
            self.pending -= stream.pending
            self._remove_prompt(stream)

    def clear(self) -> None:
        """No stream runs."""
        self._decoding.clear()
        self._prompts.clear()
        self._due.clear()
        self.pending = 0

    def _remove_prompt(self, stream: Stream) -> None:
        key = (self._due.pop(stream.id), stream.id)
        del self._prompts[bisect_left(self._prompts, key, key=_order)]


def _order(entry: tuple[int, StreamId, Stream]) -> tuple[int, StreamId]:
    return entry[:2]
