"""The head's side of the journal: what its standbys are told of the answers that it makes.

A standby is told what it does not know yet of each answer: who asked what, the ids so far, the end. That is
found anew for each message, so nothing is queued for a standby that is slow: it gets more at once. At most
`WINDOW` bytes are on their way without an acknowledgement. One that does not acknowledge is given up, and all
is told anew in another session, a while later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import structlog
from pydantic import JsonValue

from cascadia_p2p.node.kept import Record
from cascadia_p2p.ring.streams import Score
from cascadia_p2p.types import Instance, NodeId
from cascadia_p2p.wire.journal import Journal, JournalAck
from cascadia_p2p.wire.model import encode_flat

CHUNK: Final = 1 << 16
"""Bytes of a message from which on no further answer is put into it."""

WINDOW: Final = 1 << 20
"""Bytes that are on their way to a standby, about."""

STALL_S: Final = 3.0
"""A standby that acknowledges nothing for so long is given up."""

AGAIN_S: Final = 1.0
LONGEST_AGAIN_S: Final = 30.0

ID_BYTES: Final = 11
SCORE_BYTES: Final = 40
BEGUN_BYTES: Final = 512

_LOWEST: Final = -3.4e38

Standby: TypeAlias = tuple[NodeId, Instance]

_log = structlog.get_logger()


@dataclass(slots=True)
class _Outlet:
    """What one standby was told.

    Args:
        session: 0 while it is told nothing.
        sent: number of the last message of the session.
        told: by the number of an answer, how many ids of its prompt and of itself.
        due: answers of which more is to be told.
        gone: answers that it was told of and that are no more.
        unread: number and size of each message that is not acknowledged.
        unread_bytes: of them all.
        moved_at: when it acknowledged last, or was sent something while nothing was on its way.
        whole_at: number of the message by which it was told everything; 0 before.
        again_at: when to begin anew.
        again_s: how long to wait before that.
        followed: it has acknowledged everything in this session.
        silent: its loss was told, and it has not come back since.
    """

    session: int = 0
    sent: int = 0
    told: dict[int, int] = field(default_factory=dict)
    due: dict[int, Record] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    unread: deque[tuple[int, int]] = field(default_factory=deque)
    unread_bytes: int = 0
    moved_at: float = 0.0
    whole_at: int = 0
    again_at: float = 0.0
    again_s: float = AGAIN_S
    followed: bool = False
    silent: bool = False


class JournalWriter:
    """Tells standbys of answers; all calls in one thread, none of them waits.

    Args:
        node: this node.
        instance: this process.
        post: sends bytes to a node, or says that it does not take them.
        sessions: gives numbers that grow over the life of the process.
    """

    def __init__(
        self,
        node: NodeId,
        instance: Instance,
        post: Callable[[NodeId, bytes], bool],
        sessions: Iterator[int],
    ) -> None:
        self._node = node
        self._instance = instance
        self._post = post
        self._sessions = sessions
        self._outlets: dict[Standby, _Outlet] = {}

    @property
    def active(self) -> bool:
        """Whether there is anybody to tell."""
        return bool(self._outlets)

    def follow(
        self, standbys: Sequence[Standby], records: Callable[[], Iterable[Record]], now: float
    ) -> None:
        """Look after those who are to be told; to be called again and again.

        Args:
            standbys: all of them.
            records: all answers that run or are kept.
            now: the time, in seconds of the clock that stamps records.
        """
        if not standbys and not self._outlets:
            return
        self._outlets = {each: self._outlets.get(each) or _Outlet(again_at=now) for each in standbys}
        for standby, outlet in self._outlets.items():
            if outlet.session and outlet.unread and now - outlet.moved_at > STALL_S:
                self._give_up(standby, outlet, f"has acknowledged nothing for {STALL_S:g} s", now)
                continue
            if not outlet.session and now >= outlet.again_at:
                outlet.session = next(self._sessions)
                outlet.due = {record.number: record for record in records()}
            self._tell(standby, outlet, now)

    def changed(self, record: Record) -> None:
        """An answer has begun, has grown, or is complete; told by the next `flush`."""
        for outlet in self._outlets.values():
            if outlet.session:
                outlet.due[record.number] = record

    def dropped(self, record: Record) -> None:
        """Nobody will ask for an answer any more."""
        for outlet in self._outlets.values():
            outlet.due.pop(record.number, None)
            if outlet.told.pop(record.number, None) is not None:
                outlet.gone.append(record.number)

    def flush(self, now: float) -> None:
        """Tell all that is due, as far as it is taken."""
        for standby, outlet in self._outlets.items():
            self._tell(standby, outlet, now)

    def heard(self, ack: JournalAck, now: float) -> None:
        """Take an acknowledgement."""
        standby = (ack.node, ack.instance)
        outlet = self._outlets.get(standby)
        if outlet is None or ack.session != outlet.session:
            return
        while outlet.unread and outlet.unread[0][0] <= ack.number:
            outlet.unread_bytes -= outlet.unread.popleft()[1]
            outlet.moved_at = now
        if outlet.whole_at and not outlet.followed and ack.number >= outlet.whole_at:
            outlet.followed, outlet.silent, outlet.again_s = True, False, AGAIN_S
            _log.info(
                "journal_followed",
                message=f"standby {standby[0][:8]} knows all answers, to go on with them if this head dies",
                peer=standby[0],
            )
        self._tell(standby, outlet, now)

    def report(self) -> list[JsonValue]:
        """Where the journal goes, for `status`."""
        return [
            {
                "node": node,
                "followed": outlet.followed,
                "answers": len(outlet.told),
                "unread_bytes": outlet.unread_bytes,
            }
            for (node, _), outlet in self._outlets.items()
        ]

    # --- inside -------------------------------------------------------------------------------------------

    def _tell(self, standby: Standby, outlet: _Outlet, now: float) -> None:
        while outlet.session and outlet.unread_bytes < WINDOW:
            if not (outlet.due or outlet.gone or not outlet.whole_at):
                return
            data = encode_flat(self._next(outlet, now))
            if not self._post(standby[0], data):
                self._give_up(standby, outlet, "does not take what it is sent", now)
                return
            if not outlet.unread:
                outlet.moved_at = now
            outlet.unread.append((outlet.sent, len(data)))
            outlet.unread_bytes += len(data)

    def _give_up(self, standby: Standby, outlet: _Outlet, why: str, now: float) -> None:
        if not outlet.silent:
            _log.warning(
                "journal_given_up",
                message=f"standby {standby[0][:8]} {why}: it is told of all answers anew later; until then "
                "it would begin them anew if this head died",
                peer=standby[0],
            )
        again_s = min(2 * outlet.again_s, LONGEST_AGAIN_S)
        self._outlets[standby] = _Outlet(again_at=now + outlet.again_s, again_s=again_s, silent=True)

    def _next(self, outlet: _Outlet, now: float) -> Journal:
        """The next message for a standby."""
        begun: list[dict[str, object]] = []
        grown: list[tuple[int, Sequence[int], Sequence[object]]] = []
        ended: list[tuple[int, str, int, float]] = []
        gone, outlet.gone = outlet.gone[: CHUNK // ID_BYTES], outlet.gone[CHUNK // ID_BYTES :]
        room = CHUNK - ID_BYTES * len(gone)
        waiting = iter(outlet.due.items())
        outlet.due = {}
        for number, record in waiting:
            told = outlet.told.get(number)
            if told is None:
                begun.append(_beginning(record))
                told = 0
                room -= BEGUN_BYTES + 6 * sum(map(len, record.asked.stop))
                room -= ID_BYTES * len(record.asked.stop_ids)
            told, room = _grow(record, told, room, grown)
            outlet.told[number] = told
            if told < len(record.asked.prompt) + len(record.ids):
                outlet.due[number] = record
            elif record.finish is not None:
                ended.append((number, record.finish.value, record.cached, max(0.0, now - record.since)))
            if room <= 0:
                outlet.due.update(waiting)
        outlet.sent += 1
        whole = not outlet.whole_at and not outlet.due
        if whole:
            outlet.whole_at = outlet.sent
        fields: dict[str, Any] = {"gone": gone, "begun": begun, "grown": grown, "ended": ended}
        # Checked where it is read: to check it here would cost more than all the rest.
        return Journal.model_construct(
            node=self._node,
            instance=self._instance,
            session=outlet.session,
            number=outlet.sent,
            whole=whole,
            **fields,
        )


def _grow(
    record: Record, told: int, room: int, grown: list[tuple[int, Sequence[int], Sequence[object]]]
) -> tuple[int, int]:
    """Add the next ids of an answer, as there is room; how many are told then, and the room that is left."""
    prompt = record.asked.prompt
    if told < len(prompt):
        part: Sequence[int] = prompt[told : told + max(1, room // ID_BYTES)]
        grown.append((record.number, part, ()))
        told += len(part)
        room -= ID_BYTES * len(part)
        if told < len(prompt) or room <= 0:
            return told, room
    at = told - len(prompt)
    if at == len(record.ids):
        return told, room
    each = ID_BYTES
    if record.asked.logprobs is not None:
        each += SCORE_BYTES * (1 + record.asked.logprobs)
    end = at + max(1, room // each)
    part = record.ids[at:end]
    grown.append((record.number, part, [_row(score) for score in record.scores[at:end]]))
    return told + len(part), room - each * len(part)


def _row(score: Score) -> tuple[float, list[tuple[int, float]]]:
    """JSON has no infinity."""
    likeliest = [(token, max(logprob, _LOWEST)) for token, logprob in score.alternatives]
    return max(score.logprob, _LOWEST), likeliest


def _beginning(record: Record) -> dict[str, object]:
    """A `Begun` in plain values."""
    asked = record.asked
    fields: dict[str, object] = {
        "number": record.number,
        "client": record.name.client,
        "key": record.name.key,
        "prompt": len(asked.prompt),
        "max_tokens": asked.max_tokens,
        "stop": asked.stop,
        "stop_ids": sorted(asked.stop_ids),
        "temperature": asked.sampling.temperature,
        "top_k": asked.sampling.top_k,
        "top_p": asked.sampling.top_p,
        "seed": asked.sampling.seed,
    }
    return fields if asked.logprobs is None else fields | {"logprobs": asked.logprobs}
