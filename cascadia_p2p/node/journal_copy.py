"""A standby's side of the journal: the head's answers as far as they were told, until it takes its place."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from pydantic import JsonValue

from cascadia_p2p.node.kept import KEEP_S, MAX_IDS, AnswerName, Asked, Record, weight_of
from cascadia_p2p.ring.streams import Score
from cascadia_p2p.types import Instance, NodeId, Sampling
from cascadia_p2p.wire.client import FinishReason
from cascadia_p2p.wire.journal import Begun, Journal, JournalAck

ACK_S: Final = 0.25
ACK_MESSAGES: Final = 32
ACK_IDS: Final = 8192
"""After so many ids, or messages, an acknowledgement is due at once, so that a long telling goes on."""


@dataclass(slots=True, eq=False)
class _Entry:
    """An answer as it was told.

    Args:
        begun: what was told first.
        ids: of the prompt, then of the answer.
        since: when it was complete.
    """

    begun: Begun
    ids: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    finish: FinishReason | None = None
    cached: int = 0
    since: float = 0.0

    @property
    def name(self) -> AnswerName:
        return AnswerName(self.begun.client, self.begun.key)

    @property
    def weight(self) -> int:
        return weight_of(len(self.ids), len(self.scores), self.begun.logprobs)

    def record(self, number: int) -> Record:
        begun = self.begun
        prompt, ids = tuple(self.ids[: begun.prompt]), self.ids[begun.prompt :]
        if begun.logprobs is not None:
            ids = ids[: len(self.scores)]
        sampling = Sampling(begun.temperature, begun.top_k, begun.top_p, begun.seed)
        asked = Asked(
            prompt, begun.max_tokens, begun.stop, frozenset(begun.stop_ids), sampling, begun.logprobs
        )
        return Record(number, self.name, asked, ids, self.scores, self.finish, self.cached, self.since)


class JournalCopy:
    """What a standby knows of the answers of its head.

    Args:
        node: this node.
        instance: this process.
        max_ids: ids of all answers, at most; the oldest go first, complete ones before others.
    """

    def __init__(self, node: NodeId, instance: Instance, max_ids: int = MAX_IDS) -> None:
        self._node = node
        self._instance = instance
        self._max_ids = max_ids
        self._head: tuple[NodeId, Instance] | None = None
        self._session = 0
        self._taken = 0
        self._acked = 0
        self._acked_at = self._heard_at = 0.0
        self._unacked_ids = 0
        self._entries: OrderedDict[AnswerName, _Entry] = OrderedDict()
        self._complete: OrderedDict[AnswerName, None] = OrderedDict()
        self._named: dict[int, AnswerName] = {}
        self._early: set[AnswerName] = set()
        """Told in an earlier session only."""
        self._ids = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def head(self) -> NodeId | None:
        """Whose journal it is; None when nothing was told."""
        return None if self._head is None else self._head[0]

    def hear(self, message: Journal, now: float) -> JournalAck | None:
        """Take what the present head tells; an acknowledgement, if one is due at once.

        A message out of order is not taken, nor anything behind it in its session: the head tells all anew
        where it hears of nothing that was taken.
        """
        head = (message.node, message.instance)
        if head != self._head or message.session > self._session:
            if message.number != 1:
                return None
            self._head, self._session = head, message.session
            self._taken = self._acked = 0
            self._named.clear()
            self._early = set(self._entries)
        if message.session != self._session or message.number != self._taken + 1:
            return None
        self._taken += 1
        self._heard_at = now
        self._take(message, now)
        self._unacked_ids += sum(len(ids) for _, ids, _ in message.grown)
        due = self._unacked_ids >= ACK_IDS or self._taken - self._acked >= ACK_MESSAGES
        return self._ack(now) if due else None

    def due(self, now: float) -> JournalAck | None:
        """The acknowledgement that is due by time; to be called again and again.

        A head that tells nothing for `KEEP_S` makes no answers, and what it told is too old to be asked for.
        """
        if self._head is not None and now - self._heard_at > KEEP_S:
            self.take_over()
        if self._taken == self._acked or now - self._acked_at < ACK_S:
            return None
        return self._ack(now)

    def take_over(self) -> list[Record]:
        """All answers, the complete ones first and by age, to go on with; the copy is empty then."""
        found = [
            entry.record(number)
            for number, entry in enumerate(self._entries.values(), 1)
            if len(entry.ids) >= entry.begun.prompt
        ]
        self._entries.clear()
        self._complete.clear()
        self._named.clear()
        self._early.clear()
        self._head, self._session, self._taken, self._acked, self._ids = None, 0, 0, 0, 0
        return sorted(found, key=lambda record: (record.finish is None, record.since))

    def report(self) -> dict[str, JsonValue]:
        """What is held, for `status`."""
        return {
            "from": self.head,
            "answers": len(self._entries),
            "complete": len(self._complete),
            "ids": self._ids,
        }

    # --- inside -------------------------------------------------------------------------------------------

    def _ack(self, now: float) -> JournalAck:
        self._acked, self._acked_at, self._unacked_ids = self._taken, now, 0
        return JournalAck(node=self._node, instance=self._instance, session=self._session, number=self._taken)

    def _take(self, message: Journal, now: float) -> None:
        for number in message.gone:
            if (entry := self._of(number)) is not None:
                self._forget(entry.name)
        for begun in message.begun:
            self._begin(begun)
        for number, ids, scores in message.grown:
            # One that has been given up for want of room goes on unheard.
            entry = self._of(number)
            if entry is not None:
                before = entry.weight
                entry.ids += ids
                entry.scores += [Score(logprob, likeliest) for logprob, likeliest in scores]
                self._ids += entry.weight - before
        for number, finish, cached, age_s in message.ended:
            if (entry := self._of(number)) is not None:
                entry.finish, entry.cached, entry.since = finish, cached, now - age_s
                self._complete[entry.name] = None
        if message.whole:
            for name in self._early:
                self._forget(name)
            self._early = set()
        self._bound()

    def _begin(self, begun: Begun) -> None:
        entry = _Entry(begun)
        self._forget(entry.name)
        self._early.discard(entry.name)
        self._entries[entry.name] = entry
        self._named[begun.number] = entry.name
        self._ids += entry.weight

    def _of(self, number: int) -> _Entry | None:
        name = self._named.get(number)
        entry = None if name is None else self._entries.get(name)
        return entry if entry is not None and entry.begun.number == number else None

    def _forget(self, name: AnswerName) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._ids -= entry.weight
            self._complete.pop(name, None)
            number = entry.begun.number
            # Numbers of an earlier session mean other answers in this one.
            if self._named.get(number) == name:
                del self._named[number]

    def _bound(self) -> None:
        while self._ids > self._max_ids:
            self._forget(next(iter(self._complete or self._entries)))
