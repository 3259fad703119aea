"""What a head needs to form a ring: choice of members, words for what is missing, one attempt's record."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from cascadia_p2p.ring.claims import ranked
from cascadia_p2p.ring.core import MAX_JUMP, Core
from cascadia_p2p.ring.membership import Peer
from cascadia_p2p.ring.watch import HopWatch
from cascadia_p2p.types import Epoch, NodeId, Promise
from cascadia_p2p.wire.messages import ClaimState, Member


@dataclass(frozen=True, slots=True)
class Plan:
    """Who would be in a ring formed now.

    Args:
        members: in ring order; None when shards are missing.
        promise: what all members can hold.
        missing: shards without a live node that has loaded them and is free.
        words: why, for people; "" when nothing is missing.
    """

    members: tuple[Member, ...] | None
    promise: Promise
    missing: tuple[int, ...]
    words: str


@dataclass(slots=True)
class Attempt:
    """One epoch from FORM to its end, as its head sees it.

    Args:
        form_at: when FORM was sent last.
        beat_at: when each other member's last beat in this epoch came, FORM counting as one.
        ready: members that answered READY.
        strange_since: members that say they are in another epoch, and since when.
        first_probe: number of this attempt's first probe frame.
        probing_since: when the first was sent; None before all were READY.
        probe_at: when the last was sent.
        opened_at: when the probe was back.
        open_at: when OPEN was sent last.
    """

    form_at: float
    beat_at: dict[NodeId, float]
    watch: HopWatch
    first_probe: int
    ready: set[NodeId] = field(default_factory=set)
    strange_since: dict[NodeId, float] = field(default_factory=dict)
    probing_since: float | None = None
    probe_at: float = 0.0
    opened_at: float | None = None
    open_at: float = 0.0


def next_epoch(core: Core) -> Epoch:
    """An epoch above all that anybody has reported."""
    reported = [peer.counter for peer in core.peers if peer.counter <= core.counter + MAX_JUMP]
    return Epoch(max([core.counter, *reported]) + 1, core.instance)


def plan(core: Core, avoided: Collection[NodeId] = ()) -> Plan:
    """Choose a member for each shard: live, loaded, in no other ring; by order of claims, avoided ones last.

    Args:
        core: of the node that asks. Its own claim is counted, and on shard 0 it is preferred: only the node
            whose claim there goes first acts on the plan.
        avoided: nodes that failed a formation lately.
    """
    peers: dict[NodeId, Peer] = {peer.node: peer for peer in core.peers}
    members: list[Member] = []
    promise = core.profile.promise
    missing: list[int] = []
    for shard in range(core.profile.shards):
        mine = core.shard == shard and core.state is ClaimState.LOADED
        free = [core.holder(peer) for peer in peers.values() if _is_free(core, peer, shard)]
        order = ranked(free, core.times.claim_tolerance)
        chosen = next((each for each in order if each.node not in avoided), order[0] if order else None)
        if mine and (shard == 0 or chosen is None):
            members.append(
                Member(node=core.node, instance=core.instance, shard=shard, data=core.profile.data)
            )
        elif chosen is None:
            missing.append(shard)
        else:
            peer = peers[chosen.node]
            promise = promise.least(peer.intro.promise)
            members.append(Member(node=peer.node, instance=peer.instance, shard=shard, data=peer.intro.data))
    if missing:
        return Plan(None, promise, tuple(missing), _words(core, missing))
    return Plan(tuple(members), promise, (), "")


def _is_free(core: Core, peer: Peer, shard: int) -> bool:
    loaded = peer.claim.shard == shard and peer.claim.state.rank >= ClaimState.LOADED.rank
    mine = peer.ring is None or peer.ring.head == core.instance
    there = not peer.leaving and not core.peers.is_suspect(peer, core.now)
    return loaded and mine and there and _holds_enough(core, peer)


def _holds_enough(core: Core, peer: Peer) -> bool:
    """Whether the peer can hold the streams that are under way: with less, answers would be cut short."""
    promise, needed = peer.intro.promise, core.counters
    return promise.slots >= needed.slots and promise.context >= needed.context


def _words(core: Core, missing: list[int]) -> str:
    """`shards 3 and 5 (held by nobody here), shard 7 (b/… is loading it)`."""
    reasons: dict[str, list[int]] = {}
    for shard in missing:
        reasons.setdefault(_why(core, shard), []).append(shard)
    return ", ".join(f"{shard_list(shards)} ({why})" for why, shards in reasons.items())


def shard_list(shards: Collection[int]) -> str:
    """`shard 3`, `shards 3 and 5`, `shards 0-4, 7 and 9`."""
    runs: list[list[int]] = []
    for shard in sorted(shards):
        if runs and shard == runs[-1][-1] + 1:
            runs[-1].append(shard)
        else:
            runs.append([shard])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(shard) for shard in run]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"shard {text}" if len(shards) == 1 else f"shards {text}"


def _why(core: Core, shard: int) -> str:
    claimants = [peer for peer in core.peers if peer.claim.shard == shard]
    for peer in claimants:
        if peer.claim.state.rank < ClaimState.LOADED.rank:
            continue
        if core.peers.is_suspect(peer, core.now):
            return f"{peer.label} has it and does not answer"
        if peer.ring is not None and peer.ring.head != core.instance:
            return f"{peer.label} has it and is in epoch {peer.ring}"
        if peer.leaving:
            return f"{peer.label} has it and is leaving"
        if not _holds_enough(core, peer):
            promise, needed = peer.intro.promise, core.counters
            return (
                f"{peer.label} has it and promises {promise.slots} slots of {promise.context} positions, "
                f"where {needed.slots} of {needed.context} are in use"
            )
        return f"{peer.label} has it and is not the head yet"
    if core.shard == shard:
        return f"{core.label} {_STALLED if core.load_stalled else _VERBS[core.state]}"
    if claimants:
        best = max(claimants, key=lambda peer: (peer.claim.state.rank, peer.node))
        stalled = core.peers.load_stalled(best, core.now)
        return f"{best.label} {_STALLED if stalled else _VERBS[best.claim.state]}"
    if any(shard in peer.holds for peer in core.peers) or shard in core.holds:
        return "loaded by nobody yet"
    return "held by nobody here"


_STALLED = "began to load it and does not get on"
_VERBS = {
    ClaimState.WANTED: "is about to load it",
    ClaimState.LOADING: "is loading it",
    ClaimState.LOADED: "has it",
    ClaimState.SERVING: "has it",
}
