"""The one exception tree, and the exit code that each branch ends a command with.

CascadiaError (1)
├── UsageError (2)          a flag, a configuration value or an argument is wrong
├── PortError (3)           an address or port can not be bound
├── CapacityError (4)       not enough memory, or no plan fits
├── MismatchError (5)       another version, fleet or model
├── UnreachableError (6)    nobody answers there
│   ├── NotAdmittedError (6)    its door is closed to this program: no key, another one, or a withdrawn one
│   ├── NoHeadError (6)         no head at an address that was given
│   ├── HeadLostError (6)       the head went away before its reply
│   └── LateReplyError (6)      the time for a reply is over
├── CheckpointError (1)     a source checkpoint is not what it should be
├── ShardError (1)          a file of the exported model is missing, damaged or not ours
├── WireError (1)           bytes from the network that are not a valid frame or message
└── RequestError (1, 2)     a request that is answered with an error; carries the protocol's code, and ends
                            with 2 where the request itself is wrong

Every message names what is wrong, what was expected and what to do; no message needs a traceback.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """The codes of the client protocol."""

    BAD_REQUEST = "bad_request"
    CONTEXT_OVERFLOW = "context_overflow"
    OVERLOADED = "overloaded"
    RING_INCOMPLETE = "ring_incomplete"
    SLOW_CLIENT = "slow_client"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class CascadiaError(Exception):
    """Anything this package refuses or fails at; `str()` is a sentence for the user."""

    exit_code = 1


class UsageError(CascadiaError):
    """A flag, a configuration value or an argument is wrong."""

    exit_code = 2


class PortError(CascadiaError):
    """An address or port can not be bound; the message names the flag that moves it."""

    exit_code = 3


class CapacityError(CascadiaError):
    """Not enough memory, or no plan fits; the message holds need and have."""

    exit_code = 4


class MismatchError(CascadiaError):
    """Another protocol version, fleet or model; the message holds both values."""

    exit_code = 5


class UnreachableError(CascadiaError):
    """Nobody answers at an address, or no head node was found."""

    exit_code = 6


class NotAdmittedError(UnreachableError):
    """What listens there does not let this program in, or would speak with it in the clear only."""


class NoHeadError(UnreachableError):
    """No head answers at an address.

    Args:
        what: the address, and why not.
        advice: what a client does then.
    """

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}; {advice}")
        self.what = what


class HeadLostError(UnreachableError):
    """The connection to the head ended before its reply.

    Args:
        what: which, and what to do.
        hung_up: this side ended it, for another call that shared it or because it was told to.
    """

    def __init__(self, what: str, *, hung_up: bool = False) -> None:
        super().__init__(what)
        self.hung_up = hung_up


class WrongAddressError(UnreachableError):
    """What listens where a head is announced is none of this fleet; another announcement may be true."""


class LateReplyError(UnreachableError):
    """The head gave no reply in time."""


class CheckpointError(CascadiaError):
    """A source checkpoint lacks something, or holds what it should not."""


class ShardError(CascadiaError):
    """A file of the exported model is missing, truncated, altered or not part of it."""


class WireError(CascadiaError):
    """Bytes from the network that are not a valid frame or message."""


class RequestError(CascadiaError):
    """A request that is answered with an error.

    Args:
        code: the protocol's code.
        message: the sentence for the client.
        request_id: the id to echo, when one was given.
        retry_after_s: seconds after which trying again makes sense; only with `overloaded`.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        if code is ErrorCode.BAD_REQUEST:
            self.exit_code = UsageError.exit_code
