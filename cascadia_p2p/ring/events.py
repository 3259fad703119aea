"""What happens to a node, as the ring machine is told of it.

A **link** is one connection over which control messages come: a number that the owner of the sockets gives
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.ring.stagetime import Pace
from cascadia_p2p.types import Endpoint, Epoch, Instance, NodeId
from cascadia_p2p.wire.messages import ControlMessage, OtherVersion


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; to be handed in every `Times.tick` seconds.

    Args:
        deaf: what others say can not be taken for now, for a reason that is none of theirs.
    """

    deaf: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """A control message came over a link; `source` is its address, for people."""

    message: ControlMessage | OtherVersion
    link: int
    source: str = "an unknown address"


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Bytes came over a link that are no message; `sentence` says what is wrong with them."""

    link: int
    source: str
    sentence: str


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection dialled to a node closed; it is being dialled again."""

    node: NodeId
    instance: Instance


@dataclass(frozen=True, slots=True)
class ConnectionRefused:
    """The connection to a node closed, none other is up, and its port refuses: nobody listens there.

    Args:
        node: the node.
        instance: of it.
        former: where this node has dialled an earlier instance of it and not yet this one; else None.
    """

    node: NodeId
    instance: Instance
    former: Endpoint | None = None


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """A share (0 to 1) of the shard is loaded."""

    shard: int
    share: float


@dataclass(frozen=True, slots=True)
class ShardLoaded:
    """The shard is ready to compute.

    Args:
        shard: its index.
        layer_s: the profiled time of a layer for a full frame; 0 when not known.
        pace: profiled times of the whole stage; empty when not known.
    """

    shard: int
    layer_s: float = 0.0
    pace: Pace = ()


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The shard can not be loaded here."""

    shard: int
    error: CascadiaError


@dataclass(frozen=True, slots=True)
class Switched:
    """The data thread is in the epoch: older state dropped, PULL bound, PUSH to the successor connected."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class SwitchFailed:
    """The data thread could not enter the epoch."""

    epoch: Epoch
    sentence: str


@dataclass(frozen=True, slots=True)
class ProbeReturned:
    """A probe frame of the epoch came round; only at the head."""

    epoch: Epoch
    number: int


@dataclass(frozen=True, slots=True)
class Counters:
    """What the data thread has done in its epoch; to be handed in before each Tick.

    Args:
        epoch: the epoch that it is in.
        progress: ticks, at least one a layer, over the whole life of the process.
        frames_in, frames_out: frames of this epoch taken, and handed to the socket to the successor.
        waiting_send: a frame is ready and the socket to the successor does not take it.
        probe_seen: number of the last probe frame of this epoch that came by; 0 for none.
        running: on a head, streams that have a slot.
        slots, context: on a head, what the requests that wait for their answers need of a ring: slots at
            once, positions a stream.
    """

    epoch: Epoch | None = None
    progress: int = 0
    frames_in: int = 0
    frames_out: int = 0
    waiting_send: bool = False
    probe_seen: int = 0
    running: int = 0
    slots: int = 0
    context: int = 0


@dataclass(frozen=True, slots=True)
class HopBroken:
    """The data thread can not go on with its successor or predecessor in this epoch; why, in words."""

    epoch: Epoch
    sentence: str


@dataclass(frozen=True, slots=True)
class DataThreadDied:
    """The data thread has ended on its own; why, in words."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Drain:
    """This node is asked to end once it can be spared; why, in words. Answered by Drained."""

    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """This node is asked to end; why, in words."""

    reason: str


Event: TypeAlias = (
    Tick
    | Heard
    | Undecodable
    | ConnectionLost
    | ConnectionRefused
    | LoadProgress
    | ShardLoaded
    | LoadFailed
    | Switched
    | SwitchFailed
    | ProbeReturned
    | Counters
    | HopBroken
    | DataThreadDied
    | Drain
    | Leave
)
