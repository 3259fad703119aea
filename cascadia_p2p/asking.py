"""What the client library says, and how it takes answers and errors; without a connection."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias, TypedDict

from pydantic import JsonValue, ValidationError

from cascadia_p2p.errors import (
    ErrorCode,
    HeadLostError,
    LateReplyError,
    NotAdmittedError,
    RequestError,
    UnreachableError,
    WireError,
    WrongAddressError,
)
from cascadia_p2p.wire.client import (
    AckRequest,
    CancelRequest,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    QueueNotice,
    StatusReply,
    StreamPiece,
    decode_reply,
)
from cascadia_p2p.wire.model import encode, explain

ACK_PIECES: Final = 64
"""Pieces after which the head is told that they were read; it allows 256 that were not."""

RETURN_S: Final = 30.0
"""For how long a head that was lost is looked for again, in seconds."""

PAUSED: Final = "the connection to the head was lost: the answer goes on when it, or another, is found"
"""What the reader of an answer is told meanwhile."""

RETURN_EVERY_S: Final = 0.2

FRUITLESS: Final = 2
"""Heads that may be lost with a request, one after the other without a token in between."""

QUEUED: Final = 3
"""Heads that may be lost while others were before it in their queues, and count as none: it may have begun
since it was told so."""

HOLD_BACK_S: Final = 0.5
"""Seconds, and up to three times that, for which a request stands back at the head after a fruitless one."""

RETRY_S: Final = 1.0
"""Pause before a request is repeated where the head names none, in seconds."""

Queued: TypeAlias = Callable[[int], None]
"""Told the place of a request that waits: 1 is next."""

Noticed: TypeAlias = Callable[[str], None]
"""Told why an answer pauses."""

Messages: TypeAlias = Sequence[Mapping[str, object]]
"""A conversation: objects with `role` and `content`; see `wire.client.ChatMessage`."""

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""


class Options(TypedDict, total=False):
    """How tokens are chosen and an answer ends; see `wire.client.GenerateRequest`."""

    max_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int
    logprobs: int | bool


class ChatOptions(Options, total=False):
    """The same, and what only conversations have."""

    tools: Sequence[Mapping[str, object]]
    reasoning_effort: float | str


def make_request(
    prompt: Prompt | None, messages: Messages | None, options: ChatOptions, *, stream: bool = False
) -> GenerateRequest:
    """The request for these options.

    Args:
        prompt: or None.
        messages: or None.
        options: how tokens are chosen and the answer ends.
        stream: whether the reader wants pieces. Without, it is asked for in pieces all the same, so that what
            has come is known when the head is lost; not with logprobs, which not every head can take up in
            their midst.

    Raises:
        RequestError: they can not be sent; the sentence says why.
    """
    scores = options.get("logprobs")
    stream = stream or scores is None or scores is False
    fields: dict[str, object] = {**options, "stream": stream}
    if isinstance(prompt, str):
        fields["prompt"] = prompt
    elif prompt is not None:
        fields["token_ids"] = tuple(prompt)
    if messages is not None:
        fields["messages"] = [dict(message) for message in messages]
    if "tools" in options:
        fields["tools"] = [dict(tool) for tool in options["tools"]]
    for name in ("stop", "stop_token_ids"):
        if name in fields:
            fields[name] = _listed(name, fields[name])
    # By one the answer can be cancelled, by the other it is had again from another head.
    fields |= {"id": secrets.token_hex(8), "key": secrets.token_hex(16)}
    if fields.get("temperature") and fields.get("seed") is None:
        fields["seed"] = secrets.randbits(63)
    if stream:
        fields["acks"] = True
    try:
        request = GenerateRequest.model_validate(fields)
    except ValidationError as error:
        raise RequestError(ErrorCode.BAD_REQUEST, f"this can not be sent: {explain(error)}") from None
    try:
        encode(request)
    except (TypeError, ValueError):
        text = "this can not be sent: a text in it is no Unicode; was it read in another encoding?"
        raise RequestError(ErrorCode.BAD_REQUEST, text) from None
    return request


def make_cancel(request_id: str) -> bytes:
    """What ends the request with this id at the head, over the same connection."""
    return encode(CancelRequest(id=request_id))


def _listed(name: str, value: object) -> tuple[object, ...]:
    """The items; a lone text would be taken for its characters."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(ErrorCode.BAD_REQUEST, f"this can not be sent: field '{name}' should be a list")
    return tuple(value)


class Flow:
    """One answer in pieces as its reader sees it: what comes, in order, and what is to be said back."""

    def __init__(
        self, request: GenerateRequest, on_queued: Queued | None, before: int = 0, *, told: bool = False
    ) -> None:
        self.request = request
        self._told = told
        self._id = request.id or ""
        self._on_queued = on_queued
        self._seq = 0
        self._before = before
        self._ids = list(request.held)
        self.place = 0
        """In the queue, as it was told last; 0 where it may run."""
        self.over = False
        """The head has said its last word."""

    def take(self, data: bytes) -> StreamPiece | GenerateReply | None:
        """What a reply brings; None for a word of the queue. Pieces are numbered without a gap."""
        reply = decode_reply(data)
        if isinstance(reply, QueueNotice):
            self.place = reply.queued
            if self._on_queued is not None:
                self._on_queued(reply.queued)
            return None
        self.place = 0
        if isinstance(reply, ErrorReply):
            self.over = True
            raise reply.to_error()
        if not isinstance(reply, StreamPiece | GenerateReply):
            raise WireError("the head answered a prompt with something else than an answer")
        self._seq += 1
        if reply.seq != self._seq:
            raise WireError(f"the head sent piece {reply.seq} of the answer where piece {self._seq} was due")
        self.over = isinstance(reply, GenerateReply)
        if isinstance(reply, StreamPiece):
            self._ids += reply.token_ids
        return reply.model_copy(update={"seq": self._before + self._seq}) if self._before else reply

    def word(self) -> bytes | None:
        """To be sent once the piece was read: every so often the head must know of it."""
        return None if self._seq % ACK_PIECES else encode(AckRequest(id=self._id, seq=self._seq))

    def cancel(self) -> bytes:
        """To be sent when no more is wanted."""
        return make_cancel(self._id)

    def paused(self, error: UnreachableError) -> StreamPiece | None:
        """A piece to tell the reader that the head was lost; None where that has been told."""
        if not isinstance(error, HeadLostError) or (self._told and not self.begun()):
            return None
        self._told = True
        self._before += 1
        seq = self._before + self._seq
        return StreamPiece(id=self.request.id, seq=seq, token_ids=(), notice=PAUSED)

    def again(self) -> Flow:
        """The same answer over another connection, behind the ids that have come.

        Raises:
            HeadLostError: it can not be taken up in its midst.
        """
        if not self.begun():
            return Flow(self.request, self._on_queued, self._before, told=self._told)
        if self.request.key is None:
            raise HeadLostError("the answer broke off and can not be taken up in its midst: ask again")
        request = self.request.model_copy(update={"held": tuple(self._ids)})
        return Flow(request, self._on_queued, self._before + self._seq, told=self._told)

    def begun(self) -> bool:
        """Whether a piece has come."""
        return self._seq > 0


class Patience:
    """How often a request is asked again that the head had no room for, or whose head was lost.

    A request may be what kills its heads. So it is given up when two were lost with it, one after the other,
    without a token in between and not while others were before it in the queue; and one whose last head gave
    it no token stands back at the next, so that those which are in no doubt have their next token before it
    can do harm.

    Args:
        timeout_s: seconds; None for ever.
        retry: False asks once.
        whole: the time is for the whole answer, not for each piece of it.
    """

    def __init__(self, timeout_s: float | None, *, retry: bool, whole: bool) -> None:
        self.limit_s = timeout_s
        self._whole = whole
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._retry = retry
        self._lost_at: float | None = None
        self._asked = False
        self._fruitless = 0
        self._queued = 0

    @property
    def left_s(self) -> float | None:
        """Seconds that are left."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def pause_s(self, error: RequestError) -> float:
        """Seconds to wait before the next try; raises the error when there is none."""
        leaving = error.code is ErrorCode.RING_INCOMPLETE and error.retry_after_s is not None
        if not (leaving or error.code is ErrorCode.OVERLOADED) or not self._retry:
            raise error
        if leaving and self._lost_at is None:
            # Its head will be gone in a moment.
            self._lost_at = time.monotonic()
        # All who were sent away together must not come back together.
        pause = (error.retry_after_s or RETRY_S) * random.uniform(1.0, 1.3)
        if self._end is not None and time.monotonic() + pause >= self._end:
            raise error
        return pause

    @property
    def reply_s(self) -> float | None:
        """Seconds that the next reply may take."""
        return self.left_s if self._whole else self.limit_s

    @property
    def hold_back_s(self) -> float:
        """Seconds to wait at a head that was just found before it is asked."""
        return HOLD_BACK_S * random.uniform(1.0, 3.0) if self._fruitless else 0.0

    def asked(self) -> None:
        """A head has the request."""
        self._asked = True

    def heard(self, reply: StreamPiece | GenerateReply | None) -> None:
        """Something came from the head; None stands for a word of the queue."""
        self._lost_at = None
        if reply is not None and reply.token_ids:
            self._asked, self._fruitless = False, 0

    def return_s(self, error: UnreachableError, place: int = 0) -> float:
        """Seconds before a lost head is looked for again; raises an error when that has no sense.

        Args:
            error: by which it was lost.
            place: in its queue, as it was told last; 1 is next, 0 is none.
        """
        now = time.monotonic()
        if isinstance(error, WrongAddressError) and self._retry and (self._end is None or now < self._end):
            return 0.0
        if self._asked and isinstance(error, HeadLostError):
            self._asked = False
            spared = place > 1 and self._queued < QUEUED
            self._queued += spared
            # Of a connection that this side has ended the request is not the cause.
            self._fruitless += not (error.hung_up or spared)
            if self._fruitless >= FRUITLESS:
                text = f"{FRUITLESS} heads were lost while they had this request, which may be the cause"
                raise RequestError(ErrorCode.INTERNAL, f"{text}: {error}") from None
        if self._lost_at is None and isinstance(error, HeadLostError):
            self._lost_at = now
        hopeless = self._lost_at is None or isinstance(error, LateReplyError | NotAdmittedError)
        if not self._retry or hopeless or now - (self._lost_at or now) >= RETURN_S:
            raise error
        if self._end is not None and now >= self._end:
            raise error
        return RETURN_EVERY_S * random.uniform(0.5, 1.5)


def read_answer(data: bytes) -> GenerateReply:
    """The whole answer in a reply.

    Raises:
        RequestError: the head refused, or failed.
        WireError: it is something else.
    """
    reply = decode_reply(data)
    if isinstance(reply, ErrorReply):
        raise reply.to_error()
    if not isinstance(reply, GenerateReply):
        raise WireError("the head answered a prompt with something else than an answer")
    return reply


def pass_on(piece: StreamPiece, on_notice: Noticed | None) -> None:
    """Tell who waits for the whole answer what a piece says about it."""
    if piece.notice is not None and on_notice is not None:
        on_notice(piece.notice)


def unnumbered(reply: GenerateReply) -> GenerateReply:
    """The whole answer, for a reader who saw no pieces."""
    return reply.model_copy(update={"seq": None, "final": None})


def read_status(data: bytes) -> dict[str, JsonValue]:
    """The status in a reply; raises what `read_answer` does."""
    reply = decode_reply(data)
    if isinstance(reply, ErrorReply):
        raise reply.to_error()
    if not isinstance(reply, StatusReply):
        raise WireError("the head answered a status request with something else than its status")
    return reply.status
