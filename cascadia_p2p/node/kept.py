"""Answers by the key of their request, for clients that come back: complete ones, and broken ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from cascadia_p2p.ring.streams import Score
from cascadia_p2p.types import Sampling
from cascadia_p2p.wire.client import FinishReason

KEEP_S: Final = 600.0
MAX_IDS: Final = 1 << 22
"""Ids of prompts and answers that are kept in all, at most; the oldest answers go first."""

ANSWER_IDS: Final = 64
"""An answer takes the memory of so many ids besides its own."""


def weight_of(ids: int, scores: int, logprobs: int | None) -> int:
    """The memory that an answer takes, in ids: its prompt's and its own, and scores with alternatives."""
    return ANSWER_IDS + ids + (0 if logprobs is None else (2 + 2 * logprobs) * scores)


class AnswerName(NamedTuple):
    """What an answer is found by: who asked, and the key of the request.

    Args:
        client: the public key that its connection was admitted with; empty for one in the clear.
        key: of the request.
    """

    client: str
    key: str


@dataclass(frozen=True, slots=True)
class Asked:
    """All that the ids of an answer depend on.

    Args:
        prompt: its ids.
        max_tokens: as the request said.
        stop: strings that end it.
        stop_ids: ids that end it, the model's own among them.
        sampling: how its tokens are chosen.
        logprobs: alternatives that are told at each position; None for no logprobs.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    sampling: Sampling
    logprobs: int | None

    def with_seed(self, seed: int) -> Asked:
        """The same, drawn by another seed."""
        return replace(self, sampling=replace(self.sampling, seed=seed))


@dataclass(slots=True, eq=False)
class Record:
    """What is known of one answer.

    Args:
        number: that its head gave it.
        name: see `AnswerName`.
        asked: see `Asked`.
        ids: generated so far; of an answer that runs these are its own, and grow.
        scores: of the ids, as many, if logprobs were asked for; else empty.
        finish: why it is complete; None for one that runs or broke off.
        cached: positions of its prompt that were known; told once it is complete.
        since: when it was kept, in seconds of the keeper's clock.
    """

    number: int
    name: AnswerName
    asked: Asked
    ids: list[int]
    scores: list[Score] = field(default_factory=list)
    finish: FinishReason | None = None
    cached: int = 0
    since: float = 0.0

    @property
    def weight(self) -> int:
        """The memory that it takes, in ids."""
        asked = self.asked
        return weight_of(len(asked.prompt) + len(self.ids), len(self.scores), asked.logprobs)


class KeptAnswers:
    """Complete and broken answers by their names, bounded.

    Args:
        keep_s: for how long, in seconds.
        max_ids: see `MAX_IDS`; logprobs count by the memory that they take.
        forgotten: told of each that is kept no more.
    """

    def __init__(
        self,
        keep_s: float = KEEP_S,
        max_ids: int = MAX_IDS,
        forgotten: Callable[[Record], None] = lambda _: None,
    ) -> None:
        self._keep_s = keep_s
        self._max_ids = max_ids
        self._forgotten = forgotten
        self._kept: OrderedDict[AnswerName, Record] = OrderedDict()
        self._weights: dict[AnswerName, int] = {}
        self._ids = 0

    def __len__(self) -> int:
        return len(self._kept)

    def records(self) -> list[Record]:
        """All of them, the oldest first."""
        return list(self._kept.values())

    def keep(self, record: Record, now: float) -> None:
        """Keep an answer from `now` on, in seconds of any steady clock."""
        self.forget(record.name)
        record.since = now
        self._kept[record.name] = record
        self._weights[record.name] = record.weight
        self._ids += record.weight
        self._clear(now)

    def find(
        self, name: AnswerName, asked: Asked, held: tuple[int, ...], now: float, *, seeded: bool = True
    ) -> Record | None:
        """The answer that may go on behind, or within, the ids `held` that its client has; or None.

        Who asked with a client's key is found by that key only; who asked in the clear by the request's key.

        Args:
            name: who asks, and the request's key.
            asked: must be what was asked before.
            held: the answer begins with them or, if it broke off, they begin with what is kept.
            now: as for `keep`.
            seeded: False takes the seed of before, whatever it was.
        """
        self._clear(now)
        for each in (name, AnswerName("", name.key)):
            found = self._kept.get(each)
            if found is None:
                continue
            same = asked if seeded else asked.with_seed(found.asked.sampling.seed)
            both = min(len(held), len(found.ids))
            fits = found.finish is None or len(held) <= len(found.ids)
            if fits and found.asked == same and found.ids[:both] == list(held[:both]):
                return found
        return None

    def forget(self, name: AnswerName) -> None:
        """Keep it no more."""
        found = self._kept.pop(name, None)
        if found is not None:
            self._ids -= self._weights.pop(name)
            self._forgotten(found)

    def _clear(self, now: float) -> None:
        while self._kept:
            name, oldest = next(iter(self._kept.items()))
            if now - oldest.since <= self._keep_s and self._ids <= self._max_ids:
                return
            self.forget(name)
