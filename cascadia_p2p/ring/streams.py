"""A request in token ids, its state while it is generated, and what the scheduler tells of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cascadia_p2p.errors import RequestError
from cascadia_p2p.ring.prefixes import Holding
from cascadia_p2p.types import GREEDY, Sampling, StreamId
from cascadia_p2p.wire.client import FinishReason


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One request in token ids.

    Args:
        stream: the number the head gave it.
        prompt: at least one id, each within the vocabulary.
        max_tokens: at least 1; the scheduler lowers it to what the context can hold.
        stop_ids: a generated id among these ends the answer and is its last id.
        sampling: how its tokens are chosen.
        alternatives: likeliest tokens to be named beside each of its own.
        held: ids that were generated for this request earlier; they count as such.
    """

    stream: StreamId
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = GREEDY
    alternatives: int = 0
    held: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Stream:
    """The state of one request; positions are counted from 0, times in seconds of the caller's clock.

    Args:
        request: what was asked.
        ids: the prompt's and those generated.
        submitted_at: when it came.
        slot: while it runs.
        sent: of its ids, how many went into the ring or were there already.
        awaited: all were sent, and the next token is due.
        reused: positions of its prompt that a kept prefix saved it at its first start.
        attach: whether it may start from a kept prefix.
        started_frame: number of the frame that carries its start.
        holding: what it holds of kept prefixes and what shall be kept of it.
        apart: it may be what kills nodes; its rows go into the ring with those of no other such stream.
    """

    request: StreamRequest
    ids: list[int]
    submitted_at: float
    slot: int | None = None
    sent: int = 0
    awaited: bool = False
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    reused: int = 0
    attach: bool = True
    started_frame: int = 0
    holding: Holding | None = field(default=None, repr=False)
    apart: bool = False

    @property
    def id(self) -> StreamId:
        """The number the head gave it."""
        return self.request.stream

    @property
    def pending(self) -> int:
        """Rows that can be sent now."""
        return 0 if self.awaited else len(self.ids) - self.sent

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.ids) - len(self.request.prompt)

    @property
    def decoding(self) -> bool:
        """The prompt is through: what is pending is the one row of the newest token."""
        return self.generated > 0 and self.sent == len(self.ids) - 1

    def put_back(self) -> None:
        """Leave the slot; everything has to be sent again."""
        self.slot, self.sent, self.awaited = None, 0, False
        self.holding = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One frame to run and send.

    Args:
        number: 1, 2, 3, ... within an epoch.
        segments: `SEGMENT` array, in row order.
        operations: `OPERATION` array, applied before the rows, in order.
        tokens: int32 `[rows]`, the ids to embed.
    """

    number: int
    segments: npt.NDArray[np.void]
    operations: npt.NDArray[np.void]
    tokens: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Score:
    """Natural logarithms of probabilities at temperature 1, before any cut.

    Args:
        logprob: of the token that was chosen.
        alternatives: ids and logprobs of the likeliest tokens, the likeliest first.
    """

    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """What happened to one stream: new tokens, and at the end exactly one finish or error.

    Args:
        stream: the stream's state; finished streams are no longer changed by the scheduler.
        tokens: the ids that came with this update.
        finish: set when the answer is complete.
        error: set when the stream failed.
        scores: of the tokens, as many.
    """

    stream: Stream
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    error: RequestError | None = None
    scores: tuple[Score, ...] = ()

    @property
    def terminal(self) -> bool:
        """Nothing more comes for this stream."""
        return self.finish is not None or self.error is not None
