"""From the token ids of one answer to what its reader sees: its text, and apart from that its reasoning."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

from cascadia_p2p.text.detokenizer import Detokenizer
from cascadia_p2p.text.stops import StopStrings
from cascadia_p2p.text.tokenizer import Tokenizer

__all__ = [
    "OPEN_TAG",
    "Part",
    "Piece",
    "PlainSplitter",
    "ReplyReader",
    "Splitter",
    "TaggedSplitter",
    "ToolCall",
]

OPEN_TAG: Final = "<think>"
CLOSE_TAG: Final = "</think>"


class Part(Enum):
    """What a piece of text belongs to."""

    TEXT = auto()
    REASONING = auto()


@dataclass(frozen=True, slots=True)
class Piece:
    """What has become visible."""

    text: str = ""
    reasoning: str = ""

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asks to be called; arguments are any JSON value, or text that is no JSON."""

    name: str
    arguments: object


class Splitter(Protocol):
    """Turns token ids into finished pieces of text, each told which part it belongs to."""

    def add(self, token_id: int) -> Iterable[tuple[Part, str]]:
        """What this token finishes."""
        ...

    def extend(self, token_ids: Iterable[int]) -> Iterable[tuple[Part, str]]:
        """What these tokens finish."""
        ...

    def finish(self) -> Iterable[tuple[Part, str]]:
        """What was held back because it might have been a mark."""
        ...

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools that are complete."""
        ...


class ReplyReader:
    """Reads one answer as it grows; stop strings end its text and do not apply to the reasoning.

    Args:
        splitter: made for this answer.
        stops: stop strings.
    """

    def __init__(self, splitter: Splitter, stops: Sequence[str] = ()) -> None:
        self._splitter = splitter
        self._stops = StopStrings(stops)
        self._eager = bool(stops)
        self._new: dict[Part, list[str]] = {part: [] for part in Part}

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._stops.met is not None

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tools that the model asks for."""
        return self._splitter.calls

    def add(self, token_id: int) -> None:
        """Read one token; those behind a stop string change nothing."""
        if not self.stopped:
            self._keep(self._splitter.add(token_id))

    def extend(self, token_ids: Iterable[int]) -> None:
        """Read several tokens."""
        if self._eager:
            for token_id in token_ids:
                self.add(token_id)
        else:
            self._keep(self._splitter.extend(token_ids))

    def finish(self) -> None:
        """No token comes any more: what was held back is shown after all."""
        if not self.stopped:
            self._keep(self._splitter.finish())
        self._new[Part.TEXT].append(self._stops.flush())

    def take(self) -> Piece:
        """What became visible since the last call."""
        piece = Piece("".join(self._new[Part.TEXT]), "".join(self._new[Part.REASONING]))
        for texts in self._new.values():
            texts.clear()
        return piece

    def _keep(self, pieces: Iterable[tuple[Part, str]]) -> None:
        for part, text in pieces:
            self._new[part].append(self._stops.add(text) if part is Part.TEXT else text)


class PlainSplitter:
    """All is text.

    Args:
        tokenizer: the model's.
        hidden: ids that show nothing, beside the special ones.
    """

    calls: tuple[ToolCall, ...] = ()

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, hidden)

    def add(self, token_id: int) -> list[tuple[Part, str]]:
        """See `Splitter`."""
        return [(Part.TEXT, self._detokenizer.add(token_id))]

    def extend(self, token_ids: Iterable[int]) -> list[tuple[Part, str]]:
        """See `Splitter`."""
        return [(Part.TEXT, self._detokenizer.extend(token_ids))]

    def finish(self) -> list[tuple[Part, str]]:
        """See `Splitter`."""
        return []


class _Place(Enum):
    """Where in a tagged answer the next text stands."""

    BEFORE = auto()
    REASONING = auto()
    BEHIND = auto()
    TEXT = auto()


class TaggedSplitter:
    """Reasoning stands between `<think>` and `</think>` in front of the answer, or there is none.

    White space around the reasoning and in front of the answer is left out.

    Args:
        tokenizer: the model's.
        hidden: ids that show nothing, beside the special ones.
        opened: the prompt ended with the opening tag.
    """

    calls: tuple[ToolCall, ...] = ()

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int] = (), *, opened: bool = False) -> None:
        self._detokenizer = Detokenizer(tokenizer, hidden)
        # Where they are special tokens the detokeniser would not show them.
        self._tags = {tokenizer.added[tag]: tag for tag in (OPEN_TAG, CLOSE_TAG) if tag in tokenizer.added}
        self._place = _Place.REASONING if opened else _Place.BEFORE
        self._before = ""
        self._close = StopStrings([CLOSE_TAG])
        self._spaces: str | None = None

    def add(self, token_id: int) -> list[tuple[Part, str]]:
        """See `Splitter`."""
        return list(self._split(self._tags.get(token_id) or self._detokenizer.add(token_id)))

    def extend(self, token_ids: Iterable[int]) -> list[tuple[Part, str]]:
        """See `Splitter`."""
        return [piece for token_id in token_ids for piece in self.add(token_id)]

    def finish(self) -> list[tuple[Part, str]]:
        """See `Splitter`."""
        if self._place is _Place.BEFORE:
            return [(Part.TEXT, self._before)]
        if self._place is _Place.REASONING:
            return [(Part.REASONING, self._trimmed(self._close.flush()))]
        return []

    def _split(self, text: str) -> Iterable[tuple[Part, str]]:
        if self._place is _Place.BEFORE:
            self._before += text
            begun = self._before.lstrip()
            if OPEN_TAG.startswith(begun) and begun != OPEN_TAG:
                return
            if begun.startswith(OPEN_TAG):
                self._place, text = _Place.REASONING, begun.removeprefix(OPEN_TAG)
            else:
                self._place, text = _Place.TEXT, self._before
        if self._place is _Place.REASONING:
            yield Part.REASONING, self._trimmed(self._close.add(text))
            if self._close.met is None:
                return
            self._place, text = _Place.BEHIND, self._close.rest
        if self._place is _Place.BEHIND:
            text = text.lstrip()
            if text:
                self._place = _Place.TEXT
        yield Part.TEXT, text

    def _trimmed(self, text: str) -> str:
        """Reasoning without white space around it: what may be its end waits for what follows."""
        kept = text.rstrip()
        if not kept:
            self._spaces = None if self._spaces is None else self._spaces + text
            return ""
        lead = kept.lstrip() if self._spaces is None else self._spaces + kept
        self._spaces = text[len(kept) :]
        return lead
