"""Who holds which shard: the order of claims, and the assignment of shards to nodes that hold none.

Order: serving before loaded before loading before wanted, then the earlier, then the lower node id. Ages are
compared with a tolerance, since each node dates the others' claims by when it heard of them; nodes may
therefore disagree on two claims of nearly the same age, and nothing but time is lost when they do.

Assignment is a maximum matching that changes as little as possible: the first claims stay, then a shard
without a node is given to a node without a shard, and only when that fails are nodes moved, over the
shortest chain of moves that ends at a node nobody needs where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cascadia_p2p.types import NodeId
from cascadia_p2p.wire.messages import ClaimState


@dataclass(frozen=True, slots=True)
class Holder:
    """One node as the order of claims sees it.

    Args:
        node: its id.
        shard: the shard that it claims; None when it waits for one.
        state: how far it is with that shard.
        since: when it came to that state, in seconds on the clock of whoever compares.
        holds: shards that it could load.
        fixed: it stays with its shard: a person asked for it, or a ring has it.
    """

    node: NodeId
    shard: int | None
    state: ClaimState
    since: float
    holds: frozenset[int]
    fixed: bool = False


def ranked(holders: Iterable[Holder], tolerance: float) -> list[Holder]:
    """Claims on one shard, best first.

    Args:
        holders: nodes that claim the same shard.
        tolerance: ages that differ by no more are equal, seconds.
    """
    rest = sorted(holders, key=lambda each: (-each.state.rank, each.since, each.node))
    order: list[Holder] = []
    while rest:
        first = rest[0]
        peers = [x for x in rest if x.state is first.state and x.since <= first.since + tolerance]
        best = min(peers, key=lambda each: each.node)
        order.append(best)
        rest.remove(best)
    return order


def winners(holders: Iterable[Holder], tolerance: float) -> dict[int, Holder]:
    """The best claim on each shard that anybody claims."""
    claimed: dict[int, list[Holder]] = {}
    for holder in holders:
        if holder.shard is not None:
            claimed.setdefault(holder.shard, []).append(holder)
    return {shard: ranked(group, tolerance)[0] for shard, group in sorted(claimed.items())}


def assign(
    holders: Sequence[Holder], shards: int, tolerance: float, movable: frozenset[int] = frozenset()
) -> dict[NodeId, int]:
    """The shards that nodes should take up, for those only that should change.

    Args:
        holders: every live node, each once.
        shards: shards of the model.
        tolerance: see `ranked`.
        movable: uncovered shards for whose sake a node that has a shard already may be moved.

    Returns:
        node -> shard. Nodes without a shard whom no uncovered shard needs get the scarcest one that they
        hold.
    """
    nodes = {holder.node: holder for holder in sorted(holders, key=lambda each: each.node)}
    matched = {shard: best.node for shard, best in winners(holders, tolerance).items()}
    changes: dict[NodeId, int] = {}
    for shard in range(shards):
        if shard in matched:
            continue
        for moved_to, node in _chain(shard, nodes, matched, changes, move=shard in movable):
            left = nodes[node].shard
            if left is not None and matched.get(left) == node:
                matched[left] = _other(left, node, nodes, changes) or node
            matched[moved_to] = node
            changes[node] = moved_to
    for node, holder in nodes.items():
        if holder.shard is None and node not in changes and holder.holds:
            changes[node] = _scarcest(holder, nodes, changes)
    return {node: shard for node, shard in changes.items() if nodes[node].shard != shard}


def _chain(
    shard: int,
    nodes: Mapping[NodeId, Holder],
    matched: Mapping[int, NodeId],
    changes: Mapping[NodeId, int],
    *,
    move: bool,
) -> list[tuple[int, NodeId]]:
    """The shortest chain of (shard, node that takes it) that covers `shard` and uncovers none; else []."""
    place = {node: index for index, node in matched.items()}
    order = sorted(
        nodes.values(),
        key=lambda each: (each.shard is not None, each.node in place, each.state.rank, each.node),
    )
    came: dict[NodeId, tuple[int, NodeId | None]] = {}
    queue: deque[tuple[int, NodeId | None]] = deque([(shard, None)])
    while queue:
        wanted, giver = queue.popleft()
        for holder in order:
            node = holder.node
            if node in came or wanted not in holder.holds or holder.fixed:
                continue
            if holder.shard is not None and not move:
                continue
            came[node] = (wanted, giver)
            if node not in place or _other(place[node], node, nodes, changes) is not None:
                return _trace(node, came)
            queue.append((place[node], node))
    return []


def _other(
    shard: int, leaver: NodeId, nodes: Mapping[NodeId, Holder], changes: Mapping[NodeId, int]
) -> NodeId | None:
    """Another node that claims the shard and stays with it."""
    found = (n for n, holder in nodes.items() if n != leaver and n not in changes and holder.shard == shard)
    return next(found, None)


def _trace(node: NodeId, came: Mapping[NodeId, tuple[int, NodeId | None]]) -> list[tuple[int, NodeId]]:
    chain: list[tuple[int, NodeId]] = []
    step: NodeId | None = node
    while step is not None:
        wanted, giver = came[step]
        chain.append((wanted, step))
        step = giver
    return chain


def _scarcest(holder: Holder, nodes: Mapping[NodeId, Holder], changes: Mapping[NodeId, int]) -> int:
    """The shard that the fewest nodes claim, then the fewest could load, then the lowest."""
    claims = [changes.get(node, other.shard) for node, other in nodes.items()]
    could = {shard: sum(shard in other.holds for other in nodes.values()) for shard in holder.holds}
    return min(holder.holds, key=lambda shard: (claims.count(shard), could[shard], shard))
