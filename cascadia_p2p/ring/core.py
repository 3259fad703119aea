"""What the roles of one node share: its own claim, its seat in an epoch, the peers, and the outbox.

A **seat** is a node's place in one epoch; a node has one or none. It is taken by accepting FORM, or by
sending it, and given up whole. Nothing of one seat is carried into the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cascadia_p2p.ring.actions import (
    Action,
    Broadcast,
    CloseRing,
    DropPeer,
    Level,
    LoadShard,
    Say,
    Send,
    SwitchEpoch,
)
from cascadia_p2p.ring.claims import Holder, winners
from cascadia_p2p.ring.events import Counters
from cascadia_p2p.ring.membership import AddressBook, Membership, Peer
from cascadia_p2p.ring.profile import NodeProfile, Times
from cascadia_p2p.ring.stagetime import Pace
from cascadia_p2p.types import Epoch, Instance, NodeId, Promise
from cascadia_p2p.wire.messages import (
    Beat,
    Claim,
    ClaimState,
    ControlMessage,
    Greeting,
    Introduction,
    Member,
    State,
    Welcome,
)

MAX_JUMP: Final = 1 << 32
"""An epoch counter further ahead than this is not believed, so that nobody can use the numbers up."""

_MAX_USED: Final = 512


@dataclass(slots=True)
class Seat:
    """A place in one epoch.

    Args:
        epoch: which.
        members: in ring order, the head first.
        stage: this node's place.
        promise: what all members can hold.
        since: when the seat was taken.
        switched: the data thread is in the epoch.
        open: the head said that the ring serves.
    """

    epoch: Epoch
    members: tuple[Member, ...]
    stage: int
    promise: Promise
    since: float
    switched: bool = False
    open: bool = False

    @property
    def head(self) -> Member:
        """Who formed the epoch."""
        return self.members[0]

    @property
    def successor(self) -> Member:
        """Whom this stage pushes frames to."""
        return self.members[(self.stage + 1) % len(self.members)]

    @property
    def others(self) -> tuple[Member, ...]:
        """Every member but this node."""
        return self.members[: self.stage] + self.members[self.stage + 1 :]


class Core:
    """The shared state of one node; it decides nothing by itself."""

    def __init__(self, profile: NodeProfile, times: Times, now: float) -> None:
        self.profile = profile
        self.times = times
        self.now = now
        self.started = now
        self.peers = Membership(times, now)
        self.addresses = AddressBook(profile.control, times)
        self.holds: tuple[int, ...] = (
            (profile.asked,) if profile.asked is not None else tuple(sorted(set(profile.holds)))
        )
        """Shards that this node would load; the one asked for hides the others."""
        self.shard: int | None = None
        self.state = ClaimState.WANTED
        self.since = now
        self.progress = 0.0
        self.moved_at = now
        """When the loader was heard of last."""
        self.layer_s = 0.0
        self.pace: Pace = ()
        self.seat: Seat | None = None
        self.counter = 0
        self.counters = Counters()
        self.serves_clients = False
        self.standby = False
        self.leaving: str | None = None
        """Why this node ends as soon as it can be spared."""
        self.dirty = True
        """Something changed that an assignment, a formation or a role may depend on."""
        self._out: list[Action] = []
        self._used: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._told: tuple[object, ...] | None = None
        """The part of the last State whose change is told at once."""
        self._told_at = now - times.state

    # ------------------------------------------------------------------ the outbox

    def act(self, action: Action) -> None:
        """Ask the owner for something."""
        self._out.append(action)

    def take(self) -> list[Action]:
        """Everything asked for since the last call, in order."""
        out, self._out = self._out, []
        return out

    def send(self, node: NodeId, message: ControlMessage) -> None:
        """To a peer."""
        self.act(Send(node, message))

    def say(self, level: Level, event: str, sentence: str, **fields: str | int | float) -> None:
        """To the log and the console."""
        self.act(Say(level, event, sentence, fields))

    def say_seldom(
        self, key: str, level: Level, event: str, sentence: str, **fields: str | int | float
    ) -> None:
        """The same, but a sentence that was said under this key only again after `Times.remind` seconds."""
        if self.seldom(key, self.times.remind, sentence):
            self.act(Say(level, event, sentence, fields))

    def seldom(self, key: str, seconds: float, value: str = "") -> bool:
        """Whether this key was not used with this value for so long; uses it."""
        last = self._used.get(key)
        if last is not None and last[1] == value and self.now - last[0] < seconds:
            return False
        self._used[key] = (self.now, value)
        self._used.move_to_end(key)
        if len(self._used) > _MAX_USED:
            self._used.popitem(last=False)
        return True

    # ------------------------------------------------------------------ this node

    @property
    def node(self) -> NodeId:
        """This node's id."""
        return self.profile.node

    @property
    def instance(self) -> Instance:
        """This process."""
        return self.profile.instance

    @property
    def label(self) -> str:
        """This node's name for people."""
        return f"{self.profile.host or 'a node'}/{self.node[:8]}"

    @property
    def serving(self) -> bool:
        """Whether this node is a member of an open ring."""
        return self.seat is not None and self.seat.open

    @property
    def heads(self) -> bool:
        """Whether this node's seat is that of a head."""
        return self.seat is not None and self.seat.stage == 0

    @property
    def claim_state(self) -> ClaimState:
        """What this node claims to be with its shard."""
        return ClaimState.SERVING if self.serving else self.state

    @property
    def fixed(self) -> bool:
        """Whether nobody may move this node to another shard."""
        return self.profile.asked is not None or self.seat is not None or self.leaving is not None

    @property
    def load_stalled(self) -> bool:
        """Whether this node loads a shard and has not got on with it for `Times.load_silent`."""
        stood = self.peers.silence(self.moved_at, self.now)
        return self.state is ClaimState.LOADING and stood >= self.times.load_silent

    def claim(self) -> Claim:
        """The claim as it is told to others."""
        return Claim(shard=self.shard, state=self.claim_state, age_s=max(0.0, self.now - self.since))

    def take_shard(self, shard: int) -> None:
        """Load a shard in place of any other."""
        self.shard, self.state, self.since, self.progress = shard, ClaimState.LOADING, self.now, 0.0
        self.moved_at = self.now
        self.standby = False
        self.dirty = True
        self.act(LoadShard(shard))

    def set_state(self, state: ClaimState) -> None:
        """The claim came further, or fell back."""
        self.state, self.since = state, self.now
        self.dirty = True

    # ------------------------------------------------------------------ what this node tells

    def greeting(self) -> Greeting:
        """What to say first on a link that this node dialled."""
        return Greeting.model_validate(self._introduction())

    def welcome(self) -> Welcome:
        """What to answer to a greeting that suits."""
        return Welcome.model_validate(self._introduction())

    def introduction(self) -> Introduction:
        """This node as others see it."""
        return Introduction.model_validate(self._introduction())

    def _introduction(self) -> dict[str, object]:
        own = self.profile
        return {
            "node": own.node, "instance": own.instance, "software": own.software, "fleet": own.fleet,
            "host": own.host, "fingerprint": own.fingerprint, "sources": own.sources, "model": own.model,
            "shards": own.shards,
            "layers": own.layers, "hidden": own.hidden, "holds": self.holds, "claim": self.claim(),
            "promise": own.promise, "control": own.control, "data": own.data, "client": self._client(),
            "epoch": self.counter, "ring": self.seat.epoch if self.seat else None,
            "device": own.device, "precision": own.precision, "cache": own.cache, "pid": own.pid,
            "peers": tuple(peer.intro.control for peer in self.peers)[:256],
        }  # fmt: skip

    def _client(self) -> object:
        return self.profile.client if self.serves_clients else None

    def tell_state(self) -> None:
        """Send State to every peer when it changed, or when the last is `Times.state` old."""
        seat = self.seat
        telling = (
            self.shard, self.claim_state, self.holds, self.serves_clients, self.counter,
            seat.epoch if seat else None, self.standby, self.layer_s, self.leaving is not None, self.pace,
        )  # fmt: skip
        if telling == self._told and self.now - self._told_at < self.times.state:
            return
        self._told, self._told_at = telling, self.now
        nodes = tuple(peer.node for peer in self.peers)
        if not nodes:
            return
        state = State.model_validate(
            {
                "node": self.node, "instance": self.instance, "claim": self.claim(), "holds": self.holds,
                "client": self._client(), "epoch": self.counter, "ring": seat.epoch if seat else None,
                "progress": self.progress, "standby": self.standby, "layer_s": self.layer_s,
                "leaving": self.leaving is not None,
                "pace": self.pace,
            }
        )  # fmt: skip
        self.act(Broadcast(nodes, state))

    def beat(self) -> Beat:
        """The heartbeat for the present seat."""
        seat, counted = self.seat, self.counters
        inside = seat is not None and counted.epoch == seat.epoch
        return Beat(
            node=self.node,
            instance=self.instance,
            epoch=seat.epoch.counter if seat else 0,
            progress=counted.progress,
            frames_in=counted.frames_in if inside else 0,
            frames_out=counted.frames_out if inside else 0,
            waiting_send=inside and counted.waiting_send,
            probe_seen=counted.probe_seen if inside else 0,
        )

    # ------------------------------------------------------------------ all nodes

    def holders(self) -> list[Holder]:
        """This node and every peer, as the order of claims sees them."""
        return [self.own_holder(), *(self.holder(peer) for peer in self.peers)]

    def movers(self) -> list[Holder]:
        """The holders on whom shards may count: all but those whose loading has stalled."""
        others = [self.holder(peer) for peer in self.peers if not self.peers.load_stalled(peer, self.now)]
        return others if self.load_stalled else [self.own_holder(), *others]

    def own_holder(self) -> Holder:
        """This node as the order of claims sees it."""
        return Holder(self.node, self.shard, self.claim_state, self.since, frozenset(self.holds), self.fixed)

    def holder(self, peer: Peer) -> Holder:
        """A peer as the order of claims sees it."""
        fixed = peer.ring is not None or len(peer.holds) == 1
        return Holder(peer.node, peer.claim.shard, peer.claim.state, peer.since, frozenset(peer.holds), fixed)

    def winners(self) -> Mapping[int, Holder]:
        """The best claim on each shard."""
        return winners(self.holders(), self.times.claim_tolerance)

    def name(self, node: NodeId) -> str:
        """A node's name for people."""
        if node == self.node:
            return self.label
        peer = self.peers.get(node)
        return peer.label if peer is not None else f"node {node[:8]}"

    def drop(self, peer: Peer, *, redial: bool) -> None:
        """Forget a peer, and look for it again at its address."""
        self.peers.remove(peer)
        self.act(DropPeer(peer.node, peer.instance))
        self.dirty = True
        if redial:
            self.addresses.add(peer.intro.control, self.now)

    # ------------------------------------------------------------------ the seat

    def sit(self, epoch: Epoch, members: tuple[Member, ...], promise: Promise) -> Seat:
        """Take a seat and send the data thread there."""
        stage = next(index for index, member in enumerate(members) if member.node == self.node)
        seat = self.seat = Seat(epoch, members, stage, promise, self.now)
        self.counter = max(self.counter, epoch.counter)
        self.standby = False
        self.dirty = True
        self.act(SwitchEpoch(epoch, members, stage, promise, seat.successor))
        return seat

    def stand_up(self, reason: str, missing: tuple[int, ...] = (), held: int = 0) -> None:
        """Give the seat up; the shard stays loaded. See `CloseRing`."""
        if self.seat is None:
            return
        seat, self.seat = self.seat, None
        self.dirty = True
        self.act(CloseRing(seat.epoch, reason, missing, seat.open, held))
