"""The control messages between nodes: greeting, shard claims, formation, heartbeat, journal, status.

Each is a JSON object with `type` and its sender, `node` and `instance`. In every version of the protocol
`hello`, `welcome` and `refusal` hold `type`, `protocol` and `software`, and `refusal` holds `message` and
`serving`: any two versions can part in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, Field, JsonValue, Strict, TypeAdapter, ValidationError

from cascadia_p2p.errors import WireError
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import PROTOCOL
from cascadia_p2p.wire.journal import Journal, JournalAck
from cascadia_p2p.wire.model import (
    Address,
    ControlBase,
    Count,
    Fingerprint,
    Formation,
    JsonObject,
    Line,
    Message,
    Name,
    Node,
    Run,
    Sentence,
    explain,
    parse_object,
)

MAX_CONTROL_BYTES: Final = 1 << 18
"""Bytes of a control message, at most."""

MAX_STAGES: Final = 1024
"""Nodes in a ring, shards of a model, and shard directories that a node may report, at most."""

MAX_SOURCES: Final = 4096
"""Files of a checkpoint that a node may tell samples of."""


def _checked_promise(promise: Promise) -> Promise:
    if not all(1 <= value < 2**31 for value in (promise.slots, promise.context, promise.rows)):
        raise ValueError("a promise needs slots, context and rows of 1 or more")
    if not 0 <= promise.kept < 2**16:
        raise ValueError("a promise keeps 0 to 65535 prefixes")
    return promise


Promised = Annotated[Promise, AfterValidator(_checked_promise)]
ShardIndex = Annotated[int, Field(ge=0, lt=MAX_STAGES)]
Holding = Annotated[tuple[ShardIndex, ...], Strict(False), Field(max_length=MAX_STAGES, fail_fast=True)]
Seconds = Annotated[float, Field(ge=0.0, le=1e12)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Rows = Annotated[int, Field(ge=1, le=1 << 16)]
Pace = Annotated[
    tuple[
        Annotated[tuple[Rows, Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)]], Strict(False)],
        ...,
    ],
    Strict(False),
    Field(max_length=64, fail_fast=True),
]
Padding = Annotated[str, Field(max_length=1 << 17)]
Addresses = Annotated[tuple[Address, ...], Strict(False), Field(max_length=256, fail_fast=True)]
Samples = Annotated[
    tuple[Annotated[str, Field(pattern=r"^(?:[0-9a-f]{16})?$")], ...],
    Strict(False),
    Field(max_length=MAX_SOURCES, fail_fast=True),
]


class ClaimState(StrEnum):
    """How far a node is with the shard that it claims, weakest first."""

    WANTED = "wanted"
    LOADING = "loading"
    LOADED = "loaded"
    SERVING = "serving"

    @property
    def rank(self) -> int:
        """The higher rank wins a shard."""
        return _CLAIM_ORDER.index(self)


_CLAIM_ORDER: Final = tuple(ClaimState)


class RefusalCode(StrEnum):
    """Why a node will not talk to another."""

    VERSION = "version"
    FLEET = "fleet"
    MODEL = "model"
    IDENTITY = "identity"
    FULL = "full"
    BUSY = "busy"
    MALFORMED = "malformed"


class Claim(Message):
    """Which shard a node wants or has, and for how long it has stood in this state, in seconds."""

    shard: ShardIndex | None = None
    state: ClaimState = ClaimState.WANTED
    age_s: Seconds = 0.0


class Member(Message):
    """One stage of a ring in formation; `data` is where its predecessor connects."""

    node: Node
    instance: Run
    shard: ShardIndex
    data: Address


class Introduction(ControlBase):
    """Everything a node says of itself when it meets another.

    Args:
        host: the machine's name, for people.
        fingerprint: hash of config, source index, split, encodings and tokenizer.
        sources: for every file of the checkpoint, by name, a sample of it, or "" when no shard here was
            read from it. Equal fingerprints mean equal names.
        shards: shards that the model is split into.
        holds: shards whose files are here.
        precision, cache: how exactly it computes and how it keeps keys and values, in the words of `join`; ""
            when not told.
        control, data: where this node's sockets can be reached.
        client: where clients are served; only on a serving head.
        epoch: the highest epoch counter accepted so far.
        ring: the epoch this node is a member of now.
        peers: control addresses of other nodes that suit: who knows one node of a fleet comes to know all.
    """

    protocol: Annotated[int, Field(ge=0, lt=2**31)] = PROTOCOL
    software: Name
    fleet: Name
    host: Line
    fingerprint: Fingerprint
    sources: Samples = ()
    model: Line
    shards: Annotated[int, Field(ge=1, le=MAX_STAGES)]
    layers: Annotated[int, Field(ge=1, le=1 << 16)]
    hidden: Annotated[int, Field(ge=1, le=1 << 20)]
    holds: Holding = ()
    claim: Claim
    promise: Promised
    control: Address
    data: Address
    client: Address | None = None
    epoch: Count = 0
    ring: Formation | None = None
    peers: Addresses = ()
    device: Line
    precision: Line = ""
    cache: Line = ""
    pid: Annotated[int, Field(ge=0, lt=2**32)]


class Greeting(Introduction):
    """The first message that a dialling node sends."""

    type: Literal["hello"] = "hello"


class Welcome(Introduction):
    """The answer to a greeting that suits."""

    type: Literal["welcome"] = "welcome"


class Refusal(ControlBase):
    """The answer to what does not suit, a greeting above all; `serving` when a ring is open here."""

    type: Literal["refusal"] = "refusal"
    code: RefusalCode
    message: Sentence
    serving: bool = False
    software: Name
    protocol: Annotated[int, Field(ge=0, lt=2**31)] = PROTOCOL


class State(ControlBase):
    """The changing part of an introduction, sent to every peer when it changes.

    Args:
        progress: share of the shard that is loaded.
        standby: another node's claim on the same shard goes first.
        layer_s: profiled seconds that one layer takes for a full frame; 0 when not known.
        pace: profiled times of the whole stage, as rows of a frame and seconds; empty when not known.
        leaving: it takes no new work and ends as soon as it can be spared.
    """

    type: Literal["state"] = "state"
    claim: Claim
    holds: Holding = ()
    client: Address | None = None
    epoch: Count = 0
    ring: Formation | None = None
    progress: Share = 0.0
    standby: bool = False
    layer_s: Seconds = 0.0
    pace: Pace = ()
    leaving: bool = False


class Assign(ControlBase):
    """From the live node with the lowest id: load this shard."""

    type: Literal["assign"] = "assign"
    shard: ShardIndex


class Form(ControlBase):
    """From the head: forget older epochs and take your place; members are in ring order, the head first."""

    type: Literal["form"] = "form"
    epoch: Formation
    members: Annotated[
        tuple[Member, ...], Strict(False), Field(min_length=1, max_length=MAX_STAGES, fail_fast=True)
    ]
    promise: Promised


class Ready(ControlBase):
    """To the head: the epoch is taken, the successor is being connected."""

    type: Literal["ready"] = "ready"
    epoch: Formation


class Reject(ControlBase):
    """To the head: the epoch is not taken, and why."""

    type: Literal["reject"] = "reject"
    epoch: Formation
    reason: Sentence


class Open(ControlBase):
    """From the head: the probe came round, the ring serves what it promises."""

    type: Literal["open"] = "open"
    epoch: Formation
    promise: Promised


class Close(ControlBase):
    """From the head: the epoch is over; to the head: this member can not go on with it."""

    type: Literal["close"] = "close"
    epoch: Formation
    reason: Sentence


class Beat(ControlBase):
    """The heartbeat.

    Args:
        epoch: counter of the epoch that the data thread is in; 0 when in none.
        progress: ticks of the data thread, at least one a layer.
        frames_in: frames of this epoch that were taken.
        frames_out: frames of this epoch that were handed to the successor's socket.
        waiting_send: a frame is ready and the socket to the successor does not take it.
        probe_seen: id of the last probe frame that came by; 0 for none.
    """

    type: Literal["beat"] = "beat"
    epoch: Count = 0
    progress: Count = 0
    frames_in: Count = 0
    frames_out: Count = 0
    waiting_send: bool = False
    probe_seen: Count = 0


class Bye(ControlBase):
    """The sender leaves, and why."""

    type: Literal["bye"] = "bye"
    reason: Sentence


class StatusQuery(Message):
    """Asks a node what it knows of the ring; the asker need not be a node.

    Args:
        padding: means nothing; it makes the message long, so that the asker can tell how fast the way is.
    """

    type: Literal["status_query"] = "status_query"
    node: Node | None = None
    instance: Run | None = None
    padding: Padding | None = None


class StatusReport(ControlBase):
    """The answer to a status query."""

    type: Literal["status_report"] = "status_report"
    body: JsonObject


class Clients(Message):
    """Which list of clients the sender has, and the list itself when it is asked for or has changed.

    Args:
        node, instance: the sender; whoever issues keys is no node.
        digest: tells lists apart.
        sealed: the list as JSON, authenticated with the fleet's key.
    """

    type: Literal["clients"] = "clients"
    node: Node | None = None
    instance: Run | None = None
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    sealed: Annotated[str, Field(max_length=200_000)] | None = None


ControlMessage: TypeAlias = (
    Greeting
    | Welcome
    | Refusal
    | State
    | Assign
    | Form
    | Ready
    | Reject
    | Open
    | Close
    | Beat
    | Bye
    | StatusQuery
    | StatusReport
    | Clients
    | Journal
    | JournalAck
)


@dataclass(frozen=True, slots=True)
class OtherVersion:
    """A hello, welcome or refusal of another protocol version, read as far as all versions agree.

    Args:
        type: "hello", "welcome" or "refusal".
        protocol: the version it speaks.
        software: the release it says it is.
        message: a refusal's sentence; empty for the others.
        serving: a refusal by a node whose ring is open.
    """

    type: str
    protocol: int
    software: str
    message: str
    serving: bool = False

    def __str__(self) -> str:
        return f"protocol {self.protocol} (cascadia-p2p {self.software}) meets protocol {PROTOCOL} here"


_ADAPTER: Final[TypeAdapter[ControlMessage]] = TypeAdapter(
    Annotated[ControlMessage, Field(discriminator="type")]
)
_SHARED_BY_ALL_VERSIONS: Final = frozenset({"hello", "welcome", "refusal"})


def decode_control(data: bytes) -> ControlMessage | OtherVersion:
    """The control message in `data`, or what can be told of another version's greeting.

    Raises:
        WireError: anything else; the sentence names the field and what was expected.
    """
    raw = parse_object(data, MAX_CONTROL_BYTES, "a control message")
    kind, protocol = raw.get("type"), raw.get("protocol")
    if not isinstance(kind, str):
        raise WireError("a control message needs a field 'type' that is a string")
    if kind in _SHARED_BY_ALL_VERSIONS and type(protocol) is int and protocol != PROTOCOL:
        return OtherVersion(
            kind,
            protocol,
            _printable(raw.get("software"), 64),
            _printable(raw.get("message"), 4096),
            raw.get("serving") is True,
        )
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        raise WireError(f"control message '{_printable(kind, 32)}': {explain(error)}") from None


def _printable(value: JsonValue, limit: int) -> str:
    """At most `limit` characters of a string that came from outside, safe to print; "" for anything else."""
    if not isinstance(value, str):
        return ""
    return "".join(letter if letter.isprintable() else "?" for letter in value[:limit])
