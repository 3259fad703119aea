"""Answers that are complete, kept for clients that lost their connection before the last word."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from cascadia_p2p.ring.streams import Stream
from cascadia_p2p.wire.client import FinishReason

KEEP_S: Final = 600.0
MAX_IDS: Final = 1 << 22
"""Ids of prompts and answers that are kept in all, at most; the oldest answers go first."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A complete answer: its stream, and why it ended."""

    stream: Stream
    finish: FinishReason


class FinishedAnswers:
    """Complete answers by the key of their request.

    Args:
        keep_s: for how long, in seconds.
        max_ids: see `MAX_IDS`.
    """

    def __init__(self, keep_s: float = KEEP_S, max_ids: int = MAX_IDS) -> None:
        self._keep_s = keep_s
        self._max_ids = max_ids
        self._kept: OrderedDict[str, tuple[float, Finished]] = OrderedDict()
        self._ids = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: str, finished: Finished, now: float) -> None:
        """Keep an answer; `now` in seconds of any steady clock."""
        self._forget(key)
        self._kept[key] = (now, finished)
        self._ids += len(finished.stream.ids)
        self._clear(now)

    def find(self, key: str, prompt: tuple[int, ...], held: tuple[int, ...], now: float) -> Finished | None:
        """The answer to this prompt that begins with the ids `held`, or None."""
        self._clear(now)
        found = self._kept.get(key)
        if found is None:
            return None
        beginning = [*prompt, *held]
        same = found[1].stream.request.prompt == prompt and found[1].stream.ids[: len(beginning)] == beginning
        return found[1] if same else None

    def _clear(self, now: float) -> None:
        while self._kept:
            key, (since, _) = next(iter(self._kept.items()))
            if now - since <= self._keep_s and self._ids <= self._max_ids:
                return
            self._forget(key)

    def _forget(self, key: str) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self._ids -= len(found[1].stream.ids)
