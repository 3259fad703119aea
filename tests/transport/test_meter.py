from __future__ import annotations

import pytest

from cascadia_p2p.transport.meter import IDLE_BYTES_S, LOOK_S, LOOK_SHARE, PART_BYTES, Meter

LIMIT = 10_000


class Arrivals:
    """What has come over each connection."""

    def __init__(self) -> None:
        self.came: dict[int, int] = {7: 0, 8: 0}

    def __call__(self, descriptor: int) -> int | None:
        return self.came.get(descriptor)


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals()


@pytest.fixture
def meter(arrivals: Arrivals) -> Meter:
    made = Meter(LIMIT, arrivals)
    made.opened(7, 0.0)
    made.opened(8, 0.0)
    return made


def test_parts_that_are_never_taken_are_overfull(meter: Meter, arrivals: Arrivals) -> None:
    arrivals.came[7] = LIMIT
    assert meter.overfull(0.25) == []
    arrivals.came[7] += 2 * IDLE_BYTES_S
    assert meter.overfull(0.5) == []
    assert meter.overfull(0.6) == [7]


def test_a_taker_that_was_held_up_until_the_look_ends_nobody(meter: Meter, arrivals: Arrivals) -> None:
    """As after a process stood still: it looks before it takes what has come meanwhile."""
    for second in range(1, 10):
        arrivals.came[7] += 3 * LIMIT
        assert meter.overfull(float(second)) == []
        meter.took(7, 3 * LIMIT)
        assert meter.overfull(second + 0.5) == []


def test_a_connection_whose_messages_are_taken_may_send_for_ever(meter: Meter, arrivals: Arrivals) -> None:
    now = 0.0
    for _ in range(500):
        now += 0.25
        arrivals.came[7] += 5000 + PART_BYTES
        assert meter.overfull(now) == []
        meter.took(7, 5000)


def test_messages_so_small_that_they_are_mostly_frame_earn_nothing(meter: Meter, arrivals: Arrivals) -> None:
    """What a part takes on the wire is an upper bound: what it leaves over must not be saved up."""
    for _ in range(1000):
        arrivals.came[7] += 3
        meter.took(7, 1)
    assert meter.overfull(0.25) == []
    arrivals.came[7] += LIMIT + IDLE_BYTES_S
    meter.overfull(0.5)
    assert meter.overfull(0.5) == [7]


def test_heartbeats_of_an_idle_connection_add_up_to_nothing(meter: Meter, arrivals: Arrivals) -> None:
    for second in range(50, 100_000, 50):
        arrivals.came[8] += 50 * 450
        assert meter.overfull(float(second)) == []


def test_a_descriptor_that_is_used_again_begins_anew(meter: Meter, arrivals: Arrivals) -> None:
    arrivals.came[7] = LIMIT - 1
    assert meter.overfull(0.0) == []
    meter.closed(7)
    meter.took(7, 100)
    assert len(meter) == 1
    meter.opened(7, 1.0)
    arrivals.came[7] += LIMIT
    assert meter.overfull(1.0) == []
    # What the system can not tell of is not judged.
    arrivals.came.clear()
    assert meter.overfull(2.0) == []
    meter.opened(9, 2.0)
    assert len(meter) == 2
    meter.took(None, 5)


def test_a_look_that_takes_long_comes_seldom(
    meter: Meter, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = LOOK_SHARE * 0.5
    assert rest > LOOK_S
    times = iter([100.0, 100.5, 99.9 + rest, 100.0 + rest, 100.0 + rest])
    monkeypatch.setattr("cascadia_p2p.transport.meter.time.monotonic", lambda: next(times))
    ended: list[int] = []

    def end(descriptor: int) -> bool:
        ended.append(descriptor)
        return descriptor == 7

    meter.enforce(end)
    arrivals.came = {7: 10 * LIMIT + 1000 * IDLE_BYTES_S, 8: 10 * LIMIT + 1000 * IDLE_BYTES_S}
    assert meter.overfull(100.0) == []
    meter.enforce(end)
    assert not ended
    meter.enforce(end)
    assert ended == [7, 8]
    assert meter.cut == 1, "the other one was gone"


def test_those_beyond_the_most_are_ended_and_who_was_there_before_stays(arrivals: Arrivals) -> None:
    made, ended = Meter(LIMIT, lambda _: None, most=2), list[int]()

    def end(descriptor: int) -> bool:
        ended.append(descriptor)
        made.closed(descriptor)
        return True

    for descriptor in (5, 3, 9, 7):
        made.opened(descriptor, 0.0)
    # The system gave the number of one that has ended to another.
    made.opened(5, 0.0)
    made.enforce(end)
    assert ended == [7, 5]
    assert made.surplus == 2
    assert made.cut == 0


def test_a_message_without_end_is_overfull_long_before_the_limit(arrivals: Arrivals) -> None:
    made = Meter(LIMIT, arrivals, whole=1000)
    made.opened(7, 0.0)
    made.opened(8, 0.0)
    for look in range(1, 8):
        # One whole message waits where the loop was held up, and is taken; of the other nothing ever is.
        arrivals.came[7] += 1200
        arrivals.came[8] += 1200
        found = made.overfull(look * 0.001)
        assert found == ([] if look < 2 else [8]), look
        made.took(7, 1200)
        made.emptied()


def test_who_waits_for_a_turn_has_sent_no_message_without_end(arrivals: Arrivals) -> None:
    made = Meter(LIMIT, arrivals, whole=1000)
    made.opened(7, 0.0)
    made.opened(8, 0.0)
    arrivals.came = {7: 5000, 8: 2000}
    for look in range(1, 6):
        # Each message of the other's keeps the taker for longer than from one look to the next.
        assert made.overfull(look * 0.001) == []
        if look % 2:
            made.took(7, 500)
    made.took(7, 500)
    made.took(7, 500)
    assert made.overfull(0.01) == [8], "its turn must have come"


def test_what_came_before_it_was_told_of_a_connection_counts_where_nobody_takes(arrivals: Arrivals) -> None:
    made = Meter(LIMIT, arrivals)
    arrivals.came = {7: 2 * LIMIT, 8: 2 * LIMIT}
    made.opened(7, 0.0)
    made.opened(8, 0.0, untouched=True)
    made.overfull(0.0)
    assert made.overfull(0.0) == [8]


def test_a_loop_that_was_held_up_ends_nobody(arrivals: Arrivals) -> None:
    made = Meter(LIMIT, arrivals, whole=1000)
    made.opened(7, 0.0)
    arrivals.came[7] += 5000
    assert made.overfull(0.001) == []
    made.took(7, 1000)
    arrivals.came[7] += 1500
    assert made.overfull(0.002) == []
    assert made.overfull(0.003) == []
    made.took(7, 5500)
    assert made.overfull(0.004) == []
