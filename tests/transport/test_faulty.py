from __future__ import annotations

import numpy as np
import pytest

from cascadia_p2p.transport.faulty import Faults, FaultyTransport
from cascadia_p2p.transport.memory import MemoryTransport

COUNT = 400


def passed(faults: Faults) -> tuple[list[int], FaultyTransport]:
    """The numbers that arrive when 0, 1, 2, ... are sent."""
    slept: list[float] = []
    transport = FaultyTransport(MemoryTransport(), faults, sleep=slept.append)
    receiver = transport.bind("h", 0, max_part=1 << 10)
    sender = transport.connect(receiver.endpoint)
    for number in range(COUNT):
        assert sender.send(number.to_bytes(2, "little"), np.full((1, 2), number, np.float32))
    arrived = []
    out = np.zeros((1, 2), np.float32)
    while (header := receiver.recv_header(False)) is not None:
        assert receiver.recv_payload(out)
        arrived.append(int.from_bytes(header, "little"))
        assert out.tolist() == [[arrived[-1]] * 2]
    assert len(slept) == transport.counts.delayed
    return arrived, transport


def test_without_faults_everything_arrives() -> None:
    arrived, transport = passed(Faults())
    assert arrived == list(range(COUNT))
    assert transport.counts.sent == COUNT


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_fault_does_what_it_says(seed: int) -> None:
    arrived, transport = passed(Faults(drop=0.1, seed=seed))
    assert len(arrived) == COUNT - transport.counts.dropped
    assert arrived == sorted(set(arrived))
    assert transport.counts.dropped > 0

    arrived, transport = passed(Faults(duplicate=0.1, seed=seed))
    assert len(arrived) == COUNT + transport.counts.duplicated
    assert sorted(set(arrived)) == list(range(COUNT))
    assert transport.counts.duplicated > 0

    arrived, transport = passed(Faults(reorder=0.1, seed=seed))
    assert transport.counts.reordered > 0
    assert arrived != sorted(arrived)
    assert len(arrived) in (COUNT, COUNT - 1)

    arrived, transport = passed(Faults(delay=0.1, seed=seed))
    assert arrived == list(range(COUNT))
    assert transport.counts.delayed > 0


def test_a_seed_repeats_its_plan_and_another_does_not() -> None:
    faults = Faults(drop=0.1, duplicate=0.1, reorder=0.1, seed=5)
    other = Faults(drop=0.1, duplicate=0.1, reorder=0.1, seed=6)
    assert passed(faults)[0] == passed(faults)[0]
    assert passed(faults)[0] != passed(other)[0]
