"""What the head tells a standby of the answers that it makes, so that they go on when it dies.

Messages of one session are numbered 1, 2, 3, ...; one that is missing, or not acknowledged, ends the session,
and the next tells all answers anew. An answer is known by a number that the head gave it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, Strict

from cascadia_p2p.wire.client import (
    Alternatives,
    FinishReason,
    RequestKey,
    Seed,
    Share,
    Stops,
    Temperature,
    TokenId,
    TokenIds,
)
from cascadia_p2p.wire.frames import MAX_ALTERNATIVES
from cascadia_p2p.wire.model import ControlBase, Count, Message

MAX_TOLD: Final = 1 << 16
"""Answers that one message speaks of, at most."""

ClientKey = Annotated[str, Field(max_length=64, pattern=r"^[\x20-\x7e]*$")]
"""The public key of a client, as ZeroMQ spells it; empty for one that asked in the clear."""

EndIds = Annotated[tuple[TokenId, ...], Strict(False), Field(max_length=1 << 12, fail_fast=True)]
Logprob = Annotated[float, Field(ge=-3.5e38, le=3.5e38)]
Likeliest = Annotated[
    tuple[Annotated[tuple[TokenId, Logprob], Strict(False)], ...],
    Strict(False),
    Field(max_length=MAX_ALTERNATIVES, fail_fast=True),
]
Scores = Annotated[
    tuple[Annotated[tuple[Logprob, Likeliest], Strict(False)], ...],
    Strict(False),
    Field(max_length=1 << 16, fail_fast=True),
]
Growth: TypeAlias = Annotated[tuple[Count, TokenIds, Scores], Strict(False)]
"""An answer's number, its next ids (those of the prompt first), and what generated ones scored, if asked."""

End: TypeAlias = Annotated[
    tuple[Count, Annotated[FinishReason, Strict(False)], Count, Annotated[float, Field(ge=0.0, le=1e9)]],
    Strict(False),
]
"""An answer's number, why it is complete, what of its prompt was known, and since how many seconds."""


class Begun(Message):
    """An answer that a standby has not heard of: who asks, and what its tokens depend on.

    Args:
        number: of the answer, for later messages.
        client: the key of the client that asked.
        key: of the request.
        prompt: ids of the prompt, which come first.
        max_tokens, stop, stop_ids, logprobs: see `wire.client.GenerateRequest`; the ids hold the model's own.
        temperature, top_k, top_p, seed: see `types.Sampling`.
    """

    number: Count
    client: ClientKey = ""
    key: RequestKey
    prompt: Annotated[int, Field(ge=1, lt=2**31)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop: Stops = ()
    stop_ids: EndIds = ()
    logprobs: Alternatives = None
    temperature: Temperature = 0.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    top_p: Share = 1.0
    seed: Seed = 0


class Journal(ControlBase):
    """From the head to a standby: what has happened to answers, in the order of the fields.

    Args:
        session: grows each time that all answers are told anew.
        number: of the message in its session, from 1.
        gone: numbers of answers that nobody will ask for any more.
        begun: answers that are new to the standby.
        grown: ids that came.
        ended: answers that are complete.
        whole: all answers have been told, so that what is left of an earlier session is out of date.
    """

    type: Literal["journal"] = "journal"
    session: Count
    number: Count
    gone: Annotated[tuple[Count, ...], Strict(False), Field(max_length=MAX_TOLD, fail_fast=True)] = ()
    begun: Annotated[tuple[Begun, ...], Strict(False), Field(max_length=MAX_TOLD, fail_fast=True)] = ()
    grown: Annotated[tuple[Growth, ...], Strict(False), Field(max_length=MAX_TOLD, fail_fast=True)] = ()
    ended: Annotated[tuple[End, ...], Strict(False), Field(max_length=MAX_TOLD, fail_fast=True)] = ()
    whole: bool = False


class JournalAck(ControlBase):
    """From a standby to the head: the session's messages up to `number` were taken."""

    type: Literal["journal_ack"] = "journal_ack"
    session: Count
    number: Count
