from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from node.thread_world import (
    DEADLINE_S,
    HEAD,
    HIDDEN,
    LIMITS,
    PROMISE,
    Mixer,
    Notes,
    Ring,
    reference,
    until,
)

from cascadia_p2p.errors import ErrorCode
from cascadia_p2p.node.conductor import HeadConductor
from cascadia_p2p.node.data_thread import DataThread
from cascadia_p2p.node.seat import Drop, Seat
from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.scheduler import Scheduler, StreamRequest, Update
from cascadia_p2p.transport.data import DataTransport
from cascadia_p2p.transport.faulty import Faults, FaultyTransport
from cascadia_p2p.transport.interfaces import FrameReceiver, FrameTransport
from cascadia_p2p.transport.memory import MemoryTransport
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint, Epoch, Instance, StreamId
from cascadia_p2p.wire.frames import (
    Frame,
    FrameFault,
    FrameKind,
    FrameLimits,
    Table,
    encode_header,
    segment_table,
)


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture(params=["memory", "zmq"])
def transport(request: pytest.FixtureRequest, network: Network) -> FrameTransport:
    return MemoryTransport() if request.param == "memory" else DataTransport(network)


PROMPTS = {1: [5], 2: list(range(40)), 3: [7, 7, 7], 4: list(range(100, 20, -1)), 5: [1, 2], 6: [9] * 33}


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_every_stream_gets_the_reference_tokens(transport: FrameTransport, stages: int) -> None:
    ring = Ring(stages, transport)
    ring.open()
    for stream, prompt in PROMPTS.items():
        ring.submit(stream, prompt, 10 + stream)
    for stream, prompt in PROMPTS.items():
        until(lambda stream=stream: ring.finished(stream), f"stream {stream}")
        assert ring.tokens(stream) == reference(stages, prompt, 10 + stream)
    counters = [thread.counters for thread in ring.threads]
    if stages > 1:
        # Each thread counts a frame as gone only after the next one may have it already.
        until(lambda: len({one.frames_in for one in counters} | {one.frames_out for one in counters}) == 1)
        assert counters[0].frames_in > 0
        assert all(one.rows == counters[0].rows for one in counters)
    assert all(one.progress > one.frames_in for one in counters)
    assert all(not any(one.dropped.values()) for one in counters)
    assert [one.probe_seen for one in counters] == [1] * stages
    ring.stop()


def test_a_new_epoch_starts_streams_anew_and_repeats_no_token(transport: FrameTransport) -> None:
    ring = Ring(3, transport)
    ring.open()
    for stream, prompt in PROMPTS.items():
        ring.submit(stream, prompt, 60)
    for _ in range(3):
        until(lambda: any(ring.updates.values()))
        ring.open()
    for stream, prompt in PROMPTS.items():
        until(lambda stream=stream: ring.finished(stream), f"stream {stream}")
        assert ring.tokens(stream) == reference(3, prompt, 60)
    ring.stop()


@pytest.mark.parametrize(
    ("faults", "seen"),
    [
        (Faults(drop=0.02), Drop.GAP),
        (Faults(duplicate=0.05), Drop.REPEATED),
        (Faults(reorder=0.02), Drop.GAP),
        (Faults(drop=0.005, duplicate=0.02, reorder=0.005, delay=0.02), None),
    ],
    ids=["drop", "duplicate", "reorder", "all"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_pri_08_lost_repeated_and_swapped_frames_never_give_a_wrong_token(
    faults: Faults, seen: Drop | None, seed: int
) -> None:
    plan = Faults(faults.drop, faults.duplicate, faults.reorder, faults.delay, seed=seed)
    transport = FaultyTransport(MemoryTransport(), plan)
    ring = Ring(3, transport)
    transport.active = False
    ring.open()
    transport.active = True
    for stream, prompt in PROMPTS.items():
        ring.submit(stream, prompt, 40)
    deadline = time.monotonic() + DEADLINE_S
    moved = (0, 0)
    since = time.monotonic()
    while not all(map(ring.finished, PROMPTS)):
        assert time.monotonic() < deadline
        progress = (ring.counter, sum(thread.counters.progress for thread in ring.threads))
        if progress != moved:
            moved, since = progress, time.monotonic()
        stuck = time.monotonic() - since > 0.2
        # A frame lost without another behind it shows only as silence.
        if stuck or any(notes.broken and notes.broken[-1][0] == ring.epoch for notes in ring.notes):
            transport.active = False
            ring.open()
            transport.active = True
        time.sleep(0.001)
    for stream, prompt in PROMPTS.items():
        assert ring.tokens(stream) == reference(3, prompt, 40)
    counts = transport.counts
    assert counts.dropped + counts.duplicated + counts.reordered + counts.delayed > 0
    assert seen is None or ring.dropped(seen) > 0
    ring.stop()


def test_a_gap_is_reported_once_with_both_numbers() -> None:
    transport = MemoryTransport()
    ring = Ring(2, transport)
    ring.form()
    sender = transport.connect(ring.endpoints[1])
    for number in (3, 4, 5):
        segments = segment_table(1)
        segments["rows"] = 1
        frame = Frame(FrameKind.ACTIVATIONS, ring.epoch, number, HIDDEN, segments)
        sender.send(encode_header(frame), np.zeros((1, HIDDEN), np.float32))
    until(lambda: ring.dropped(Drop.BROKEN) == 2)
    assert ring.dropped(Drop.GAP) == 1
    assert len(ring.notes[1].broken) == 1
    epoch, sentence = ring.notes[1].broken[0]
    assert epoch == ring.epoch
    assert "frame 3" in sentence
    assert "1 was due" in sentence
    ring.stop()


def one_row(epoch: Epoch, number: int = 1, hidden: int = HIDDEN, rows: int = 1) -> bytes:
    segments = segment_table(1)
    segments["rows"] = rows
    return encode_header(Frame(FrameKind.ACTIVATIONS, epoch, number, hidden, segments))


ROW = np.zeros((1, HIDDEN), np.float32)


@pytest.mark.parametrize(
    ("reason", "header", "payload"),
    [
        (Drop.EPOCH, one_row(Epoch(0, HEAD)), ROW),
        (Drop.EPOCH, one_row(Epoch(1, Instance("00000000000000bb"))), ROW),
        (Drop.EPOCH, one_row(Epoch(2, HEAD)), ROW),
        (Drop.REPEATED, one_row(Epoch(1, HEAD), number=0), ROW),
        (Drop.PAYLOAD, one_row(Epoch(1, HEAD)), None),
        (Drop.PAYLOAD, one_row(Epoch(1, HEAD)), np.zeros((2, HIDDEN), np.float32)),
        (Drop.PAYLOAD, one_row(Epoch(1, HEAD), rows=2), ROW),
        (Drop.PAYLOAD, encode_header(Frame(FrameKind.ACTIVATIONS, Epoch(1, HEAD), 1, HIDDEN)), ROW),
        (Drop.PLACE, encode_header(Frame(FrameKind.TOKENS, Epoch(1, HEAD), 1)), None),
        (FrameFault.HIDDEN, one_row(Epoch(1, HEAD), hidden=HIDDEN * 2), ROW),
        (FrameFault.LIMIT, one_row(Epoch(1, HEAD), rows=17), ROW),
        (FrameFault.FOREIGN, b"\xff" * 64, None),
        (FrameFault.LENGTH, b"hello", ROW),
        (FrameFault.VERSION, one_row(Epoch(1, HEAD)).replace(b"CP2P\x02", b"CP2P\x01"), ROW),
    ],
)
def test_what_does_not_belong_is_counted_and_the_ring_goes_on(
    transport: FrameTransport, reason: str, header: bytes, payload: np.ndarray | None
) -> None:
    ring = Ring(3, transport)
    ring.open()
    stranger = transport.connect(ring.endpoints[1])
    until(lambda: stranger.send(header, payload), "sending")
    until(lambda: ring.dropped(reason) == 1, reason)
    ring.submit(1, [1, 2, 3], 5)
    until(lambda: ring.finished(1))
    assert ring.tokens(1) == reference(3, [1, 2, 3], 5)
    assert sum(sum(thread.counters.dropped.values()) for thread in ring.threads) == 1
    stranger.close()
    ring.stop()


def test_junk_without_end_keeps_no_frame_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(2, MemoryTransport())
    ring.open()
    receive = ring.receivers[0].recv_header
    monkeypatch.setattr(
        ring.receivers[0], "recv_header", lambda _: receive(False) or bytearray(b"junk"), raising=True
    )
    ring.submit(1, [1, 2, 3], 5)
    until(lambda: ring.finished(1))
    assert ring.tokens(1) == reference(2, [1, 2, 3], 5)
    ring.stop()


def test_activations_sent_to_a_head_are_out_of_place() -> None:
    transport = MemoryTransport()
    ring = Ring(2, transport)
    ring.open()
    transport.connect(ring.endpoints[0]).send(one_row(ring.epoch), ROW)
    until(lambda: ring.dropped(Drop.PLACE) == 1)
    ring.stop()


@given(
    st.lists(
        st.tuples(
            st.binary(max_size=120) | st.sampled_from([one_row(Epoch(1, HEAD)), one_row(Epoch(1, HEAD), 2)]),
            st.none() | st.integers(0, 3),
        ),
        max_size=12,
    )
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_bytes_end_the_thread(messages: list[tuple[bytes, int | None]]) -> None:
    transport = MemoryTransport()
    ring = Ring(2, transport)
    ring.form()
    sender = transport.connect(ring.endpoints[1])
    for header, rows in messages:
        sender.send(header, None if rows is None else np.zeros((rows, HIDDEN), np.float32))
    done = threading.Event()
    ring.threads[1].call(done.set)
    assert done.wait(DEADLINE_S)
    ring.stop()


class FailingMixer(Mixer):
    """Fails in the middle of the ring for frames that carry stream 666."""

    def apply(
        self, segments: Table, operations: Table, inputs: np.ndarray, on_layer: Callable[[], None]
    ) -> np.ndarray:
        if self.number == 1 and 666 in segments["stream"]:
            raise RuntimeError("a made-up failure")
        return super().apply(segments, operations, inputs, on_layer)


def test_a_failing_stage_fails_those_streams_and_returns_every_credit() -> None:
    ring = Ring(3, MemoryTransport(), FailingMixer)
    ring.open()
    ring.submit(1, [1, 2], 5)
    until(lambda: ring.finished(1))
    ring.submit(666, list(range(30)), 5)
    until(lambda: ring.finished(666))
    error = ring.updates[666][-1].error
    assert error is not None
    assert error.code is ErrorCode.INTERNAL
    assert "stage 1" in error.message
    ring.submit(2, [3, 4], 8)
    until(lambda: ring.finished(2))
    assert ring.tokens(2) == reference(3, [3, 4], 8)
    assert ring.threads[1].counters.errors >= 1
    assert not any(notes.broken for notes in ring.notes)
    ring.stop()


class WrongShape(Mixer):
    def apply(self, *args: object) -> np.ndarray:
        return np.zeros((1, HIDDEN + 1), np.float32)


class NoHead(Mixer):
    def tokens(self, segments: Table, hidden: np.ndarray) -> tuple[Table, Table]:
        raise RuntimeError("a made-up failure")


@pytest.mark.parametrize("kind", [WrongShape, NoHead])
@pytest.mark.parametrize("stages", [1, 2])
def test_wrong_rows_and_a_failing_head_are_errors_of_the_stream(kind: type[Mixer], stages: int) -> None:
    ring = Ring(stages, MemoryTransport(), kind)
    ring.open()
    ring.submit(1, [1, 2], 5)
    until(lambda: ring.finished(1))
    error = ring.updates[1][-1].error
    assert error is not None
    assert error.code is ErrorCode.INTERNAL
    ring.stop()


class Gate:
    """Holds a stage before a layer until it is let through."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.through = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.through.wait(DEADLINE_S)


def gated_ring() -> tuple[Ring, Gate]:
    gate = Gate()
    ring = Ring(2, MemoryTransport())
    ring.stages[1].layers = 1000
    ring.open()
    ring.stages[1].before_layer = gate
    ring.submit(1, [1, 2, 3], 3)
    assert gate.reached.wait(DEADLINE_S)
    return ring, gate


def test_a_new_epoch_is_taken_between_layers() -> None:
    ring, gate = gated_ring()
    ticks = ring.threads[1].counters.progress
    ring.counter += 1
    for index, thread in enumerate(ring.threads):
        thread.form(ring.seat(index))
    ring.stages[1].before_layer = lambda: None
    gate.through.set()
    until(lambda: ring.epoch in ring.notes[1].switched_to)
    assert ring.dropped(Drop.ABANDONED) == 1
    assert ring.threads[1].counters.progress - ticks < 10
    ring.open()
    until(lambda: ring.finished(1))
    assert ring.tokens(1) == reference(2, [1, 2, 3], 3)
    ring.stop()


def test_the_connection_to_the_successor_is_followed_between_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, gate = gated_ring()
    looks: list[None] = []
    sender = ring.threads[1]._sender
    assert sender is not None
    monkeypatch.setattr(sender, "look", lambda: looks.append(None))
    gate.through.set()
    until(lambda: ring.finished(1))
    assert len(looks) > ring.stages[1].layers
    ring.stop()


def test_news_of_older_epochs_abandons_nothing() -> None:
    ring, gate = gated_ring()
    old = Seat(Epoch(0, HEAD), 1, 2, ring.stages[1], LIMITS, ring.endpoints[0])
    ring.threads[1].form(old)
    ring.threads[1].close(old.epoch)
    ring.stages[1].before_layer = lambda: None
    gate.through.set()
    until(lambda: ring.finished(1))
    assert ring.tokens(1) == reference(2, [1, 2, 3], 3)
    until(lambda: ring.notes[1].failed)
    assert "newer epoch" in ring.notes[1].failed[0]
    assert ring.dropped(Drop.ABANDONED) == 0
    ring.stop()


def test_closing_ends_the_frame_and_the_epoch() -> None:
    ring, gate = gated_ring()
    for thread in ring.threads:
        thread.close(ring.epoch)
    gate.through.set()
    until(lambda: all(thread.counters.epoch is None for thread in ring.threads))
    # A node that becomes a standby holds nothing of the streams that went on elsewhere.
    assert not any(stage.states for stage in ring.stages)
    ring.transport.connect(ring.endpoints[1]).send(one_row(ring.epoch), ROW)
    until(lambda: ring.dropped(Drop.NO_EPOCH) == 1)
    ring.stop()


def test_stk_06_a_send_that_blocks_is_visible_and_ends_with_its_epoch() -> None:
    transport = MemoryTransport()
    ring = Ring(2, transport)
    ring.open()
    absent = Endpoint("127.0.0.1", 1)
    ring.counter += 1
    seat = ring.seat(0)
    ring.threads[0].form(Seat(seat.epoch, 0, 2, seat.stage, LIMITS, absent, ring.conductor))
    ring.threads[0].call(lambda: ring.conductor.open(2, PROMISE))
    ring.threads[0].open(ring.epoch)
    ring.submit(1, [1, 2, 3], 4)
    until(lambda: ring.threads[0].counters.waiting_send)
    assert ring.threads[0].counters.frames_out == 0
    ring.open()
    assert not ring.threads[0].counters.waiting_send
    until(lambda: ring.finished(1))
    assert ring.tokens(1) == reference(2, [1, 2, 3], 4)
    ring.stop()


def test_a_blocked_send_does_not_hold_up_the_stop() -> None:
    ring = Ring(2, MemoryTransport())
    ring.open()
    ring.counter += 1
    seat = ring.seat(0)
    absent = Endpoint("127.0.0.1", 1)
    ring.threads[0].form(Seat(seat.epoch, 0, 2, seat.stage, LIMITS, absent, ring.conductor))
    ring.threads[0].call(lambda: ring.conductor.open(2, PROMISE))
    ring.threads[0].open(ring.epoch)
    ring.submit(1, [1], 4)
    until(lambda: ring.threads[0].counters.waiting_send)
    ring.stop()


class Unresettable(Mixer):
    def reset(self) -> None:
        raise RuntimeError("a made-up failure")


def test_an_epoch_that_can_not_be_entered_is_reported() -> None:
    ring = Ring(2, MemoryTransport(), Unresettable)
    ring.counter = 1
    ring.threads[1].form(ring.seat(1))
    until(lambda: ring.notes[1].failed)
    assert "made-up failure" in ring.notes[1].failed[0]
    assert ring.threads[1].counters.epoch is None
    ring.stop()


def test_a_call_that_fails_is_survived() -> None:
    ring = Ring(1, MemoryTransport())
    done = threading.Event()

    def fail() -> None:
        raise RuntimeError("a made-up failure")

    ring.threads[0].call(fail)
    ring.threads[0].call(done.set)
    assert done.wait(DEADLINE_S)
    ring.stop()


@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_to_run_after_runs_behind_the_next_frame(stages: int) -> None:
    ring = Ring(stages, MemoryTransport())
    seen: list[tuple[int, int]] = []
    deliver = ring._deliver

    def later(updates: Sequence[Update]) -> None:
        tokens = sum(len(update.tokens) for update in updates)
        rows = ring.threads[0].counters.rows
        ring.threads[0].after(lambda: seen.append((tokens, ring.threads[0].counters.rows - rows)))
        deliver(updates)

    ring.conductor = HeadConductor(Scheduler(Policy()), later)
    ring.open()
    ring.submit(1, [1], 6)
    until(lambda: len(seen) == 6)
    started = 0 if stages == 1 else 1
    assert [rows for _, rows in seen[:-1]] == [started] * 5
    assert [tokens for tokens, _ in seen] == [1] * 6
    ring.stop()


class BrokenReceiver:
    """A receiver whose socket fails."""

    endpoint = Endpoint("127.0.0.1", 9)
    more = False

    def recv_header(self, wait: bool) -> bytearray | None:
        raise OSError("a made-up failure")

    def recv_payload(self, out: np.ndarray) -> bool:
        return False

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_cas_02_the_thread_does_not_end_in_silence() -> None:
    notes = Notes()
    receiver: FrameReceiver = BrokenReceiver()
    thread = DataThread(receiver, MemoryTransport(), notes)
    thread.start()
    assert thread.join(10)
    assert len(notes.deaths) == 1
    assert "made-up failure" in notes.deaths[0]


class BadConductor:
    """Skips a frame number."""

    def __init__(self, scheduler: HeadConductor) -> None:
        self.inner = scheduler

    def schedule(self) -> object:
        plan = self.inner.schedule()
        if plan is None:
            return None
        return type(plan)(plan.number + 1, plan.segments, plan.operations, plan.tokens)

    def on_tokens(self, number: int, records: Table, alternatives: Table) -> None:
        self.inner.on_tokens(number, records, alternatives)


def test_a_scheduler_that_lost_its_order_breaks_the_epoch_and_not_the_thread() -> None:
    ring = Ring(2, MemoryTransport())
    good = ring.conductor
    ring.conductor = BadConductor(good)  # type: ignore[assignment]
    ring.form()
    ring.threads[0].call(lambda: good.open(2, PROMISE))
    ring.threads[0].open(ring.epoch)
    ring.updates[1] = []
    request = StreamRequest(StreamId(1), (1, 2), 3)
    ring.threads[0].call(lambda: good.submit(request, lambda *_: None))
    until(lambda: ring.notes[0].broken)
    ring.conductor = good
    ring.open()
    until(lambda: ring.finished(1))
    assert ring.tokens(1) == reference(2, [1, 2], 3)
    ring.stop()


class Relay(Mixer):
    """Gives back the very memory that it was given, which the next frame is received into."""

    def apply(self, *args: object) -> np.ndarray:
        assert isinstance(args[2], np.ndarray)
        return args[2]


def test_stk_01_rows_that_are_still_under_way_are_never_overwritten(network: Network) -> None:
    """Frames large enough for ZeroMQ to send from their own memory, taken only when all have left."""
    transport, width, rows, count = DataTransport(network), 6144, 64, 24
    limits = FrameLimits(hidden=width, rows=rows, segments=16, operations=64, records=16)
    behind = transport.bind("127.0.0.1", 0, max_part=limits.payload_bytes)
    receiver = transport.bind("127.0.0.1", 0, max_part=limits.payload_bytes)
    notes, epoch = Notes(), Epoch(1, HEAD)
    thread = DataThread(receiver, transport, notes)
    thread.start()
    thread.form(Seat(epoch, 1, 3, Relay(), limits, behind.endpoint, None))
    until(lambda: notes.switched_to)
    sender = transport.connect(receiver.endpoint)
    for number in range(1, count + 1):
        header = one_row(epoch, number, width, rows)
        until(lambda n=number, h=header: sender.send(h, np.full((rows, width), n, np.float32)), "sending")
    until(lambda: thread.counters.frames_out == count, "all frames leave")
    out = np.empty((rows, width), np.float32)
    for number in range(1, count + 1):
        until(lambda: behind.recv_header(True) is not None)
        assert behind.recv_payload(out)
        assert (out == number).all()
    thread.stop()
    assert thread.join(10)
    for socket in (sender, behind):
        socket.close()
