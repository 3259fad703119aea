"""The requests that have no final reply yet, and all that they are found by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from cascadia_p2p.node.answers import Answer
from cascadia_p2p.node.kept import AnswerName, Record
from cascadia_p2p.transport.client_server import Route
from cascadia_p2p.types import StreamId
from cascadia_p2p.wire.client import GenerateRequest


@dataclass(slots=True)
class Pending:
    """A request that has no final reply yet.

    Args:
        route: the way back.
        request: what was asked.
        came_at: when it came.
        name: what its answer is found by; None for a request without a key.
        answer: None while the prompt is still being read.
        record: what a client that comes back, here or at a standby, is answered from.
        positions: of its stream at most, prompt and answer; 0 while the prompt is still being read.
        piece_at: when its last piece was sent.
        read: number of the last piece that its client has read, as far as it tells.
        token_at: when its last token came.
        place: the last that was told of its place in the queue.
        cancelled: its client wants no more pieces.
    """

    route: Route
    request: GenerateRequest
    came_at: float
    name: AnswerName | None = None
    answer: Answer | None = None
    record: Record | None = None
    positions: int = 0
    piece_at: float = float("-inf")
    read: int = 0
    token_at: float | None = None
    place: int | None = None
    cancelled: bool = False

    @property
    def spoken_of(self) -> tuple[int, bytes, str] | None:
        """By what its client can speak of it."""
        request_id = self.request.id
        return None if request_id is None else (self.route.connection, self.route.identity, request_id)


class PendingRequests:
    """Finds requests by stream, by connection, by their id on it, and by their key."""

    def __init__(self) -> None:
        self._all: dict[StreamId, Pending] = {}
        self._spoken_of: dict[tuple[int, bytes, str], StreamId] = {}
        self._of_connection: defaultdict[int, set[StreamId]] = defaultdict(set)
        self._keyed: dict[AnswerName, StreamId] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, stream: StreamId) -> bool:
        return stream in self._all

    def __iter__(self) -> Iterator[tuple[StreamId, Pending]]:
        return iter(list(self._all.items()))

    def get(self, stream: StreamId) -> Pending | None:
        """The request that this stream answers."""
        return self._all.get(stream)

    def add(self, stream: StreamId, pending: Pending) -> None:
        """Take one in."""
        self._all[stream] = pending
        self._of_connection[pending.route.connection].add(stream)
        if (spoken_of := pending.spoken_of) is not None:
            self._spoken_of[spoken_of] = stream

    def remove(self, stream: StreamId) -> Pending | None:
        """Forget one; None when it is not there any more."""
        pending = self._all.pop(stream, None)
        if pending is None:
            return None
        if pending.name is not None and self._keyed.get(pending.name) == stream:
            del self._keyed[pending.name]
        connection = pending.route.connection
        self._of_connection[connection].discard(stream)
        if not self._of_connection[connection]:
            del self._of_connection[connection]
        if (spoken_of := pending.spoken_of) is not None:
            del self._spoken_of[spoken_of]
        return pending

    def find(self, route: Route, request_id: str) -> StreamId | None:
        """The stream for a request that was sent this way under this id."""
        return self._spoken_of.get((route.connection, route.identity, request_id))

    def of_connection(self, connection: int, identity: bytes | None = None) -> list[StreamId]:
        """All that came over a connection, or of that only what has this way back."""
        streams = self._of_connection.get(connection, ())
        return [each for each in streams if identity in (None, self._all[each].route.identity)]

    def take_place(self, name: AnswerName, stream: StreamId) -> tuple[StreamId, StreamId]:
        """Let `stream` answer what has this name, unless a later one does: the earlier and the later."""
        before = self._keyed.get(name, stream)
        self._keyed[name] = max(before, stream)
        return min(before, stream), max(before, stream)
