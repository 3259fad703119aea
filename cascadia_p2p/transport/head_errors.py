"""What a client is told of a head that it can not reach, or no longer."""

from __future__ import annotations

import zmq

from cascadia_p2p.errors import (
    ErrorCode,
    HeadLostError,
    LateReplyError,
    NoHeadError,
    NotAdmittedError,
    RequestError,
    UnreachableError,
)
from cascadia_p2p.transport.curve import Knock
from cascadia_p2p.transport.looping import SocketEvent
from cascadia_p2p.transport.naming import locate
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.client import MAX_REQUEST_BYTES


def require_fits(data: bytes) -> None:
    """See that a head will take a request of this size.

    Raises:
        RequestError: it would end the connection instead, which looks like its loss.
    """
    if len(data) > MAX_REQUEST_BYTES:
        text = f"the request is {len(data):,} bytes, and a head takes {MAX_REQUEST_BYTES:,}: shorten it"
        raise RequestError(ErrorCode.BAD_REQUEST, text)


def failure_in(happened: SocketEvent, why: Knock | None, endpoint: Endpoint, *, keyed: bool) -> str | None:
    """What an event says about a connection attempt; "" for success, None for nothing.

    Args:
        happened: the event.
        why: what made the handshake fail, if that was the event.
        endpoint: of the head.
        keyed: whether this side has a key.

    Raises:
        NotAdmittedError: no further attempt will do better.
    """
    match happened.event:
        case zmq.Event.HANDSHAKE_SUCCEEDED:
            return ""
        case zmq.Event.CLOSED:
            return "nothing listens there"
        case zmq.Event.DISCONNECTED:
            return None
    match why:
        case Knock.REFUSED:
            raise NotAdmittedError(
                f"the head at {endpoint} does not admit this key: it was withdrawn, or is not known there "
                "yet; "
                "'cascadia-p2p keygen --client NAME' where the fleet's key is issues another"
            )
        case Knock.MECHANISM if keyed:
            raise NotAdmittedError(
                f"what listens at {endpoint} speaks in the clear, and this PC has a key for it: it is "
                "another "
                "fleet's, or was started with --insecure; nothing was sent"
            )
        case Knock.MECHANISM:
            raise NotAdmittedError(
                f"the head at {endpoint} takes only clients with a key: name one with --key FILE. On a PC of "
                "the fleet that is fleet.key beside its shards; there 'cascadia-p2p keygen --client NAME' "
                "makes one for others"
            )
        case Knock.HUNG_UP if keyed:
            return "it has another fleet's key than this PC, or is no head"
    return "what listens there does not speak this protocol"


def unreachable(endpoint: Endpoint, reason: str) -> UnreachableError:
    """Nobody answered there, for this reason."""
    return NoHeadError(
        f"no head node answers at {endpoint}: {reason}", "check the address and 'cascadia-p2p status'"
    )


def located(endpoint: Endpoint) -> Endpoint:
    """The address of the head.

    Raises:
        UnreachableError: its name is not known.
    """
    try:
        return locate(endpoint)
    except UnreachableError as error:
        raise unreachable(endpoint, str(error)) from None


def lost(endpoint: Endpoint, *, hung_up: bool = False) -> HeadLostError:
    """There will be no reply.

    Args:
        endpoint: of the head.
        hung_up: see `HeadLostError`.
    """
    return HeadLostError(
        f"the connection to the head node at {endpoint} was lost before its reply: ask again", hung_up=hung_up
    )


def late(endpoint: Endpoint, timeout_s: float) -> LateReplyError:
    """The time that a reply had, in seconds, is over."""
    return LateReplyError(f"the head node at {endpoint} gave no reply within {timeout_s:.3g} s: ask again")
