"""The order of claims and the assignment of shards."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.ring.claims import Holder, assign, ranked, winners
from cascadia_p2p.types import NodeId
from cascadia_p2p.wire.messages import ClaimState

WANTED, LOADING, LOADED, SERVING = ClaimState
TOLERANCE = 1.0


def holder(
    index: int,
    shard: int | None = None,
    state: ClaimState = WANTED,
    since: float = 0.0,
    holds: tuple[int, ...] = (0, 1, 2),
    *,
    fixed: bool = False,
) -> Holder:
    return Holder(NodeId(f"{index:016x}"), shard, state, since, frozenset(holds), fixed)


def numbers(changes: dict[NodeId, int]) -> dict[int, int]:
    return {int(node, 16): shard for node, shard in changes.items()}


def order(*holders: Holder) -> list[int]:
    return [int(each.node, 16) for each in ranked(holders, TOLERANCE)]


def test_the_further_claim_wins_then_the_earlier_then_the_lower_id() -> None:
    assert order(
        holder(1, 0, WANTED), holder(2, 0, LOADING), holder(3, 0, LOADED), holder(4, 0, SERVING, 99.0)
    ) == [4, 3, 2, 1]
    assert order(holder(1, 0, LOADED, 50.0), holder(2, 0, LOADED, 10.0)) == [2, 1]
    assert order(holder(2, 0, LOADED, 10.0), holder(1, 0, LOADED, 10.9)) == [1, 2]


@given(st.permutations([holder(n, 0, LOADED, since) for n, since in enumerate([3.0, 0.0, 0.9, 1.8, 2.7])]))
def test_order_does_not_depend_on_who_is_named_first(holders: list[Holder]) -> None:
    assert order(*holders) == [1, 2, 3, 0, 4]


def test_free_nodes_take_free_shards_lowest_first() -> None:
    assert numbers(assign([holder(n) for n in (3, 1, 2)], 3, TOLERANCE)) == {1: 0, 2: 1, 3: 2}


def test_claims_stay_and_the_free_node_fills_the_gap() -> None:
    nodes = [holder(1, 0, LOADED), holder(2), holder(3, 2, LOADING)]
    assert numbers(assign(nodes, 3, TOLERANCE)) == {2: 1}


def test_free_nodes_are_matched_so_that_all_shards_are_covered() -> None:
    nodes = [holder(1, holds=(0, 1, 2)), holder(2, holds=(0,)), holder(3, holds=(0, 1))]
    assert numbers(assign(nodes, 3, TOLERANCE)) == {1: 2, 2: 0, 3: 1}


def test_surplus_nodes_stand_by_for_the_scarcest_shard_that_they_hold() -> None:
    nodes = [
        holder(1, 0, SERVING, fixed=True),
        holder(2, 1, SERVING, fixed=True),
        holder(3, 2, SERVING, fixed=True),
        holder(4, 0, LOADED),
        holder(5, holds=(0, 2)),
        holder(6),
    ]
    assert numbers(assign(nodes, 3, TOLERANCE)) == {5: 2, 6: 1}


def test_a_loaded_node_moves_only_for_a_shard_that_may_be_moved_for() -> None:
    nodes = [holder(1, 0, LOADED), holder(2, 0, LOADED, 5.0)]
    assert assign(nodes, 2, TOLERANCE) == {}
    assert numbers(assign(nodes, 2, TOLERANCE, frozenset({1}))) == {2: 1}


def test_a_needed_node_moves_when_another_can_take_its_place() -> None:
    nodes = [holder(1, 0, LOADED), holder(2, 0, LOADED, 5.0, holds=(0,)), holder(3, 1, LOADED)]
    assert numbers(assign(nodes, 3, TOLERANCE, frozenset({2}))) == {1: 2}


def test_serving_and_asked_for_nodes_never_move() -> None:
    nodes = [holder(1, 0, SERVING, fixed=True), holder(2, 0, LOADED, fixed=True)]
    assert assign(nodes, 2, TOLERANCE, frozenset({1})) == {}


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Holder], int]:
    shards = draw(st.integers(1, 4))
    nodes = []
    for index in range(draw(st.integers(1, 5))):
        holds = draw(st.sets(st.integers(0, shards - 1), min_size=1))
        shard = draw(st.none() | st.sampled_from(sorted(holds)))
        state = WANTED if shard is None else draw(st.sampled_from([WANTED, LOADING, LOADED, SERVING]))
        fixed = state is SERVING or (shard is not None and draw(st.booleans()))
        since = draw(st.floats(0, 10))
        nodes.append(holder(index, shard, state, since, tuple(holds), fixed=fixed))
    return nodes, shards


def after(nodes: list[Holder], changes: dict[NodeId, int]) -> list[Holder]:
    return [replace(each, shard=changes.get(each.node, each.shard)) for each in nodes]


def best_coverage(nodes: list[Holder], shards: int) -> int:
    """The most shards that any placement covers in which fixed nodes stay."""
    places = [[each.shard] if each.fixed else sorted(each.holds) for each in nodes]
    return max(len(set(place)) for place in itertools.product(*places))


@given(fleets(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_assignment_covers_all_that_can_be_covered_and_is_the_same_for_all(
    fleet: tuple[list[Holder], int], rng: object
) -> None:
    nodes, shards = fleet
    movable = frozenset(range(shards))
    changes = assign(nodes, shards, TOLERANCE, movable)
    shuffled = list(nodes)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign(shuffled, shards, TOLERANCE, movable) == changes
    placed = after(nodes, changes)
    for before, now in zip(nodes, placed, strict=True):
        assert now.shard in now.holds, "everybody has something to do"
        assert not before.fixed or now.shard == before.shard
    covered = {each.shard for each in placed}
    assert {each.shard for each in nodes if each.shard is not None} <= covered, "nothing is uncovered"
    assert len(covered) == best_coverage(nodes, shards)
    assert len(winners(placed, TOLERANCE)) == len(covered)
    assert assign(placed, shards, TOLERANCE, movable) == {}, "it is done in one step"


@given(fleets())
@settings(max_examples=200, deadline=None)
def test_without_leave_to_move_only_free_nodes_change(fleet: tuple[list[Holder], int]) -> None:
    nodes, shards = fleet
    changes = assign(nodes, shards, TOLERANCE)
    assert set(changes) == {each.node for each in nodes if each.shard is None}
