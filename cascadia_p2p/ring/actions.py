"""What the ring machine asks of the node that owns it; to be done in the order given.

Sending is best effort: the machine repeats what must arrive. Nothing here blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.ring.stagetime import RingTime
from cascadia_p2p.types import Endpoint, Epoch, Instance, NodeId, Promise
from cascadia_p2p.wire.messages import ControlMessage, Journal, JournalAck, Member

Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Route:
    """This link reaches that node from now on."""

    link: int
    node: NodeId
    instance: Instance


@dataclass(frozen=True, slots=True)
class Send:
    """Send to a node over any of its links."""

    node: NodeId
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send to each of these nodes."""

    nodes: tuple[NodeId, ...]
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class Answer:
    """Send back over the link that the event came from; the sender may be nobody's node."""

    link: int
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class Dial:
    """Dial this control address, unless that is being done already.

    On every connect, this one and each later one, `RingMachine.greeting()` is sent first, and again every
    second until the link gets a Route or is ended.
    """

    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class Retry:
    """End this link; if this node dialled it, dial its address again after some seconds."""

    link: int
    after_s: float


@dataclass(frozen=True, slots=True)
class Abandon:
    """End this link and do not dial its address again: it leads back to this node."""

    link: int


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Forget the links of this instance and close them; queued messages may be lost."""

    node: NodeId
    instance: Instance


@dataclass(frozen=True, slots=True)
class LoadShard:
    """Load this shard in place of any other, blocking nothing; tell how it goes by the load events."""

    shard: int


@dataclass(frozen=True, slots=True)
class SwitchEpoch:
    """Take this epoch into the data thread; tell by Switched or SwitchFailed.

    Args:
        epoch: the new one; frames of any other are dropped and counted.
        members: in ring order, the head first.
        stage: this node's place in `members`.
        promise: what all members can hold.
        successor: where frames go; the last stage's is the head, a ring of one's is itself.
    """

    epoch: Epoch
    members: tuple[Member, ...]
    stage: int
    promise: Promise
    successor: Member


@dataclass(frozen=True, slots=True)
class SendProbe:
    """Send a probe frame with this number round the epoch's ring; tell by ProbeReturned."""

    epoch: Epoch
    number: int


@dataclass(frozen=True, slots=True)
class SetPace:
    """On the head: compose frames for stages that take these times."""

    times: RingTime


@dataclass(frozen=True, slots=True)
class OpenRing:
    """The ring serves; on the head, admit requests.

    Args:
        epoch: the one that opened.
        members: its nodes, by shard.
        promise: what all of them hold.
        survived: the node that was lost by silence is heard again: no stream has ended its process.
    """

    epoch: Epoch
    members: tuple[Member, ...]
    promise: Promise
    survived: bool = False


@dataclass(frozen=True, slots=True)
class CloseRing:
    """The epoch is over on this node; on the head, streams are kept for the next.

    Args:
        epoch: the one that ended.
        reason: a sentence.
        missing: shards that nobody serves now.
        was_open: it had been open, so clients may be waiting.
        held: the first frame that the lost stage had not passed on; 0 when no stage was lost by itself.
    """

    epoch: Epoch
    reason: str
    missing: tuple[int, ...]
    was_open: bool
    held: int = 0


@dataclass(frozen=True, slots=True)
class PauseAdmission:
    """Start no new request: a member is suspect. Lasts until ResumeAdmission or CloseRing."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResumeAdmission:
    """Start requests again."""


@dataclass(frozen=True, slots=True)
class BecomeHead:
    """Bind the client port."""


@dataclass(frozen=True, slots=True)
class StopBeingHead:
    """Close the client port; why, in words."""

    reason: str


@dataclass(frozen=True, slots=True)
class TakeJournal:
    """The present head tells this node, its standby, of answers."""

    message: Journal


@dataclass(frozen=True, slots=True)
class TakeJournalAck:
    """A node tells what it has taken of this one's journal."""

    message: JournalAck


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing needs this node any more, after it was asked to drain."""


@dataclass(frozen=True, slots=True)
class Say:
    """Log an event and show its sentence.

    Args:
        level: how loud.
        event: stable snake_case name.
        sentence: for people.
        fields: for machines.
    """

    level: Level
    event: str
    sentence: str
    fields: dict[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fatal:
    """End the process with this error's exit code."""

    error: CascadiaError


Action: TypeAlias = (
    Route
    | Send
    | Broadcast
    | Answer
    | Dial
    | Retry
    | Abandon
    | DropPeer
    | LoadShard
    | SwitchEpoch
    | SendProbe
    | SetPace
    | OpenRing
    | CloseRing
    | PauseAdmission
    | ResumeAdmission
    | BecomeHead
    | StopBeingHead
    | TakeJournal
    | TakeJournalAck
    | Drained
    | Say
    | Fatal
)
