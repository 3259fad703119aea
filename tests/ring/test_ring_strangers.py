"""Nodes that do not suit, copies, garbage: told in words, and harmless."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_world import TIMES, World, fleet, open_fleet, profile

from cascadia_p2p.errors import MismatchError
from cascadia_p2p.ring import actions as a
from cascadia_p2p.ring import events as e
from cascadia_p2p.types import Endpoint, Epoch, Instance, NodeId, Promise
from cascadia_p2p.wire.messages import (
    Assign,
    Beat,
    Bye,
    Claim,
    ClaimState,
    Close,
    ControlMessage,
    Form,
    Member,
    Open,
    OtherVersion,
    Ready,
    Refusal,
    RefusalCode,
    Reject,
    State,
    StatusQuery,
    StatusReport,
    decode_control,
)

OTHER_MODEL = {"fingerprint": "b" * 64, "model": "other"}


def test_a_newcomer_with_another_model_ends_with_code_5_at_an_open_ring() -> None:
    world = World(1)
    nodes = open_fleet(world, 3)
    newcomer = world.start(profile(9, shard=0, **OTHER_MODEL), 0.1)
    world.run(5)
    assert isinstance(newcomer.fatal, MismatchError)
    for words in ("'toy'", "'other'", "a" * 16, "b" * 16):
        assert words in str(newcomer.fatal)
        assert words in "".join(node.sentences("refused") for node in nodes)
    assert world.is_open()
    assert nodes[0].core.counter == 1


def test_two_models_without_an_open_ring_warn_and_keep_looking() -> None:
    world = World(1)
    nodes = fleet(world, 2, 3)
    other = world.start(profile(9, shard=0, **OTHER_MODEL), 0.1)
    world.run(30)
    assert all(node.alive for node in [*nodes, other])
    assert "'toy'" in other.sentences("refused")
    said = [say for say in other.said if say.event == "refused"]
    assert len(said) < 20, "not for every attempt"


def test_one_stranger_does_not_empty_a_fleet() -> None:
    world = World(1)
    nodes = fleet(world, 2, 3)
    world.run(3)
    stranger = world.start(profile(9, shards=1, holds=(0,), **OTHER_MODEL), 0.1)
    world.run(10)
    assert stranger.core.serving
    assert all(node.alive for node in nodes), "they have met each other; the stranger is the stranger"
    world.start(profile(3, shard=2), 0.1)
    world.run(5)
    assert all(node.core.serving for node in nodes)


def test_exo_06_two_fleets_live_beside_each_other() -> None:
    world = World(1)
    ours = fleet(world, 3)
    theirs = [world.start(profile(10 + shard, shard=shard, fleet="attic"), 0.1) for shard in range(3)]
    world.run(20)
    assert all(node.alive and node.core.serving for node in ours + theirs)
    assert {node.core.seat.epoch for node in ours}.isdisjoint(node.core.seat.epoch for node in theirs)
    assert all(len(node.core.peers) == 2 for node in ours + theirs)


def test_another_fleet_never_ends_a_newcomer() -> None:
    world = World(1)
    open_fleet(world, 3)
    alone = world.start(profile(9, shard=0, fleet="attic"), 0.1)
    world.run(20)
    assert alone.alive
    assert "'attic'" in alone.sentences("refused")


def test_exo_19_other_versions_are_answered_and_counted() -> None:
    world = World(1)
    (node,) = fleet(world, 1, 3)
    world.run(0.1)
    for kind in ("hello", "welcome", "refusal"):
        out = node.machine.handle(e.Heard(OtherVersion(kind, 9, "4.2.0", "no"), 7, "10.9.9.9:1"), world.now)
        answers = [x.message for x in out if isinstance(x, a.Answer)]
        assert len(answers) == (0 if kind == "refusal" else 1), "a refusal is not answered with a refusal"
        if answers:
            assert answers[0].code is RefusalCode.VERSION
    said = [x.sentence for x in node.machine.handle(e.Tick(), world.now) if isinstance(x, a.Say)]
    assert not [sentence for sentence in said if "4.2.0" in sentence], "said once"
    assert node.machine.snapshot(world.now)["dropped"]["refused_greetings"] == 3


@pytest.mark.parametrize("serving", [True, False])
def test_a_newcomer_of_another_protocol_ends_only_at_an_open_ring(serving: bool) -> None:
    world = World(1)
    (node,) = fleet(world, 1, 3)
    world.run(0.1)
    raw = b'{"type":"refusal","protocol":9,"software":"4.2.0","message":"no","serving":%s}'
    message = decode_control(raw % (b"true" if serving else b"false"))
    node.feed(e.Heard(message, 7, "10.9.9.9:1"))
    assert (node.fatal is not None) is serving
    if node.fatal is not None:
        assert "4.2.0 (protocol 9)" in str(node.fatal)


def test_mixed_precisions_join_with_a_warning_on_both_consoles() -> None:
    world = World(1)
    one = world.start(profile(1, shard=0, shards=2, holds=(0, 1), precision="fine"), 0.1)
    two = world.start(profile(2, shard=1, shards=2, holds=(0, 1), precision="exact"), 0.1)
    world.run_until(world.is_open, 10)
    for node in (one, two):
        assert node.sentences("numbers_mixed").count("--precision") == 1
    shown = one.machine.snapshot(world.now)["nodes"]
    assert [each["precision"] for each in shown] == ["fine", "exact"]


def test_mixed_releases_join_with_one_warning() -> None:
    world = World(1)
    nodes = fleet(world, 2, 3)
    world.start(profile(3, shard=2, software="0.1.9"), 0.1)
    world.run_until(world.is_open, 10)
    assert nodes[0].sentences("software_mixed").count("0.1.9") == 1
    status = nodes[0].machine.snapshot(world.now)
    assert {stage["software"] for stage in status["stages"]} == {"0.1.0", "0.1.9"}


def test_a_copied_state_directory_does_not_evict_the_node_that_serves() -> None:
    world = World(1)
    nodes = open_fleet(world, 3)
    copy = world.start(profile(2, 7, shard=1, control=Endpoint("10.0.0.99", 7600)), 0.1)
    world.run(4)
    assert copy.alive, "it might be a restart whose former run is not yet seen to have ended"
    world.run(TIMES.clone + 3)
    assert isinstance(copy.fatal, MismatchError)
    assert "--state-dir" in str(copy.fatal)
    assert "a state directory was copied" in nodes[0].sentences("refused")
    assert world.is_open()
    assert nodes[0].core.counter == 1


def test_a_copy_that_is_met_before_there_is_a_ring_is_told_and_nothing_flaps() -> None:
    """While both live the first stays; when it has ended the other may take its place."""
    world = World(1)
    nodes = fleet(world, 2, 3)
    world.run(3)
    copy = world.start(profile(2, 7, shard=2, control=Endpoint("10.0.0.99", 7600)), 0.1)
    world.run(40)
    original = nodes[1]
    assert copy.alive
    assert original.alive
    assert nodes[0].core.peers.get(original.profile.node).instance == original.profile.instance
    for node in (nodes[0], copy):
        assert "a state directory was copied; give one of them another --state-dir" in node.sentences(
            "refused"
        )
        assert not node.sentences("peer_replaced")
        assert len([say for say in node.said if say.event == "refused"]) < 20
    world.kill(original)
    world.run(5)
    assert nodes[0].core.peers.get(copy.profile.node).instance == copy.profile.instance


def test_who_said_goodbye_is_not_brought_back_by_what_is_still_under_way() -> None:
    """Its own old messages, an old announcement, the word of a third node."""
    world = World(1)
    nodes = open_fleet(world, 3)
    left, core = nodes[1], nodes[1].core
    old = [
        core.greeting(),
        core.welcome(),
        core.beat(),
        State(node=core.node, instance=core.instance, claim=core.claim()),
    ]
    gossip = nodes[2].core.greeting()
    left.feed(e.Leave("Ctrl-C"))
    world.run(0.2)
    world.kill(left)
    for _ in range(3):
        for message in old:
            nodes[0].feed(e.Heard(message, 1))
        nodes[0].feed(e.Heard(gossip, 2))
        world.dial(nodes[0], left.profile.control)
        world.run(0.5)
        assert nodes[0].core.peers.get(left.profile.node) is None
        assert left.profile.node not in {
            node["node"] for node in nodes[0].machine.snapshot(world.now)["nodes"]
        }
    back = world.restart(left)
    world.run_until(world.is_open, 10)
    for message in old:
        nodes[0].feed(e.Heard(message, 1))
    assert nodes[0].core.peers.get(left.profile.node).instance == back.profile.instance
    world.run(3)
    assert world.is_open()
    assert nodes[0].core.counter == 2


def test_a_node_that_meets_itself_says_nothing() -> None:
    world = World(1)
    (node,) = fleet(world, 1, 3)
    node.wanted[node.profile.control] = 0.0
    world.run(5)
    assert node.profile.control not in node.wanted
    assert node.sentences("refused") == ""
    assert len(node.core.peers) == 0


def test_exo_19_garbage_is_counted_and_answered_seldom() -> None:
    world = World(1)
    nodes = open_fleet(world, 3)
    out = []
    for _ in range(200):
        out += nodes[0].machine.handle(
            e.Undecodable(5, "10.9.9.9:1", "a control message must be JSON"), world.now
        )
    assert sum(isinstance(action, a.Answer) for action in out) == 1
    assert sum(isinstance(action, a.Say) for action in out) == 1
    assert nodes[0].machine.snapshot(world.now)["dropped"]["undecodable_messages"] == 200
    world.run(3)
    assert nodes[0].core.counter == 1


def test_status_is_answered_to_anybody() -> None:
    world = World(1)
    nodes = open_fleet(world, 3)
    (answer,) = nodes[2].machine.handle(e.Heard(StatusQuery(), 77), world.now)
    assert isinstance(answer, a.Answer)
    assert isinstance(answer.message, StatusReport)
    assert answer.message.body["state"] == "open"


def test_an_unknown_node_that_speaks_is_greeted_once_a_second() -> None:
    world = World(1)
    (node,) = fleet(world, 1, 3)
    world.run(0.1)
    beat = Beat(node=NodeId("e" * 16), instance=Instance("e" * 16))
    out = [action for _ in range(50) for action in node.machine.handle(e.Heard(beat, 7), world.now)]
    assert [action.message.type for action in out if isinstance(action, a.Answer)] == ["hello"]
    assert node.machine.ignored == 50


# ---------------------------------------------------------------- whatever decodes may come from anybody

WHO = st.sampled_from(
    [(profile(index).node, profile(index).instance) for index in range(1, 5)]
    + [(NodeId("e" * 16), Instance("e" * 16))]
)
EPOCHS = st.builds(
    Epoch,
    st.sampled_from([0, 1, 2, 2**62, 2**63 - 1]),
    st.sampled_from([profile(index).instance for index in range(1, 5)]),
)
PROMISES = st.builds(Promise, st.integers(1, 9), st.integers(1, 999), st.integers(1, 9))
SHARDS = st.integers(0, 5)
MEMBERS = st.lists(
    st.builds(
        lambda who, shard: Member(node=who[0], instance=who[1], shard=shard, data=Endpoint("10.0.0.1", 1)),
        WHO,
        SHARDS,
    ),
    min_size=1,
    max_size=4,
).map(tuple)
CLAIMS = st.builds(
    lambda shard, state, age: Claim(shard=shard, state=state, age_s=age),
    st.none() | SHARDS,
    st.sampled_from(ClaimState),
    st.floats(0, 1e6),
)


@st.composite
def messages(draw: st.DrawFn) -> ControlMessage:
    node, instance = draw(WHO)
    who = {"node": node, "instance": instance}
    kind = draw(
        st.sampled_from(
            ["state", "assign", "form", "ready", "reject", "open", "close", "beat", "bye", "refusal"]
        )
    )
    match kind:
        case "state":
            ring, counter = draw(st.none() | EPOCHS), draw(st.sampled_from([0, 3, 2**63 - 1]))
            return State(**who, claim=draw(CLAIMS), holds=(0, 1, 2), epoch=counter, ring=ring)
        case "assign":
            return Assign(**who, shard=draw(SHARDS))
        case "form":
            return Form(**who, epoch=draw(EPOCHS), members=draw(MEMBERS), promise=draw(PROMISES))
        case "ready":
            return Ready(**who, epoch=draw(EPOCHS))
        case "reject":
            return Reject(**who, epoch=draw(EPOCHS), reason="no")
        case "open":
            return Open(**who, epoch=draw(EPOCHS), promise=draw(PROMISES))
        case "close":
            return Close(**who, epoch=draw(EPOCHS), reason="no")
        case "beat":
            return Beat(**who, epoch=draw(st.sampled_from([0, 1, 2])), frames_out=draw(st.integers(0, 9)))
        case "bye":
            return Bye(**who, reason="no")
    return Refusal(**who, code=draw(st.sampled_from(RefusalCode)), message="no", serving=True, software="9")


@given(st.lists(messages(), max_size=12), st.integers(0, 3))
@settings(max_examples=120, deadline=None)
def test_no_message_from_anybody_stops_a_machine(sent: list[ControlMessage], index: int) -> None:
    """Whatever arrives, the machine does not raise, and the fleet is a ring again soon after."""
    world = World(9)
    nodes = fleet(world, 4, load_s=0.05)
    world.run_until(world.is_open, 10)
    for message in sent:
        nodes[index].feed(e.Heard(message, 3))
        world.run(0.02)
    world.run_until(world.is_open, 30)
