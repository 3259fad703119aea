"""Who is there: the table of peers, keyed by node id and instance, and when each was last heard.

- A newer instance of a node replaces the older one at once, when the older one's connection is closed or it
  has fallen silent (it beats every 0.1 s, or tells its state every second). While the older one still
  speaks, the newer one is refused: it is a copied state directory, and a newcomer never evicts a living
  node. A restarted node is dialled again after half a second, so a restart that nobody saw end costs that
  much at most.
- A replaced instance is buried: nothing it says later counts. One that said goodbye is not listened to for a
  while, so that what was still under way does not bring it back.
- Silence makes a peer suspect, then gone. So does a closed connection, and then a port that refuses: the
  process has ended. Nothing else does: no single lost message, no word of a third node.
- A node that was itself stalled (a gap between its ticks) judges nobody for one silence period: what it did
  not hear may lie in its own buffers. To stay useful on a machine that always stalls, it grants this three
  times a minute.
- The table, the buried and the addresses to dial again are bounded.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from cascadia_p2p.ring.greeting import label
from cascadia_p2p.ring.profile import Times
from cascadia_p2p.ring.stagetime import Pace
from cascadia_p2p.types import Endpoint, Epoch, Instance, NodeId
from cascadia_p2p.wire.messages import Beat, Claim, ClaimState, Introduction, State

MAX_PEERS: Final = 1023
MAX_BURIED: Final = 4096
MAX_ADDRESSES: Final = 256
_GRANTS: Final = 3
_GRANTS_S: Final = 60.0


class Admission(Enum):
    """What became of an introduction."""

    NEW = auto()
    KNOWN = auto()
    REPLACED = auto()
    CONTESTED = auto()
    BURIED = auto()
    FULL = auto()


@dataclass(slots=True)
class Peer:
    """Another node, as it described itself last.

    Args:
        intro: what it said when it was met.
        claim: its shard; `since` is when it came to that state, on this node's clock.
        ring: the epoch that it is a member of.
        heard: when anything came from it.
        moved_at: when it said last that loading has got on.
        beat_at: when its last beat came; None when it does not beat to this node.
        lost_at: when its connection closed, until it is heard again.
    """

    intro: Introduction
    claim: Claim
    since: float
    holds: tuple[int, ...]
    client: Endpoint | None
    counter: int
    ring: Epoch | None
    heard: float
    progress: float = 0.0
    moved_at: float = 0.0
    standby: bool = False
    layer_s: float = 0.0
    pace: Pace = ()
    leaving: bool = False
    beat: Beat | None = None
    beat_at: float | None = None
    lost_at: float | None = None

    @property
    def node(self) -> NodeId:
        """The node id."""
        return self.intro.node

    @property
    def instance(self) -> Instance:
        """The run of the process."""
        return self.intro.instance

    @property
    def label(self) -> str:
        """Its name for people."""
        return label(self.intro)

    def update(self, state: State, now: float) -> bool:
        """Take over a State; whether anything that decisions depend on changed."""
        before = (
            self.claim.shard,
            self.claim.state,
            self.holds,
            self.client,
            self.ring,
            self.counter,
            self.standby,
            self.leaving,
        )
        if (state.claim.shard, state.claim.state, state.progress) != (
            self.claim.shard,
            self.claim.state,
            self.progress,
        ):
            self.moved_at = now
        self.claim, self.since = state.claim, now - state.claim.age_s
        self.holds, self.client, self.ring = state.holds, state.client, state.ring
        self.counter = max(self.counter, state.epoch)
        self.progress, self.standby, self.layer_s = state.progress, state.standby, state.layer_s
        self.pace, self.leaving = state.pace, state.leaving
        return before != (
            self.claim.shard, self.claim.state, self.holds, self.client, self.ring, self.counter,
            self.standby, self.leaving,
        )  # fmt: skip


class Membership:
    """The table of peers."""

    def __init__(self, times: Times, now: float) -> None:
        self._times = times
        self._peers: dict[NodeId, Peer] = {}
        self._buried: OrderedDict[Instance, float] = OrderedDict()
        self._grants: deque[float] = deque(maxlen=_GRANTS)
        self.grace_from = now
        """Nobody was silent before this instant."""
        self.newcomer_at = now
        """When the last new node or instance appeared."""

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, node: NodeId, instance: Instance | None = None) -> Peer | None:
        """The peer of that id, and of that instance when one is given."""
        peer = self._peers.get(node)
        return peer if peer is not None and instance in (None, peer.instance) else None

    def is_buried(self, instance: Instance, now: float) -> bool:
        """Whether that instance was replaced or has just left."""
        return now < self._buried.get(instance, -math.inf)

    def admit(self, intro: Introduction, now: float) -> Admission:
        """Take in a node that suits; what came of it."""
        if self.is_buried(intro.instance, now):
            return Admission.BURIED
        known = self._peers.get(intro.node)
        if known is None:
            if len(self._peers) >= MAX_PEERS:
                return Admission.FULL
            outcome = Admission.NEW
        elif known.instance == intro.instance:
            outcome = Admission.KNOWN
        elif self._speaks(known, now):
            return Admission.CONTESTED
        else:
            self.bury(known.instance)
            outcome = Admission.REPLACED
        if outcome is Admission.KNOWN and known is not None:
            known.intro, known.claim, known.since = intro, intro.claim, now - intro.claim.age_s
            known.holds, known.client, known.ring = intro.holds, intro.client, intro.ring
            known.counter = max(known.counter, intro.epoch)
            self.hear(known, now)
            return outcome
        self.newcomer_at = now
        self._peers[intro.node] = Peer(
            intro,
            intro.claim,
            now - intro.claim.age_s,
            intro.holds,
            intro.client,
            intro.epoch,
            intro.ring,
            now,
            moved_at=now,
        )
        return outcome

    def hear(self, peer: Peer, now: float) -> None:
        """Anything came from the peer."""
        peer.heard = now
        peer.lost_at = None

    def bury(self, instance: Instance, until: float = math.inf) -> None:
        """Do not listen to that instance, for ever or until then."""
        self._buried[instance] = until
        if len(self._buried) > MAX_BURIED:
            self._buried.popitem(last=False)

    def remove(self, peer: Peer) -> None:
        """Forget the peer; it may introduce itself again."""
        if self._peers.get(peer.node) is peer:
            del self._peers[peer.node]

    def silence(self, heard: float, now: float) -> float:
        """Seconds since `heard` in which this node could have listened."""
        return max(0.0, now - max(heard, self.grace_from))

    def stalled(self, now: float) -> bool:
        """This node was stalled until now; whether it grants a silence period."""
        if len(self._grants) == _GRANTS and now - self._grants[0] < _GRANTS_S:
            return False
        self._grants.append(now)
        self.grace_from = now
        return True

    def deaf(self, now: float) -> None:
        """Nobody could be heard until now, and whoever was silent is not to blame."""
        self.grace_from = now

    def is_suspect(self, peer: Peer, now: float) -> bool:
        """Whether nothing new should be built on the peer."""
        return peer.lost_at is not None or self.silence(peer.heard, now) >= self._times.far_suspect

    def load_stalled(self, peer: Peer, now: float) -> bool:
        """Whether the peer loads a shard and has not got on with it for `Times.load_silent`."""
        loading = peer.claim.state is ClaimState.LOADING
        return loading and self.silence(peer.moved_at, now) >= self._times.load_silent

    def gone(self, now: float) -> list[tuple[Peer, str]]:
        """Peers that are gone by the slow rule, each with the reason in words."""
        found: list[tuple[Peer, str]] = []
        for peer in self._peers.values():
            silent = self.silence(peer.heard, now)
            if silent >= self._times.far_gone:
                found.append((peer, f"{peer.label} has been silent for {silent:.1f} s"))
        return found

    def _speaks(self, peer: Peer, now: float) -> bool:
        if peer.lost_at is not None:
            return False
        limit = self._times.contest if peer.beat_at is not None else self._times.far_contest
        return now - peer.heard < limit


@dataclass(slots=True)
class _Redial:
    due: float
    delay: float


class AddressBook:
    """Addresses worth dialling that no peer answers at now, each with a growing delay."""

    def __init__(self, own: Endpoint, times: Times) -> None:
        self._own = own
        self._times = times
        self._entries: OrderedDict[Endpoint, _Redial] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, endpoint: Endpoint, now: float) -> None:
        """Dial this address soon, and again until it is met."""
        if endpoint == self._own or endpoint in self._entries:
            return
        self._entries[endpoint] = _Redial(now, self._times.redial)
        if len(self._entries) > MAX_ADDRESSES:
            self._entries.popitem(last=False)

    def met(self, endpoint: Endpoint) -> None:
        """Somebody answered there."""
        self._entries.pop(endpoint, None)

    def due(self, now: float) -> list[Endpoint]:
        """Addresses to dial now."""
        found = [endpoint for endpoint, entry in self._entries.items() if entry.due <= now]
        for endpoint in found:
            entry = self._entries[endpoint]
            entry.due = now + entry.delay
            entry.delay = min(entry.delay * 2, self._times.redial_limit)
        return found
