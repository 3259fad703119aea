"""Who loads what: a node asked for a shard takes it; the live node with the lowest id gives out the rest.

- A node asked for a shard, or with only one here, loads it at once, whether or not another has it: it is
  then that shard's standby, and says so.
- All others wait until no newcomer has appeared for `Times.settle` (but no longer than
  `Times.settle_limit`); then the node with the lowest id among those that it can hear computes the
  assignment (`claims.assign`) and sends each node its shard, again every `Times.settle` until the node's
  State shows it.
- A node takes the first shard that anybody assigns to it. Once it has one, only the lowest node that it can
  hear may move it, never while it has a seat: two halves of a network that assigned alike sort themselves
  out when they meet.
- A loaded node is moved only to a shard that nobody has claimed for `Times.reassign`: the node that had it
  may be restarting. A claim whose loading has stalled does not count.
"""

from __future__ import annotations

from cascadia_p2p.ring.claims import assign
from cascadia_p2p.ring.core import Core
from cascadia_p2p.types import NodeId
from cascadia_p2p.wire.messages import Assign


class Assigner:
    """The part of every node that gives out and takes up shards."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._sent: dict[NodeId, tuple[int, float]] = {}
        self._uncovered: dict[int, float] = {}
        self._waiting_since: float | None = None

    def start(self) -> None:
        """Take up the shard that this node was asked for."""
        asked = self._core.profile.asked
        if asked is not None and self._core.shard is None and asked in self._core.holds:
            self._core.take_shard(asked)

    def on_assign(self, message: Assign) -> None:
        """Another node gives this one a shard."""
        core = self._core
        if message.shard not in core.holds or message.shard == core.shard or core.fixed:
            return
        lower = core.node < message.node or any(peer.node < message.node for peer in core.peers)
        if core.shard is not None and lower:
            return
        self._take(message.shard, core.name(message.node))

    def tick(self) -> None:
        """Give out shards when this node is the one to do so."""
        core = self._core
        holders = core.movers()
        claimed = {holder.shard for holder in holders}
        for shard in range(core.profile.shards):
            if shard in claimed:
                self._uncovered.pop(shard, None)
            else:
                self._uncovered.setdefault(shard, core.now)
        if any(peer.node < core.node for peer in core.peers) or not self._settled():
            return
        movable = frozenset(
            shard
            for shard, since in self._uncovered.items()
            if core.peers.silence(max(since, core.started), core.now) >= core.times.reassign
        )
        changes = assign(holders, core.profile.shards, core.times.claim_tolerance, movable)
        for node, shard in changes.items():
            if node == core.node:
                self._take(shard, "this node itself")
            else:
                self._send(node, shard)
        self._sent = {node: sent for node, sent in self._sent.items() if node in changes}

    def _settled(self) -> bool:
        """Whether all who are coming seem to be here."""
        core = self._core
        if all(holder.shard is not None for holder in core.holders()):
            self._waiting_since = None
            return True
        if self._waiting_since is None:
            self._waiting_since = core.now
        quiet = core.now - max(core.started, core.peers.newcomer_at) >= core.times.settle
        return quiet or core.now - self._waiting_since >= core.times.settle_limit

    def _send(self, node: NodeId, shard: int) -> None:
        core = self._core
        last = self._sent.get(node)
        if last is not None and last[0] == shard and core.now - last[1] < core.times.settle:
            return
        self._sent[node] = (shard, core.now)
        core.send(node, Assign(node=core.node, instance=core.instance, shard=shard))

    def _take(self, shard: int, by: str) -> None:
        core = self._core
        before = core.shard
        core.take_shard(shard)
        moved = "" if before is None else f" instead of shard {before}, which another node serves"
        core.say(
            "info",
            "shard_assigned",
            f"{core.label} loads shard {shard}{moved}, assigned by {by}",
            shard=shard,
        )
