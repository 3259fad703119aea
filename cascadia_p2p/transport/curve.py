"""CurveZMQ: key pairs, sockets that use them, and the authenticator that alone lets a peer in.

ZeroMQ asks the authenticator about every key that knocks. Where none answers, nobody gets in: each closed
socket names a domain and insists on it. Without that, ZeroMQ would let in everybody.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import structlog
import zmq
from zmq.utils import z85

from cascadia_p2p.errors import CascadiaError

KEY_CHARACTERS: Final = 40
"""Of a key in Z85, ZeroMQ's own spelling of 32 bytes."""

STOP_S: Final = 30.0
"""Until the authenticator's thread is given up: its sockets must not be closed under it."""
_ZAP: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"

_serial = itertools.count(1)
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, both keys in Z85; the secret one is never shown."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """A pair that nobody has."""
        return cls(*zmq.curve_keypair())

    @classmethod
    def of(cls, secret: bytes) -> KeyPair:
        """The pair of a secret key.

        Raises:
            ValueError: it is no key.
        """
        check_key(secret)
        return cls(zmq.curve_public(secret), secret)


def check_key(key: bytes) -> None:
    """See that a key is one in its form.

    Raises:
        ValueError: it is not.
    """
    if len(key) != KEY_CHARACTERS:
        raise ValueError(f"a key has {KEY_CHARACTERS} characters, this one {len(key)}")
    try:
        raw = z85.decode(key)
    except Exception:  # it raises several kinds, by what is wrong
        raise ValueError("a key is written in Z85") from None
    if len(raw) != 32 or z85.encode(raw) != key or not any(raw):
        raise ValueError("a key is 32 bytes in Z85")


def raw_key(key: bytes) -> bytes:
    """The 32 bytes of a key in Z85."""
    return bytes(z85.decode(key))


class Domain(Enum):
    """Who may come through a socket."""

    NODES = b"nodes"
    """Nodes of the fleet."""
    CLIENTS = b"clients"
    """Nodes, and clients that were issued a key."""


Admit = Callable[[Domain, bytes], bool]
"""Whether a public key in Z85 may come in."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What a process proves itself with, and whom it expects.

    Args:
        pair: its own.
        server: the public key of those it dials, in Z85.
        admit: judges those who dial it; called in the authenticator's thread.
    """

    pair: KeyPair
    server: bytes
    admit: Admit = field(default=lambda _domain, _key: False, repr=False)


def present(made: zmq.Socket[bytes], keys: Keys) -> None:
    """Let a socket that connects prove itself and demand the expected server; before connecting."""
    made.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    made.setsockopt(zmq.CURVE_PUBLICKEY, keys.pair.public)
    made.setsockopt(zmq.CURVE_SECRETKEY, keys.pair.secret)


def close_door(made: zmq.Socket[bytes], keys: Keys, domain: Domain) -> None:
    """Let in only whom the authenticator admits, at every address that is bound from now on."""
    made.setsockopt(zmq.ZAP_DOMAIN, domain.value)
    made.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    made.setsockopt(zmq.CURVE_SECRETKEY, keys.pair.secret)
    made.setsockopt(zmq.CURVE_SERVER, 1)


class Authenticator:
    """Answers ZeroMQ's questions about keys, in a thread of its own; one a context.

    Whatever goes wrong in a judgement is a refusal. Should the thread end, all later peers are refused.

    Args:
        context: whose sockets ask.
        admit: judges a key; see `Keys`.

    Raises:
        CascadiaError: the context has an authenticator already.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admit: Admit) -> None:
        self._admit = admit
        self._zap = context.socket(zmq.REP)
        self._wake = context.socket(zmq.PAIR)
        self._woken = context.socket(zmq.PAIR)
        self._sockets = (self._zap, self._wake, self._woken)
        self.admitted = 0
        self.refused = 0
        """Keys that were turned away; who knows not the fleet's public key does not come this far."""
        try:
            for made in self._sockets:
                made.setsockopt(zmq.LINGER, 0)
            name = f"inproc://authenticator-{next(_serial)}"
            self._woken.bind(name)
            self._wake.connect(name)
            self._zap.bind(_ZAP)
        except zmq.ZMQError as error:
            self._close()
            raise CascadiaError(f"peers can not be authenticated here: {error.strerror}") from None
        self._thread = threading.Thread(target=self._serve, name="authenticator", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still answers."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread; nobody is let in afterwards."""
        if self._thread.is_alive():
            with contextlib.suppress(zmq.ZMQError):
                self._wake.send(b"", zmq.NOBLOCK)
            self._thread.join(STOP_S)
        self._wake.close(linger=0)

    def _serve(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._zap, zmq.POLLIN)
            poller.register(self._woken, zmq.POLLIN)
            while True:
                ready = dict(poller.poll())
                if self._woken in ready:
                    return
                if self._zap in ready:
                    self._answer(self._zap.recv_multipart())
        except Exception:
            _log.exception(
                "authenticator_failed", message="the authenticator has ended: nobody is let in any more"
            )
        finally:
            # A question to a closed socket is refused at once, one to an idle socket only after seconds.
            self._zap.close(linger=0)
            self._woken.close(linger=0)

    def _answer(self, question: list[bytes]) -> None:
        number = question[1] if len(question) > 1 else b""
        try:
            user = self._judge(question)
        except Exception:
            _log.exception("authentication_failed", message="a key could not be judged and was refused")
            user = None
        if user is None:
            self.refused += 1
            reply = [_VERSION, number, b"400", b"not admitted", b"", b""]
        else:
            self.admitted += 1
            reply = [_VERSION, number, b"200", b"OK", user, b""]
        self._zap.send_multipart(reply)

    def _judge(self, question: list[bytes]) -> bytes | None:
        """The admitted key, which ZeroMQ notes on every message of the connection; None for a refusal."""
        if len(question) != 7 or question[0] != _VERSION or question[5] != b"CURVE":
            return None
        domain, key = Domain(question[2]), bytes(z85.encode(question[6]))
        return key if self._admit(domain, key) is True else None

    def _close(self) -> None:
        for made in self._sockets:
            made.close(linger=0)


class Knock(Enum):
    """Why a handshake failed, as far as ZeroMQ tells."""

    MECHANISM = "mechanism"
    """One side has a key, the other has none."""
    KEY = "key"
    """Who dialled has another key; only the dialled side can tell."""
    REFUSED = "refused"
    """The fleet's key was right, and the own one is not admitted."""
    HUNG_UP = "hung_up"
    """The other side ended it: for a key that is not its own, or for any reason else."""
    FOREIGN = "foreign"
    """What it sent is no ZeroMQ, or it sent too little in the time that it had."""


_MECHANISM: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_CRYPTOGRAPHIC: Final = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
_HUNG_UP: Final = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED, errno.EPROTO})


def failed_handshake(event: zmq.Event, value: int) -> Knock | None:
    """What a monitor's event says of a handshake; None for another event."""
    match event:
        case zmq.Event.HANDSHAKE_FAILED_AUTH:
            return Knock.REFUSED
        case zmq.Event.HANDSHAKE_FAILED_PROTOCOL if value == _MECHANISM:
            return Knock.MECHANISM
        case zmq.Event.HANDSHAKE_FAILED_PROTOCOL if value == _CRYPTOGRAPHIC:
            return Knock.KEY
        case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL if value in _HUNG_UP:
            return Knock.HUNG_UP
        case zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            return Knock.FOREIGN
    return None
