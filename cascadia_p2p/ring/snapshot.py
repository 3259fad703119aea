"""The status of a node as plain JSON values."""

from __future__ import annotations

from pydantic import JsonValue

from cascadia_p2p.ring.claims import Holder, ranked
from cascadia_p2p.ring.core import Core
from cascadia_p2p.ring.formation import plan
from cascadia_p2p.ring.head import Head
from cascadia_p2p.ring.membership import Peer
from cascadia_p2p.types import Epoch, NodeId
from cascadia_p2p.wire.messages import Beat, Claim, ClaimState, Introduction, Member

Value = JsonValue


def take(core: Core, head: Head, counts: dict[str, int]) -> dict[str, Value]:
    """Everything that `status` shows, of the node itself and of every peer that it knows.

    Keys: state (looking, loading, standby, forming, probing, open: this node's own), epoch, head, is_head,
    fleet, model, fingerprint, software, shards, stages (members in ring order, with the counters of their
    beats where this node hears them), claims (each shard's nodes, the first claim first), nodes (this one
    first), missing (shards without a live loaded node), waiting_for (why, in words), suspect, paused (why
    nothing new is started), admitting, highest_epoch, dropped (counts by reason).
    """
    seat = core.seat
    elsewhere = _epoch_elsewhere(core)
    lacking = missing(core)
    return {
        "state": state_of(core, head),
        "node": core.node,
        "instance": core.instance,
        "fleet": core.profile.fleet,
        "model": core.profile.model,
        "fingerprint": core.profile.fingerprint,
        "software": core.profile.software,
        "shards": core.profile.shards,
        "epoch": _epoch(seat.epoch if seat else elsewhere),
        "highest_epoch": core.counter,
        "head": seat.head.node if seat else _head_of(core, elsewhere),
        "is_head": core.heads,
        "admitting": core.serving and core.heads and head.paused is None,
        "paused": head.paused,
        "promise": _promise(core),
        "stages": [_stage(core, head, index) for index in range(len(seat.members))] if seat else [],
        "claims": _claims(core),
        "nodes": [
            _own(core),
            *(_peer(core, peer) for peer in sorted(core.peers, key=lambda each: each.node)),
        ],
        "missing": list(lacking),
        "waiting_for": plan(core).words if lacking else "",
        "suspect": [peer.node for peer in core.peers if core.peers.is_suspect(peer, core.now)],
        "dropped": dict(counts),
    }


def missing(core: Core) -> tuple[int, ...]:
    """Shards without a live loaded node; none while this node is in a ring, or knows of one."""
    return () if core.seat is not None or _epoch_elsewhere(core) is not None else plan(core).missing


def state_of(core: Core, head: Head) -> str:
    """The node's own state, in a word."""
    if core.seat is None:
        if core.state is ClaimState.LOADING:
            return "loading"
        return "standby" if core.standby and _epoch_elsewhere(core) is not None else "looking"
    if core.seat.open:
        return "open"
    probing = core.seat.switched if head.attempt is None else head.attempt.probing_since is not None
    return "probing" if probing else "forming"


def _epoch_elsewhere(core: Core) -> Epoch | None:
    """The newest open epoch of others, for a node that is not in one."""
    epochs = [
        peer.ring for peer in core.peers if peer.ring is not None and peer.claim.state is ClaimState.SERVING
    ]
    return max(epochs, default=None)


def _head_of(core: Core, epoch: Epoch | None) -> NodeId | None:
    found = [peer.node for peer in core.peers if epoch is not None and peer.instance == epoch.head]
    return found[0] if found else None


def _epoch(epoch: Epoch | None) -> Value:
    return None if epoch is None else {"counter": epoch.counter, "head": epoch.head}


def _promise(core: Core) -> Value:
    promise = core.seat.promise if core.seat is not None else core.profile.promise
    return {
        "slots": promise.slots,
        "context": promise.context,
        "rows": promise.rows,
        "kept": promise.kept,
    }


def _claims(core: Core) -> list[Value]:
    claimed: dict[int, list[Holder]] = {}
    for holder in core.holders():
        if holder.shard is not None:
            claimed.setdefault(holder.shard, []).append(holder)
    table: list[Value] = []
    for shard, group in sorted(claimed.items()):
        order = ranked(group, core.times.claim_tolerance)
        first, others = order[0], [each.node for each in order[1:]]
        table.append({"shard": shard, "node": first.node, "claim": first.state.value, "standbys": [*others]})
    return table


def _stage(core: Core, head: Head, index: int) -> Value:
    seat = core.seat
    if seat is None:
        return None
    member: Member = seat.members[index]
    beat: Beat | None = core.beat() if member.node == core.node else None
    if beat is None and head.attempt is not None:
        beat = head.attempt.watch.beat(index)
    own = member.node == core.node
    peer = core.peers.get(member.node, member.instance)
    intro = core.introduction() if own else peer.intro if peer is not None else None
    return {
        "stage": index,
        "node": member.node,
        "instance": member.instance,
        "name": core.name(member.node),
        "host": intro.host if intro else None,
        "software": intro.software if intro else None,
        "control": str(intro.control) if intro else None,
        "shard": member.shard,
        "data": str(member.data),
        "ready": own or head.attempt is None or member.node in head.attempt.ready,
        "progress": beat.progress if beat else None,
        "frames_in": beat.frames_in if beat else None,
        "frames_out": beat.frames_out if beat else None,
        "waiting_send": beat.waiting_send if beat else None,
    }


def _own(core: Core) -> Value:
    own = _node(core.introduction(), core.claim(), core.holds)
    own |= {
        "progress": core.progress,
        "stalled": core.load_stalled,
        "standby": core.standby,
        "layer_s": core.layer_s,
        "heard_s": 0.0,
        "suspect": False,
    }
    return own


def _peer(core: Core, peer: Peer) -> Value:
    entry = _node(
        peer.intro, peer.claim.model_copy(update={"age_s": max(0.0, core.now - peer.since)}), peer.holds
    )
    entry |= {
        "client": str(peer.client) if peer.client else None,
        "progress": peer.progress,
        "stalled": core.peers.load_stalled(peer, core.now),
        "standby": peer.standby,
        "layer_s": peer.layer_s,
        "heard_s": round(core.now - peer.heard, 3),
        "suspect": core.peers.is_suspect(peer, core.now),
    }
    return entry


def _node(intro: Introduction, claim: Claim, holds: tuple[int, ...]) -> dict[str, Value]:
    return {
        "node": intro.node,
        "instance": intro.instance,
        "host": intro.host,
        "pid": intro.pid,
        "software": intro.software,
        "device": intro.device,
        "precision": intro.precision,
        "cache": intro.cache,
        "control": str(intro.control),
        "data": str(intro.data),
        "client": str(intro.client) if intro.client else None,
        "shard": claim.shard,
        "claim": claim.state.value,
        "claim_age_s": round(claim.age_s, 3),
        "holds": list(holds),
        "promise": {
            "slots": intro.promise.slots,
            "context": intro.promise.context,
            "rows": intro.promise.rows,
            "kept": intro.promise.kept,
        },
    }
