"""What lasts, and what differs: loads that hang, ports that stay shut, spare nodes, clocks that disagree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import ring_world
from ring_world import TIMES, SimNode, World, fleet, open_fleet, profile

from cascadia_p2p.ring import actions as a
from cascadia_p2p.ring import events as e

HANGS = 1e9
SILENT = 20.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that find soon that loading does not get on: minutes of virtual time take long."""
    monkeypatch.setattr(ring_world, "TIMES", replace(TIMES, load_silent=SILENT))


def entry(viewer: SimNode, seen: SimNode) -> dict[str, object]:
    """What `status` of one node shows of another."""
    body = viewer.machine.snapshot(viewer.clock)
    (found,) = [node for node in body["nodes"] if node["node"] == seen.profile.node]  # type: ignore[index,union-attr,call-overload]
    return found  # type: ignore[return-value]


@pytest.mark.usefixtures("impatient")
def test_rpc_07_a_load_that_hangs_is_said_everywhere_and_another_node_takes_the_shard() -> None:
    world = World(4)
    nodes = fleet(world, 2, 3)
    hung = world.start(profile(3, shard=2), HANGS)
    world.run(5)
    hung.feed(e.LoadProgress(2, 0.4))
    world.run(SILENT - 5)
    assert not hung.sentences("load_stalled"), "slow is not stalled"
    assert not entry(nodes[0], hung)["stalled"]
    world.run(6)
    assert f"shard 2 has stood at 40% for {SILENT:.0f} s" in hung.sentences("load_stalled")
    assert "start it again" in hung.sentences("load_stalled")
    world.run(TIMES.remind)
    assert hung.sentences("load_stalled").count("stood at") == 1
    for node in (*nodes, hung):
        assert "shard 2 (pc3/00000000 began to load it and does not get on)" in node.sentences("ring_waits")
        assert entry(node, hung)["stalled"]
    # Its claim holds nobody off.
    spare = world.start(profile(9, holds=(0, 1, 2)), 1.0)
    world.run_until(world.is_open, TIMES.reassign + 10)
    assert world.ring() == ["pc1", "pc2", "pc9"]
    assert spare.core.shard == 2


@pytest.mark.usefixtures("impatient")
def test_rpc_07_a_load_that_gets_on_however_slowly_is_not_stalled() -> None:
    world = World(4)
    nodes = fleet(world, 2, 3)
    slow = world.start(profile(3, shard=2), HANGS)
    for step in range(1, 4):
        world.run(SILENT - 5)
        slow.feed(e.LoadProgress(2, step / 10))
    world.run(5)
    assert not slow.sentences("load_stalled")
    assert not any(entry(node, slow)["stalled"] for node in nodes)
    slow.feed(e.ShardLoaded(2))
    world.run_until(world.is_open, 5)


def test_pet_04_a_node_that_was_out_of_reach_for_long_is_back_soon_after() -> None:
    """Nobody is banned: waits between attempts grow to seconds, not with the length of the outage."""
    world = World(3)
    nodes = open_fleet(world, 3)
    world.isolate([nodes[1]])
    world.run(30)
    assert not world.is_open()
    dials = [act for act in nodes[0].actions if isinstance(act, a.Dial)]
    assert len(dials) < 30 / TIMES.redial_limit + 20, "and nobody is dialled in a tight loop"
    world.heal()
    assert world.run_until(world.is_open, 20) < TIMES.redial_limit + 3


def test_pet_04_pet_13_a_shut_data_port_is_named_on_both_consoles_and_used_again_when_it_opens() -> None:
    world = World(3)
    for sender in ("pc1", "pc2"):
        world.blocked_data.add((sender, "pc3"))
    nodes = fleet(world, 3)
    world.run(40)
    for node, event in ((nodes[0], "formation_failed"), (nodes[2], "ring_closed")):
        assert "did not reach pc3/00000000 (shard 2) at 10.0.0.3:7601" in node.sentences(event)
        assert "is that port open in its firewall?" in node.sentences(event)
    world.blocked_data.clear()
    assert world.run_until(world.is_open, 30) < TIMES.retry_limit * 1.5 + 2


def test_pet_10_with_many_spare_nodes_one_gap_moves_one_node_once() -> None:
    world = World(6)
    nodes = open_fleet(world, 7, 4, asked=False)
    spares = [node for node in nodes if node.core.seat is None]
    assert len(spares) == 3
    victim = next(node for node in nodes if node.core.shard not in (0, *(one.core.shard for one in spares)))
    shard = victim.core.shard

    def loads() -> list[int]:
        done = [act for node in nodes for act in node.actions if isinstance(act, a.LoadShard)]
        return sorted(act.shard for act in done)

    before = loads()
    world.kill(victim)
    world.run_until(world.is_open, 20)
    world.run(10)
    assert world.is_open()
    assert loads() == sorted([*before, shard])


def test_cas_22_nodes_whose_clocks_differ_by_days_are_a_ring_like_any_other() -> None:
    world = World(8)
    world.skews = {"pc1": 86_400.0, "pc3": 1e7, "pc9": 3.0}
    nodes = fleet(world, 3)
    world.run_until(world.is_open, 5)
    spare = world.start(profile(9, shard=1), 0.1)
    world.run(4)
    assert spare.core.standby, "who came later is not first, whatever its clock says"
    ages = {viewer.name: entry(viewer, nodes[1])["claim_age_s"] for viewer in (nodes[0], spare)}
    assert all(0 <= age < 10 for age in ages.values()), ages  # type: ignore[operator]
    world.kill(nodes[1])
    assert world.run_until(world.is_open, 5) < 1.5
    assert world.ring() == ["pc1", "pc9", "pc3"]
    world.kill(nodes[2], silently=True)
    assert world.run_until(lambda: nodes[0].core.seat is None, 5) < TIMES.gone + 0.7


def test_exo_14_a_fifth_of_all_messages_lost_for_five_seconds_ends_no_epoch() -> None:
    world = World(7)
    nodes = open_fleet(world, 5, 4)
    epoch, closed = nodes[0].core.seat.epoch, [len(node.closed) for node in nodes]
    world.loss = 0.2
    world.run(5)
    world.loss = 0.0
    world.run(3)
    assert world.is_open()
    assert nodes[0].core.seat.epoch == epoch
    assert [len(node.closed) for node in nodes] == closed
    assert not nodes[0].paused
