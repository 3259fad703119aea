"""Nodes that start become a ring: who loads what, who waits, what is said, what status shows."""

from __future__ import annotations

import itertools

import orjson
import pytest
from ring_world import World, fleet, open_fleet, profile

from cascadia_p2p.errors import CapacityError, UsageError
from cascadia_p2p.ring import actions as a
from cascadia_p2p.ring import events as e
from cascadia_p2p.types import Promise


@pytest.mark.parametrize("seed", range(6))
def test_eleven_nodes_without_a_shard_started_in_random_order_take_each_shard_once(seed: int) -> None:
    world = World(seed)
    world.codec = seed == 0
    order = list(range(1, 12))
    world.rng.shuffle(order)
    nodes = []
    for index in order:
        own = profile(index, shards=11, holds=tuple(range(11)))
        nodes.append(world.start(own, load_s=world.rng.uniform(0.2, 3.0)))
        world.run(world.rng.uniform(0.0, 0.3))
    world.run_until(world.is_open, 20)
    assert sorted(node.core.shard for node in nodes) == list(range(11))
    last = max(node.loaded_at or 0.0 for node in nodes)
    assert world.now - last < 0.5, "the ring opens as soon as the last has loaded"
    world.run(15)
    assert world.is_open()
    assert sum(isinstance(action, a.LoadShard) for node in nodes for action in node.actions) == 11


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_pri_05_any_start_order_gives_the_same_ring(order: tuple[int, ...]) -> None:
    world = World(1)
    for index in order:
        world.start(profile(index + 1, shard=index), load_s=0.1)
        world.run(2.0)
    world.run_until(world.is_open, 5)
    assert world.ring() == ["pc1", "pc2", "pc3"]


def test_a_ring_of_one_opens_by_the_same_rules() -> None:
    world = World(1)
    (node,) = open_fleet(world, 1, 1)
    assert node.serves_clients
    switch = next(action for action in node.actions if isinstance(action, a.SwitchEpoch))
    assert switch.successor.node == node.profile.node
    world.run(60)
    assert world.is_open()
    assert node.closed == []


def test_the_ring_promises_what_all_its_members_can_hold() -> None:
    world = World(1)
    for index, promise in enumerate([Promise(8, 100, 8), Promise(4, 400, 8), Promise(9, 900, 2)]):
        world.start(profile(index + 1, shard=index, promise=promise), 0.1)
    world.run_until(world.is_open, 5)
    opened = [action for node in world.nodes for action in node.actions if isinstance(action, a.OpenRing)]
    assert {action.promise for action in opened} == {Promise(4, 100, 2)}
    assert len(opened) == 3


def test_a_directory_with_one_shard_asks_for_that_one() -> None:
    world = World(1)
    nodes = [world.start(profile(index, holds=(shard,)), 0.1) for index, shard in [(1, 2), (2, 0), (3, 1)]]
    world.run_until(world.is_open, 5)
    assert [node.core.shard for node in nodes] == [2, 0, 1]
    assert world.ring() == ["pc2", "pc3", "pc1"]


def test_nodes_with_different_directories_are_matched() -> None:
    world = World(1)
    held = {1: (0, 1, 2), 2: (0, 1), 3: (0, 2)}
    nodes = [world.start(profile(index, holds=holds), 0.1) for index, holds in held.items()]
    world.run_until(world.is_open, 10)
    assert sorted(node.core.shard for node in nodes) == [0, 1, 2]


def test_pri_14_cas_21_a_surplus_node_stands_by_and_says_so() -> None:
    world = World(1)
    nodes = open_fleet(world, 4, 3, asked=False)
    (spare,) = [node for node in nodes if node.core.seat is None]
    assert spare.core.standby
    words = spare.sentences("standby")
    assert "is its standby" in words
    assert "shard 0 is held by pc" in words
    assert spare.machine.snapshot(world.now)["state"] == "standby"
    assert not spare.serves_clients


def test_a_held_shard_makes_the_newcomer_its_standby() -> None:
    world = World(1)
    open_fleet(world, 3)
    newcomer = world.start(profile(9, shard=1), 1.0)
    world.run(3)
    assert world.ring() == ["pc1", "pc2", "pc3"]
    words = newcomer.sentences("standby")
    assert "shard 1 is held by pc2" in words
    assert "it loads it and waits" in words
    assert newcomer.core.state == "loaded"


@pytest.mark.parametrize("seed", range(8))
def test_a_lower_id_never_evicts_a_loaded_node_and_a_second_head_stands_by(seed: int) -> None:
    world = World(seed)
    for index, shard in [(5, 0), (6, 1), (7, 2)]:
        world.start(profile(index, shard=shard), 0.1)
    world.run_until(world.is_open, 5)
    world.run(2)
    for index, shard in [(1, 0), (2, 1), (3, 2)]:
        world.start(profile(index, shard=shard), 0.1)
    world.run(20)
    assert world.ring() == ["pc5", "pc6", "pc7"]
    assert [node.name for node in world.nodes if node.serves_clients] == ["pc5"]


def test_a_gap_is_named_by_everybody_on_change_and_seldom_again() -> None:
    world = World(1)
    nodes = [
        world.start(profile(1, shards=5, holds=(0,)), 0.1),
        world.start(profile(2, shards=5, holds=(3,)), 0.1),
    ]
    world.run(5)
    for node in nodes:
        assert "shards 1, 2 and 4 (held by nobody here)" in node.sentences("ring_waits")
        assert node.machine.snapshot(world.now)["missing"] == [1, 2, 4]
    slow = world.start(profile(3, shards=5, holds=(1,)), 60.0)
    world.run(5)
    assert "shard 1 (pc3/00000000 is loading it)" in nodes[0].sentences("ring_waits")
    assert "shard 1 (pc3/00000000 is loading it)" in slow.sentences("ring_waits")
    before = len(nodes[0].said)
    world.run(30)
    assert len(nodes[0].said) - before <= 4


def test_a_head_without_its_ring_serves_clients_so_that_they_can_be_told_why() -> None:
    world = World(1)
    head = world.start(profile(1, shard=0), 0.1)
    other = world.start(profile(2, shard=1), 0.1)
    world.run(4)
    assert head.serves_clients
    assert not other.serves_clients
    status = head.machine.snapshot(world.now)
    assert status["state"] == "looking"
    assert status["waiting_for"] == "shard 2 (held by nobody here)"


def test_a_shard_that_can_not_be_loaded_is_given_to_another() -> None:
    world = World(1)
    nodes = fleet(world, 3, asked=False, load_s=0.5)
    world.run_until(lambda: all(node.core.shard is not None for node in nodes), 5)
    victim = nodes[0]
    failed, victim.loading = victim.core.shard, None
    victim.feed(e.LoadFailed(failed, CapacityError("needs 60 GB, has 16 GB")))
    assert "needs 60 GB, has 16 GB" in victim.sentences("load_failed")
    world.run_until(world.is_open, 20)
    assert victim.core.shard != failed


def test_a_node_whose_only_shard_can_not_be_loaded_ends() -> None:
    world = World(1)
    (node,) = fleet(world, 1, 3)
    world.run(0.1)
    error = CapacityError("needs 60 GB, has 16 GB")
    node.feed(e.LoadFailed(0, error))
    assert node.fatal is error


def test_a_flag_that_is_wrong_for_every_shard_ends_the_node_at_once() -> None:
    world = World(1)
    (node,) = fleet(world, 1, 3, asked=False, load_s=0.5)
    world.run_until(lambda: node.core.shard is not None, 5)
    error = UsageError("--device XPU is not a device of this machine")
    node.feed(e.LoadFailed(node.core.shard, error))
    assert node.core.holds
    assert node.fatal is error


def test_two_halves_that_assigned_alike_sort_themselves_out_when_they_meet() -> None:
    world = World(3)
    nodes = [world.start(profile(index, shards=4, holds=(0, 1, 2, 3)), 0.2) for index in range(1, 5)]
    world.isolate(nodes[:2])
    world.run(6)
    assert sorted(node.core.shard for node in nodes) == [0, 0, 1, 1]
    world.heal()
    assert world.run_until(world.is_open, 15) < 10
    assert sorted(node.core.shard for node in nodes) == [0, 1, 2, 3]


def test_one_known_address_is_enough_to_meet_all() -> None:
    world = World(1)
    world.mdns = False
    nodes = fleet(world, 6, 6)
    for node in nodes[1:]:
        node.wanted[nodes[0].profile.control] = 0.0
    world.run_until(world.is_open, 10)
    assert all(len(node.core.peers) == 5 for node in nodes)


def test_beats_go_only_between_the_head_and_its_members() -> None:
    world = World(1)
    open_fleet(world, 8, 6)
    world.run(3)
    world.messages.clear()
    world.run(10)
    assert 900 <= world.messages["beat"] <= 1050, "two ways, five members, ten a second"
    assert 500 <= world.messages["state"] <= 640, "eight nodes to seven peers, once a second"
    assert set(world.messages) == {"beat", "state"}


def test_status_tells_the_ring_in_plain_json() -> None:
    world = World(1)
    nodes = open_fleet(world, 4, 3)
    status = nodes[0].machine.snapshot(world.now)
    assert orjson.loads(orjson.dumps(status)) == status
    assert (status["state"], status["is_head"], status["admitting"]) == ("open", True, True)
    assert status["missing"] == []
    stages = status["stages"]
    assert [(stage["shard"], stage["host"], stage["data"]) for stage in stages] == [
        (index, f"pc{index + 1}", f"10.0.0.{index + 1}:7601") for index in range(3)
    ]
    assert all(stage["ready"] and stage["progress"] is not None for stage in stages)
    assert [len(claim["standbys"]) for claim in status["claims"]] == [1, 0, 0]
    assert {node["software"] for node in status["nodes"]} == {"0.1.0"}
    member = nodes[1].machine.snapshot(world.now)
    assert member["head"] == status["node"]
    assert member["epoch"] == status["epoch"]
    assert nodes[3].machine.snapshot(world.now)["head"] == status["node"]


def test_a_probe_that_does_not_come_round_names_the_first_silent_hop() -> None:
    world = World(1)
    world.blocked_data.add(("pc2", "pc3"))
    nodes = fleet(world, 4, 4)
    world.run(6)
    assert nodes[0].machine.snapshot(world.now)["state"] == "probing"
    words = nodes[0].sentences("probe_lost")
    assert "it left pc2/00000000 (shard 1) and did not reach pc3/00000000 (shard 2) at 10.0.0.3:7601" in words
    assert not any(isinstance(action, a.OpenRing) for node in nodes for action in node.actions)
    world.blocked_data.clear()
    world.run_until(world.is_open, 15)


def test_a_probe_is_repeated_until_it_returns() -> None:
    world = World(1)
    world.blocked_data.add(("pc3", "pc1"))
    nodes = fleet(world, 3)
    world.run_until(lambda: nodes[0].core.seat is not None, 5)
    world.run(1.0)
    world.blocked_data.clear()
    assert world.run_until(world.is_open, 2) < 0.5
    assert nodes[0].core.counter == 1


def test_a_hop_that_stays_silent_is_avoided_when_another_node_has_the_shard() -> None:
    world = World(1)
    world.blocked_data.add(("pc1", "pc2"))
    nodes = fleet(world, 3)
    world.run(2.5)
    world.start(profile(4, shard=1), 0.1)
    world.run_until(world.is_open, 15)
    assert world.ring() == ["pc1", "pc4", "pc3"]
    assert nodes[1].core.standby


def test_a_member_that_is_not_ready_in_time_is_named_and_avoided() -> None:
    world = World(1)
    nodes = fleet(world, 4, 3)
    deaf, lazy = nodes[1], profile(8, shard=1)
    deaf.switch = lambda action: None  # type: ignore[method-assign]
    world.run(3)
    world.start(lazy, 0.1)
    world.run_until(world.is_open, 15)
    assert "no READY within 5 s from pc2/00000000 (shard 1)" in nodes[0].sentences("formation_failed")
    assert "pc8" in world.ring()


def test_ring_01_the_only_holder_is_tried_again_although_it_failed() -> None:
    world = World(1)
    nodes = fleet(world, 3)
    deaf = nodes[1]
    switch, deaf.switch = deaf.switch, lambda action: None  # type: ignore[method-assign]
    world.run(8)
    deaf.switch = switch  # type: ignore[method-assign]
    world.run_until(world.is_open, 12)


def test_a_data_thread_that_can_not_switch_says_why_on_both_consoles() -> None:
    world = World(1)
    nodes = fleet(world, 3)
    nodes[2].switch = lambda action: world.after(  # type: ignore[method-assign]
        0.01, lambda: nodes[2].feed(e.SwitchFailed(action.epoch, "port 7601 is in use"))
    )
    world.run(3)
    assert "pc3/00000000 (shard 2): port 7601 is in use" in nodes[0].sentences("formation_failed")
    assert "port 7601 is in use" in nodes[2].sentences("ring_closed")
    attempts = [say for say in nodes[0].said if say.event == "ring_forming"]
    assert 2 <= len(attempts) <= 8, "it goes on trying, ever more slowly"


def test_the_head_paces_frames_by_the_slowest_stage_and_by_all_of_them() -> None:
    world = World(1)
    nodes = [world.start(profile(index, shard=index - 1), 60.0) for index in (1, 2, 3)]
    world.run_until(lambda: all(node.loading is not None for node in nodes), 10)
    paces = (((1, 1.0), (4, 2.0)), ((1, 3.0), (4, 3.5)), ())
    for node, pace in zip(nodes, paces, strict=True):
        node.feed(e.ShardLoaded(node.loading, 0.0, pace))
    world.run_until(world.is_open, 10)
    told = [action.times for node in nodes for action in node.actions if isinstance(action, a.SetPace)]
    assert told
    assert told[-1].slowest.points == ((1, 3.0), (4, 3.5))
    # The third stage is not known: it counts as the mean of the others.
    assert told[-1].trip.points == ((1, 6.0), (4, 8.25))
    count = len(told)
    world.run(2.0)
    assert count == sum(isinstance(action, a.SetPace) for node in nodes for action in node.actions)
