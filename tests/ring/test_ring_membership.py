"""The table of peers: instances, silence, bounds."""

from __future__ import annotations

import itertools

import pytest
from ring_world import TIMES, profile

from cascadia_p2p.ring.core import Core
from cascadia_p2p.ring.membership import (
    MAX_ADDRESSES,
    MAX_BURIED,
    MAX_PEERS,
    AddressBook,
    Admission,
    Membership,
)
from cascadia_p2p.types import Endpoint, Instance
from cascadia_p2p.wire.messages import Beat, Introduction


def introduction(index: int, run: int = 0) -> Introduction:
    return Core(profile(index, run), TIMES, 0.0).introduction()


@pytest.fixture
def table() -> Membership:
    return Membership(TIMES, 0.0)


def test_exo_09_a_newer_instance_replaces_a_silent_one_at_once(table: Membership) -> None:
    for run in range(6):
        now = run * TIMES.far_contest
        outcome = table.admit(introduction(7, run), now)
        assert outcome is (Admission.NEW if run == 0 else Admission.REPLACED)
        assert [peer.instance for peer in table] == [introduction(7, run).instance]
    assert table.admit(introduction(7, 2), 60.0) is Admission.BURIED


def test_ring_07_a_node_is_there_once_whatever_it_says(table: Membership) -> None:
    assert table.admit(introduction(7), 0.0) is Admission.NEW
    assert table.admit(introduction(7), 0.1) is Admission.KNOWN
    assert len(table) == 1


def test_a_newer_instance_is_refused_while_the_older_one_speaks(table: Membership) -> None:
    table.admit(introduction(7), 0.0)
    assert table.admit(introduction(7, 1), 1.4) is Admission.CONTESTED
    peer = table.get(introduction(7).node)
    assert peer is not None
    peer.beat_at = 1.4
    peer.beat = Beat(node=peer.node, instance=peer.instance)
    table.hear(peer, 1.4)
    assert table.admit(introduction(7, 1), 1.7) is Admission.CONTESTED
    assert table.admit(introduction(7, 1), 1.8) is Admission.REPLACED, "one that beats is missed sooner"


def test_a_closed_connection_ends_the_contest(table: Membership) -> None:
    table.admit(introduction(7), 0.0)
    peer = table.get(introduction(7).node)
    assert peer is not None
    peer.lost_at = 0.05
    assert table.admit(introduction(7, 1), 0.1) is Admission.REPLACED


def test_exo_14_slow_is_suspect_and_not_gone(table: Membership) -> None:
    table.admit(introduction(7), 0.0)
    peer = table.get(introduction(7).node)
    assert peer is not None
    assert not table.is_suspect(peer, TIMES.far_suspect - 0.01)
    assert table.is_suspect(peer, TIMES.far_suspect)
    assert table.gone(TIMES.far_gone - 0.01) == []
    (found, reason), *rest = table.gone(TIMES.far_gone)
    assert (found, rest) == (peer, [])
    assert "silent for 6.0 s" in reason


def test_a_node_that_was_stalled_judges_nobody_for_one_silence_period(table: Membership) -> None:
    table.admit(introduction(7), 0.0)
    assert table.stalled(100.0)
    assert table.gone(100.0 + TIMES.far_gone - 0.01) == []
    assert len(table.gone(100.0 + TIMES.far_gone)) == 1


def test_a_machine_that_always_stalls_judges_all_the_same(table: Membership) -> None:
    granted = [table.stalled(second * 1.0) for second in range(60)]
    assert granted.count(True) == 3


def test_the_table_the_buried_and_the_addresses_are_bounded(table: Membership) -> None:
    template = introduction(1)
    for index in range(MAX_PEERS):
        intro = template.model_copy(update={"node": f"{index:016x}", "instance": f"{index:016x}"})
        assert table.admit(intro, 0.0) is Admission.NEW
    assert table.admit(introduction(0xFFFFFF), 0.0) is Admission.FULL
    assert len(table) == MAX_PEERS
    for index in range(MAX_BURIED + 5):
        table.bury(Instance(f"{index:016x}"))
    assert not table.is_buried(Instance(f"{4:016x}"), 0.0)
    assert table.is_buried(Instance(f"{5:016x}"), 1e9)
    book = AddressBook(Endpoint("10.0.0.1", 1), TIMES)
    for port in range(1, MAX_ADDRESSES + 50):
        book.add(Endpoint("10.0.0.1", port), 0.0)
    assert len(book) == MAX_ADDRESSES


def test_an_address_is_dialled_with_growing_delay_until_it_is_met() -> None:
    own, lost = Endpoint("10.0.0.1", 1), Endpoint("10.0.0.2", 1)
    book = AddressBook(own, TIMES)
    book.add(own, 0.0)
    book.add(lost, 0.0)
    dialled = [step for step in range(400) if book.due(step / 10)]
    gaps = [(b - a) / 10 for a, b in itertools.pairwise(dialled)]
    assert gaps[:4] == [0.5, 1.0, 2.0, 4.0]
    assert set(gaps[4:]) == {TIMES.redial_limit}
    book.met(lost)
    assert book.due(1e9) == []
