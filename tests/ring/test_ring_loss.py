"""A ring loses members, heads, links: it closes in words, keeps what is loaded, and forms again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ring_world import TIMES, SimNode, World, open_fleet, profile

from cascadia_p2p.ring import actions as a
from cascadia_p2p.ring import events as e
from cascadia_p2p.types import Endpoint, Epoch, Instance, Promise
from cascadia_p2p.wire.messages import Close, Form, Journal, Open, Ready


def closing(node: SimNode) -> a.CloseRing:
    assert node.closed, f"{node.name} did not close"
    return node.closed[-1]


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("silently", [False, True])
def test_dll_01_a_killed_node_closes_the_ring_and_its_return_opens_it(index: int, silently: bool) -> None:
    world = World(index)
    nodes = open_fleet(world, 4, 4)
    victim = nodes[index]
    world.kill(victim, silently=silently)
    others = [node for node in nodes if node is not victim]
    took = world.run_until(lambda: all(node.core.seat is None for node in others), 5)
    assert took < (2.5 if silently else 0.5)
    world.run(3)
    assert all(node.alive and node.core.state == "loaded" for node in others)
    assert not world.is_open()
    if index:
        assert closing(nodes[0]).missing == (index,)
        assert closing(nodes[0]).was_open
        assert victim.name in closing(nodes[0]).reason
        assert f"shard {index}" in nodes[0].sentences("ring_closed")
    else:
        assert "the head is lost" in closing(nodes[1]).reason
    loads = sum(isinstance(action, a.LoadShard) for node in others for action in node.actions)
    back = world.restart(victim)
    world.run_until(world.is_open, 10)
    assert world.now - (back.loaded_at or 0.0) < 1.5
    assert back.core.shard == index
    assert sum(isinstance(action, a.LoadShard) for node in others for action in node.actions) == loads


def test_exo_09_killed_and_restarted_five_times_the_node_is_there_once() -> None:
    world = World(5)
    nodes = open_fleet(world, 3)
    victim = nodes[1]
    for _ in range(5):
        world.kill(victim)
        world.run(world.rng.uniform(0.3, 2.0))
        victim = world.restart(victim)
        world.run_until(world.is_open, 10)
        assert world.ring() == ["pc1", "pc2", "pc3"]
        living = (nodes[0], nodes[2], victim)
        world.run_until(lambda: all(len(node.core.peers) == 2 for node in living), 2)  # noqa: B023
        for node in living:
            status = node.machine.snapshot(world.now)
            assert len({entry["node"] for entry in status["nodes"]}) == len(status["nodes"]) == 3


@pytest.mark.parametrize("shard", range(3))
def test_ring_01_a_standby_takes_a_lost_shard_at_once(shard: int) -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    standby = world.start(profile(9, shard=shard), 0.1)
    world.run(4)
    assert standby.core.standby
    world.kill(nodes[shard])
    took = world.run_until(world.is_open, 10)
    assert took < 1.5
    assert world.ring()[shard] == "pc9"
    assert any(isinstance(action, a.LoadShard) for action in standby.actions)
    returned = world.restart(nodes[shard])
    world.run(5)
    assert world.ring()[shard] == "pc9", "whoever serves goes on serving"
    assert returned.core.standby


def test_a_silent_head_is_replaced_by_its_standby() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    standby = world.start(profile(9, shard=0), 0.1)
    world.run(4)
    world.kill(nodes[0], silently=True)
    assert world.run_until(world.is_open, 10) < TIMES.far_suspect + 1.5
    assert world.ring() == ["pc9", "pc2", "pc3"]
    assert standby.serves_clients


def test_a_spare_node_loads_a_shard_that_nobody_brings_back() -> None:
    world = World(2)
    nodes = open_fleet(world, 4, 3, asked=False)
    spare = next(node for node in nodes if node.core.seat is None)
    victim = next(node for node in nodes if node.core.shard not in (0, spare.core.shard))
    shard = victim.core.shard
    world.kill(victim)
    took = world.run_until(world.is_open, 20)
    assert TIMES.reassign < took < TIMES.reassign + 3
    assert spare.core.shard == shard
    assert f"loads shard {shard} instead of shard" in spare.sentences("shard_assigned")


def test_leaving_is_told_and_not_an_error() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    nodes[1].feed(e.Leave("Ctrl-C"))
    assert closing(nodes[1]).was_open
    world.run(0.05)
    assert closing(nodes[0]).reason == "pc2/00000000 left: Ctrl-C"
    assert closing(nodes[0]).missing == (1,)
    assert all(len(node.core.peers) == 1 for node in (nodes[0], nodes[2]))
    world.kill(nodes[1])
    world.restart(nodes[1])
    world.run_until(world.is_open, 10)


def test_a_head_that_leaves_closes_its_ring_for_all() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    nodes[0].feed(e.Leave("Ctrl-C"))
    world.run(0.05)
    for node in nodes[1:]:
        assert "pc1/00000000 leaves: Ctrl-C" in closing(node).reason
        assert node.core.state == "loaded"
    assert nodes[0].machine.handle(e.Tick(), world.now) == []
    assert nodes[0].sentences("ring_forming").count("forms a ring") == 1, "a leaving head forms no new one"


def test_a_node_that_left_answers_greetings_with_goodbye() -> None:
    world = World(2)
    nodes = open_fleet(world, 2, 2)
    nodes[1].feed(e.Leave("Ctrl-C"))
    greeting = nodes[0].machine.greeting(world.now)
    (answer,) = nodes[1].machine.handle(e.Heard(greeting, 99), world.now)
    assert isinstance(answer, a.Answer)
    assert answer.message.type == "bye"


def test_exo_14_a_short_cut_pauses_and_gives_no_new_epoch() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    world.cut(nodes[0], nodes[2])
    world.run_until(lambda: nodes[0].paused, 1)
    assert nodes[0].machine.snapshot(world.now)["admitting"] is False
    world.run(0.6)
    world.heal()
    world.run_until(lambda: not nodes[0].paused, 1)
    world.run(5)
    assert world.is_open()
    assert nodes[0].core.counter == 1
    assert nodes[0].closed == []


def test_a_closed_connection_pauses_at_once_and_a_redial_resumes() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    nodes[0].feed(e.ConnectionLost(nodes[1].profile.node, nodes[1].profile.instance))
    nodes[0].feed(e.Tick())
    assert nodes[0].paused
    assert "the connection to pc2/00000000 is closed" in nodes[0].sentences("member_suspect")
    world.run(1)
    assert not nodes[0].paused
    assert nodes[0].core.counter == 1


def test_a_port_that_refuses_ends_its_node_at_once_and_last_words_do_not_bring_it_back() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    lost = nodes[1]
    last = [lost.core.beat(), lost.machine.greeting(world.now), lost.core.welcome()]
    world.kill(lost, silently=True)
    nodes[0].feed(e.ConnectionLost(lost.profile.node, lost.profile.instance))
    assert nodes[0].closed == [], "the way may be lost, and the node be there"
    nodes[0].feed(e.ConnectionRefused(lost.profile.node, lost.profile.instance))
    assert "refuses connections at 10.0.0.2:7600: its process has ended" in closing(nodes[0]).reason
    for words in last:
        nodes[0].feed(e.Heard(words, 1))
        assert nodes[0].core.peers.get(lost.profile.node) is None
    world.restart(lost)
    world.run_until(world.is_open, 10)


def test_a_node_that_lives_behind_a_port_that_refuses_is_met_again() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    nodes[0].feed(e.ConnectionRefused(nodes[1].profile.node, nodes[1].profile.instance))
    assert nodes[0].core.seat is None
    world.run_until(world.is_open, 5)
    assert nodes[0].core.counter == 2


def test_where_an_earlier_instance_was_dialled_a_refusal_counts_if_the_later_one_is_there() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    lost = nodes[1]
    here, elsewhere = lost.machine.greeting(world.now).control, Endpoint("10.0.0.99", 7600)
    nodes[0].feed(e.ConnectionRefused(lost.profile.node, lost.profile.instance, elsewhere))
    assert nodes[0].closed == []
    nodes[0].feed(e.ConnectionRefused(lost.profile.node, lost.profile.instance, here))
    assert "its process has ended" in closing(nodes[0]).reason


def test_a_head_asks_the_others_at_once_what_a_member_that_may_be_lost_has_passed_on() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    core = nodes[2].core
    core.counters = replace(core.counters, epoch=core.seat.epoch, frames_in=77)
    nodes[0].feed(e.ConnectionLost(nodes[1].profile.node, nodes[1].profile.instance))
    world.run(0.01)
    assert nodes[0].machine._head.attempt.watch.held(1) == 78


@pytest.mark.parametrize("deaf", ["head", "member"])
def test_a_cut_in_one_direction_closes_both_ends(deaf: str) -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    pair = (nodes[1], nodes[0]) if deaf == "head" else (nodes[0], nodes[1])
    world.cut(*pair, both=False)
    took = world.run_until(
        lambda: all(node.core.seat is None or node.core.seat.open is False for node in nodes), 10
    )
    assert took < 2 * TIMES.gone + 1
    world.heal()
    world.run_until(world.is_open, 15)


def test_a_long_cut_ends_the_epoch_and_healing_brings_a_new_one() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    world.cut(nodes[0], nodes[2])
    world.run(20)
    assert not world.is_open()
    world.heal()
    assert world.run_until(world.is_open, 10) < 7
    assert nodes[0].core.counter > 1


@pytest.mark.parametrize("killed", [False, True], ids=["cut", "killed"])
def test_a_ring_says_whether_the_silent_node_has_survived(killed: bool) -> None:
    world = World(3)
    nodes = open_fleet(world, 3)
    if killed:
        world.kill(nodes[1], silently=True)
    else:
        world.isolate([nodes[1]])
    world.run_until(lambda: bool(nodes[0].closed), 5)
    world.heal()
    if killed:
        world.restart(nodes[1])
    world.run_until(world.is_open, 10)
    rings = [action for action in nodes[0].actions if isinstance(action, a.OpenRing)]
    assert [each.survived for each in rings] == [False, not killed]


def test_a_frozen_head_that_wakes_finds_itself_replaced_and_steals_nothing() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    world.start(profile(9, shard=0), 0.1)
    world.run(4)
    world.freeze(nodes[0])
    world.run_until(lambda: nodes[1].core.seat is not None and nodes[1].core.seat.head.node.endswith("9"), 10)
    world.run(3)
    world.thaw(nodes[0])
    world.run_until(lambda: nodes[0].core.seat is None, 3)
    world.run_until(world.is_open, 3)
    assert world.ring() == ["pc9", "pc2", "pc3"]
    world.run(10)
    assert world.ring() == ["pc9", "pc2", "pc3"]
    assert nodes[0].core.standby
    assert not nodes[0].serves_clients
    assert closing(nodes[0]).was_open


def test_a_node_that_stood_still_itself_blames_nobody() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    world.freeze(nodes[0])
    world.run(1.5)
    nodes[0].buffer.clear()
    world.thaw(nodes[0])
    world.run(5)
    assert "stood still for 1." in nodes[0].sentences("own_stall")
    assert world.is_open()
    assert nodes[0].core.counter == 1


def test_who_can_not_hear_judges_nobody_and_is_heard_all_the_same() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    for other in nodes[1:]:
        world.cut(other, nodes[0], both=False)
    nodes[0].deaf = True
    world.run(6)
    assert world.is_open()
    world.heal()
    nodes[0].deaf = False
    world.run(5)
    assert world.is_open()
    assert nodes[0].core.counter == 1


def test_dll_11_a_flapping_link_never_forms_rings_in_a_tight_loop() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    for _ in range(20):
        world.cut(nodes[0], nodes[1])
        world.run(2.6)
        world.heal()
        world.run(0.4)
    assert nodes[0].core.counter <= 20
    warnings = [say for say in nodes[0].said if say.level == "warning"]
    assert len(warnings) < 150
    world.run_until(world.is_open, 10)


def test_a_stuck_stage_is_named_and_the_standby_takes_its_place() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    world.start(profile(9, shard=1), 0.1)
    world.run(4)
    nodes[0].data.frames_out = nodes[1].data.frames_in = 1
    world.run(TIMES.stuck - 0.5)
    assert world.is_open(), "slow is not stuck"
    world.run_until(lambda: bool(nodes[0].closed), 2)
    assert "pc2/00000000 (shard 1) took a frame and has made no progress for 5." in closing(nodes[0]).reason
    world.run_until(world.is_open, 5)
    assert world.ring() == ["pc1", "pc9", "pc3"]


def test_the_limit_of_patience_grows_with_the_profiled_layer() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    nodes[1].core.layer_s = 1.0
    world.run(1.5)
    nodes[0].data.frames_out = nodes[1].data.frames_in = 1
    world.run(TIMES.stuck_layers * 1.0 - 1.0)
    assert world.is_open()
    world.run_until(lambda: bool(nodes[0].closed), 3)


def test_cas_04_a_hop_that_takes_nothing_is_named() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    nodes[0].data.frames_out = nodes[1].data.frames_in = nodes[1].data.frames_out = 1
    world.run_until(lambda: bool(nodes[0].closed), 8)
    reason = closing(nodes[0]).reason
    assert (
        "pc2/00000000 (shard 1) has sent frames that pc3/00000000 (shard 2) has not taken at 10.0.0.3:7601"
        in reason
    )
    assert "the hop between them is broken" in reason


def test_a_member_that_reports_a_broken_hop_closes_the_ring_in_its_words() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    nodes[1].feed(e.HopBroken(nodes[1].core.seat.epoch, "pc3 does not take frames at 10.0.0.3:7601"))
    world.run(0.05)
    assert "pc2/00000000 (shard 1): pc3 does not take frames at 10.0.0.3:7601" in closing(nodes[0]).reason
    world.run_until(world.is_open, 5)


def test_a_dead_data_thread_ends_the_node_with_a_goodbye() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    nodes[1].feed(e.DataThreadDied("out of memory"))
    assert nodes[1].fatal is not None
    assert "out of memory" in str(nodes[1].fatal)
    world.run(0.1)
    assert "its data thread ended: out of memory" in closing(nodes[0]).reason


def test_ring_08_words_of_an_old_epoch_do_nothing() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    old = nodes[0].core.seat.epoch
    world.kill(nodes[2])
    world.run(1)
    world.restart(nodes[2])
    world.run_until(world.is_open, 10)
    new = nodes[0].core.seat.epoch
    assert new.counter > old.counter
    head, member = nodes[0].core, nodes[1].core
    for node, message in [
        (nodes[0], Ready(node=member.node, instance=member.instance, epoch=old)),
        (nodes[0], Close(node=member.node, instance=member.instance, epoch=old, reason="late")),
        (nodes[1], Close(node=head.node, instance=head.instance, epoch=old, reason="late")),
        (nodes[1], Open(node=head.node, instance=head.instance, epoch=old, promise=head.profile.promise)),
    ]:
        node.feed(e.Heard(message, 1))
    nodes[0].feed(e.ProbeReturned(old, 1))
    nodes[0].feed(e.HopBroken(old, "late"))
    nodes[1].feed(e.Switched(old))
    world.run(3)
    assert world.is_open()
    assert nodes[0].core.seat.epoch == new


def form(node: SimNode, epoch: Epoch, **changes: object) -> Form:
    seat, core = node.core.seat, node.core
    fields = {"members": seat.members, "promise": seat.promise, **changes}
    return Form(node=core.node, instance=core.instance, epoch=epoch, **fields)  # type: ignore[arg-type]


def test_a_member_refuses_a_second_head_while_its_own_lives() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    rival = world.start(profile(9, shard=0), 0.1)
    world.run(3)
    member = nodes[1]
    members = (
        member.core.seat.members[0].model_copy(
            update={"node": rival.profile.node, "instance": rival.profile.instance}
        ),
        *member.core.seat.members[1:],
    )
    message = Form(
        node=rival.profile.node,
        instance=rival.profile.instance,
        epoch=Epoch(99, rival.profile.instance),
        members=members,
        promise=rival.profile.promise,
    )
    member.feed(e.Heard(message, 1))
    assert "pc1/00000000, which is alive" in member.sentences("form_rejected")
    assert member.core.seat.head.node == nodes[0].profile.node
    assert member.core.counter == 1


def test_a_member_takes_no_epoch_that_does_not_fit() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    head, member = nodes[0], nodes[1]
    seat, instance = head.core.seat, head.profile.instance
    swapped = (seat.members[0], seat.members[2], seat.members[1])
    more = seat.promise.__class__(seat.promise.slots + 1, seat.promise.context, seat.promise.rows)
    cases = [
        (form(head, Epoch(1, Instance("f" * 16))), "first member"),
        (form(head, Epoch(0, instance)), "not newer than 1"),
        (form(head, Epoch(1 << 62, instance)), "too far beyond 1"),
        (form(head, Epoch(2, instance), members=swapped), "once each, in order"),
        (form(head, Epoch(2, instance), members=seat.members[:2]), "once each, in order"),
        (form(head, Epoch(2, instance), promise=more), "can hold 4 of 128"),
    ]
    for message, words in cases:
        before = len(member.actions)
        member.feed(e.Heard(message, 1))
        rejects = [x.message for x in member.actions[before:] if isinstance(x, a.Send)]
        assert len(rejects) == 1
        assert words in rejects[0].reason
        assert member.core.seat.epoch == seat.epoch


@pytest.mark.parametrize("field", ["slots", "context"])
def test_a_standby_that_promises_less_than_is_in_use_is_not_taken(field: str) -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    own = nodes[0].profile.promise
    less = Promise(own.slots - 1, own.context, own.rows)
    if field == "context":
        less = Promise(own.slots, own.context - 1, own.rows)
    standby = world.start(profile(9, shard=1, promise=less), 0.1)
    world.run(4)
    nodes[0].needs = (own.slots, own.slots, own.context)
    world.run(0.2)
    world.kill(nodes[1])
    world.run(4)
    assert not world.is_open()
    words = nodes[0].machine.snapshot(world.now)["waiting_for"]
    assert f"promises {less.slots} slots of {less.context} positions, where 4 of 128 are in use" in str(words)
    nodes[0].needs = (0, 0, 0)
    world.run_until(world.is_open, 2)
    assert standby.core.seat is not None


def test_a_loss_tells_which_frames_lay_at_the_lost_stage() -> None:
    world = World(2)
    nodes = open_fleet(world, 4, 4)
    for node, taken, sent in [(nodes[0], 5, 9), (nodes[1], 9, 9), (nodes[2], 7, 7), (nodes[3], 6, 6)]:
        node.data.frames_in, node.data.frames_out = taken, sent
    world.run(0.3)
    world.kill(nodes[2])
    world.run_until(lambda: nodes[0].core.seat is None, 3)
    assert closing(nodes[0]).held == 7
    world.restart(nodes[2])
    world.run_until(world.is_open, 10)
    nodes[1].feed(e.Leave("Ctrl-C"))
    world.run(0.3)
    assert closing(nodes[0]).held == 0, "who says goodbye is no victim"


def test_a_member_that_drains_is_spared_when_its_standby_is_there() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    standby = world.start(profile(9, shard=1), 0.1)
    world.run(4)
    nodes[0].needs = (4, 4, 128)
    world.run(0.1)
    nodes[1].feed(e.Drain("Ctrl-C"))
    world.run_until(lambda: nodes[1].drained, 1)
    world.run_until(world.is_open, 1)
    assert world.ring() == ["pc1", "pc9", "pc3"]
    assert standby.core.seat is not None
    assert closing(nodes[0]).held == 0
    assert closing(nodes[0]).reason == "pc2/00000000 is leaving"
    nodes[1].feed(e.Leave("Ctrl-C"))
    world.run(5)
    assert world.ring() == ["pc1", "pc9", "pc3"]


def test_a_member_that_drains_without_a_standby_waits_for_what_runs() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    nodes[0].needs = (2, 4, 128)
    world.run(0.1)
    nodes[1].feed(e.Drain("Ctrl-C"))
    world.run(5)
    assert world.is_open()
    assert not nodes[1].drained
    assert nodes[0].paused
    nodes[0].needs = (0, 2, 128)
    world.run_until(lambda: nodes[1].drained, 1)
    assert closing(nodes[0]).missing == (1,)
    world.run(3)
    assert not world.is_open(), "who leaves takes no place"
    assert "has it and is leaving" in str(nodes[0].machine.snapshot(world.now)["waiting_for"])
    nodes[1].feed(e.Leave("Ctrl-C"))
    world.kill(nodes[1])
    world.restart(nodes[1])
    world.run_until(world.is_open, 10)


def test_a_head_that_drains_ends_when_nobody_waits_for_it() -> None:
    world = World(2)
    nodes = open_fleet(world, 3)
    nodes[0].needs = (2, 2, 128)
    world.run(0.1)
    nodes[0].feed(e.Drain("Ctrl-C"))
    world.run(5)
    assert not nodes[0].drained
    assert world.is_open()
    assert nodes[0].paused
    nodes[0].needs = (0, 0, 0)
    world.run_until(lambda: nodes[0].drained, 1)


def test_a_node_without_a_seat_drains_at_once() -> None:
    world = World(2)
    open_fleet(world, 3)
    spare = world.start(profile(9, shard=1), 0.1)
    world.run(4)
    spare.feed(e.Drain("Ctrl-C"))
    assert spare.drained


def told(world: World, standby: SimNode, by: SimNode) -> bool:
    """Whether a standby takes a journal from this node."""
    message = Journal(node=by.profile.node, instance=by.profile.instance, session=1, number=1)
    done = standby.machine.handle(e.Heard(message, 1), world.now)
    return a.TakeJournal(message) in done


def test_only_the_present_head_tells_its_standbys_of_answers() -> None:
    world = World(61)
    nodes = open_fleet(world, 3)
    standby, other = world.start(profile(8, shard=0), 0.1), world.start(profile(9, shard=0), 0.1)
    elsewhere = world.start(profile(10, shard=1), 0.1)
    world.run(2)
    known = {each.profile.instance for each in (standby, other)}
    assert {each.instance for each in nodes[0].machine.standbys} == known
    assert told(world, standby, nodes[0])
    assert not any(told(world, standby, by) for by in (nodes[1], nodes[2], other))
    assert not told(world, elsewhere, nodes[0])
    assert not told(world, nodes[1], nodes[0])
    assert standby.machine.snapshot(world.now)["dropped"]["refused_journals"] == 3
    world.freeze(nodes[0])
    world.run_until(world.is_open, 10)
    head, late = (standby, other) if standby.serves_clients else (other, standby)
    world.thaw(nodes[0])
    world.run(0.2)
    assert not told(world, late, nodes[0]), "another took its place"
    assert not told(world, head, nodes[0])
    assert told(world, late, head)
    world.run(3)
    assert late.profile.instance in {each.instance for each in head.machine.standbys}


def test_without_a_ring_the_node_that_would_form_it_is_believed() -> None:
    world = World(62)
    nodes = open_fleet(world, 3)
    standby = world.start(profile(9, shard=0), 0.1)
    world.run(2)
    world.kill(nodes[2])
    world.run_until(lambda: nodes[0].core.seat is None, 5)
    world.run(1)
    assert told(world, standby, nodes[0])
    assert not told(world, standby, nodes[1])
    assert not told(world, nodes[0], standby)


def test_a_standby_stays_one_while_the_head_that_leaves_still_answers() -> None:
    world = World(1)
    nodes = open_fleet(world, 4)
    head = world.head()
    assert head is not None
    standby = next(node for node in nodes if node.core.shard == 0 and node is not head)
    head.needs = (1, 1, 64)
    world.run(0.1)
    head.feed(e.Drain("Ctrl-C"))
    world.run(3)
    assert world.is_open()
    assert head.core.serving
    assert not standby.serves_clients, "there would be two doors"
    head.needs = (0, 0, 0)
    world.run_until(lambda: head.drained, 5)
    head.feed(e.Leave("Ctrl-C"))
    world.run(0.01)
    world.kill(head)
    world.run_until(lambda: world.is_open() and world.head() is standby, 5)
    assert standby.serves_clients
