from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from cascadia_p2p.errors import PortError
from cascadia_p2p.local import free_ports
from cascadia_p2p.transport.data import (
    COPY_THRESHOLD,
    SKIPPED_PARTS,
    DataReceiver,
    DataSender,
    DataTransport,
)
from cascadia_p2p.transport.interfaces import FrameReceiver, FrameSender, FrameTransport
from cascadia_p2p.transport.looping import unwatch, watch
from cascadia_p2p.transport.memory import MemoryTransport
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint

HIDDEN = 6144
MAX_PART = 64 * HIDDEN * 4
DEADLINE_S = 60.0


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture(params=["zmq", "memory"])
def transport(request: pytest.FixtureRequest, network: Network) -> FrameTransport:
    return DataTransport(network) if request.param == "zmq" else MemoryTransport()


def send(sender: FrameSender, header: bytes, payload: np.ndarray | None = None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not sender.send(header, payload):
        assert time.monotonic() < deadline, "the sender never took the message"
        sender.wait(50)


def receive(receiver: FrameReceiver) -> bytearray:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        header = receiver.recv_header(True)
        if header is not None:
            return header
    raise AssertionError("nothing arrived")


def rows(count: int, hidden: int = HIDDEN) -> np.ndarray:
    return np.empty((count, hidden), np.float32)


def test_messages_arrive_whole_and_in_order(transport: FrameTransport) -> None:
    receiver = transport.bind("127.0.0.1", 0, max_part=MAX_PART)
    sender = transport.connect(receiver.endpoint)
    sent = np.arange(2 * 8, dtype=np.float32).reshape(2, 8)
    send(sender, b"one", sent)
    send(sender, b"two")
    send(sender, b"three", sent + 1)

    out = rows(2, 8)
    assert receive(receiver) == b"one"
    assert receiver.more
    assert receiver.recv_payload(out)
    assert np.array_equal(out, sent)
    assert receive(receiver) == b"two"
    assert not receiver.more
    assert receive(receiver) == b"three"
    assert receiver.recv_payload(out)
    assert np.array_equal(out, sent + 1)
    sender.close()
    receiver.close()


@pytest.mark.parametrize("have", [1, 3])
def test_a_payload_of_another_size_is_noticed(transport: FrameTransport, have: int) -> None:
    receiver = transport.bind("127.0.0.1", 0, max_part=MAX_PART)
    sender = transport.connect(receiver.endpoint)
    send(sender, b"odd", np.zeros((have, 8), np.float32))
    send(sender, b"next")
    assert receive(receiver) == b"odd"
    assert not receiver.recv_payload(rows(2, 8))
    assert receive(receiver) == b"next"
    sender.close()
    receiver.close()


def test_an_unread_payload_is_dropped(transport: FrameTransport) -> None:
    receiver = transport.bind("127.0.0.1", 0, max_part=MAX_PART)
    sender = transport.connect(receiver.endpoint)
    send(sender, b"skipped", np.zeros((2, 8), np.float32))
    send(sender, b"next")
    assert receive(receiver) == b"skipped"
    assert receive(receiver) == b"next"
    sender.close()
    receiver.close()


def test_a_frame_of_which_the_payload_is_not_taken_is_not_taken(network: Network) -> None:
    class Cut:
        """Takes a header, and nothing behind it."""

        def __init__(self) -> None:
            self.sent: list[object] = []

        def send(self, data: object, flags: int, **_: Any) -> None:
            if not flags & zmq.SNDMORE:
                raise zmq.Again
            self.sent.append(data)

    sender = DataSender(network, Endpoint("127.0.0.1", 9))
    push, cut = sender._push, Cut()
    sender._push = cut  # type: ignore[assignment]
    assert not sender.send(b"header", rows(1, 8))
    assert cut.sent == [b"header"]
    sender._push = push
    sender.close()


def test_behind_a_frame_that_lost_its_connection_between_its_parts_frames_are_whole(network: Network) -> None:
    # Of the ports that nothing else takes while nobody is bound there.
    receiver = DataTransport(network).bind("127.0.0.1", free_ports(), max_part=MAX_PART)
    endpoint = receiver.endpoint
    sender = DataSender(network, endpoint)
    send(sender, b"first", rows(1, 8))
    assert receive(receiver) == b"first"

    class Cut:
        """Passes everything on; behind a header the receiver is gone."""

        def __init__(self, push: zmq.Socket[bytes]) -> None:
            self.push = push

        def send(self, *args: Any, **more: Any) -> None:
            self.push.send(*args, **more)
            receiver.close()
            assert events.poll(int(1000 * DEADLINE_S))
            time.sleep(1.0)

    push = sender._push
    events = watch(push, zmq.EVENT_DISCONNECTED)
    sender._push = Cut(push)  # type: ignore[assignment]
    # ZeroMQ either drops the rest of it or says that it takes no more; neither may raise.
    sender.send(b"second", rows(1, 8))
    sender._push = push
    again = DataReceiver(network, endpoint.host, endpoint.port, max_part=MAX_PART)
    send(sender, b"third", rows(1, 8))
    assert receive(again) == b"third"
    assert again.more
    unwatch(push)
    events.close()
    sender.close()
    again.close()


def test_a_message_of_very_many_parts_leaves_the_data_thread_its_turns(network: Network) -> None:
    receiver = DataReceiver(network, "127.0.0.1", 0, max_part=MAX_PART)
    flood = network.socket(zmq.PUSH, linger_ms=0, max_part=1 << 10)
    flood.setsockopt(zmq.SNDHWM, 0)
    events = watch(flood, zmq.EVENT_DISCONNECTED)
    flood.connect(receiver.endpoint.tcp)
    slices = 20
    flood.send(b"flood", zmq.SNDMORE)
    for _ in range(slices * SKIPPED_PARTS):
        flood.send(b"", zmq.SNDMORE)
    flood.send(b"")
    assert receive(receiver) == b"flood"
    sender = DataSender(network, receiver.endpoint)
    send(sender, b"frame", rows(1, 8))
    turns, header = 0, None
    deadline = time.monotonic() + DEADLINE_S
    while header is None and time.monotonic() < deadline:
        header, turns = receiver.recv_header(False), turns + 1
    assert header == b"frame"
    assert turns >= slices
    assert events.poll(int(1000 * DEADLINE_S)), "its connection has ended"
    unwatch(flood)
    events.close()
    for made in (flood, sender, receiver):
        made.close()


def test_a_transposed_payload_is_refused(transport: FrameTransport) -> None:
    receiver = transport.bind("127.0.0.1", 0, max_part=MAX_PART)
    sender = transport.connect(receiver.endpoint)
    with pytest.raises(ValueError, match="contiguous"):
        sender.send(b"h", np.zeros((4, 8), np.float32).T)
    sender.close()
    receiver.close()


def test_wakes_from_other_threads_interrupt_the_wait(transport: FrameTransport) -> None:
    receiver = transport.bind("127.0.0.1", 0, max_part=MAX_PART)
    waits: list[float] = []

    def wait() -> None:
        for _ in range(50):
            started = time.monotonic()
            assert receiver.recv_header(True) is None
            waits.append(time.monotonic() - started)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while waiter.is_alive():
        receiver.wake()
        time.sleep(0.001)
    waiter.join()
    assert sorted(waits)[25] < 0.1
    receiver.close()
    receiver.wake()


def test_nothing_there_returns_at_once_without_waiting(transport: FrameTransport) -> None:
    receiver = transport.bind("127.0.0.1", 0, max_part=MAX_PART)
    waits: list[float] = []
    for _ in range(20):
        started = time.monotonic()
        assert receiver.recv_header(False) is None
        waits.append(time.monotonic() - started)
    # Each of them would wait for a quarter of a second.
    assert sorted(waits)[10] < 0.1
    receiver.close()


def test_stk_10_sending_to_nobody_would_block(transport: FrameTransport) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        sender = transport.connect(Endpoint("127.0.0.1", unused.getsockname()[1]))
        waits: list[float] = []
        for _ in range(5):
            started = time.monotonic()
            assert not sender.send(b"h", np.zeros((1, 8), np.float32))
            sender.wait(10)
            waits.append(time.monotonic() - started)
        assert min(waits) < 0.2, "less than a send waits that blocks"
        sender.close()


def test_stk_01_source_memory_may_be_overwritten_below_and_never_is_above_the_threshold(
    network: Network,
) -> None:
    """1 to 64 rows: copied ones are overwritten at once, the others are fresh arrays that nobody keeps."""
    receiver = DataReceiver(network, "127.0.0.1", 0, max_part=MAX_PART)
    sender = DataSender(network, receiver.endpoint)
    noise = np.random.default_rng(1)
    source = noise.standard_normal((64, HIDDEN), np.float32)
    sums: list[int] = []
    received: list[int] = []

    def take() -> None:
        out = rows(64)
        for _ in range(64):
            count = int.from_bytes(receive(receiver), "little")
            view = out[:count]
            assert receiver.recv_payload(view)
            received.append(zlib.crc32(view))

    taker = threading.Thread(target=take)
    taker.start()
    for count in range(1, 65):
        payload = source[:count]
        zero_copy = payload.nbytes >= COPY_THRESHOLD
        if zero_copy:
            payload = payload.copy()
        sums.append(zlib.crc32(payload))
        send(sender, count.to_bytes(2, "little"), payload)
        source *= np.float32(-1.01)
        if zero_copy:
            del payload
            np.full((count, HIDDEN), np.nan, np.float32)
    taker.join()
    assert received == sums
    sender.close()
    receiver.close()


def test_stk_08_sixty_thousand_messages_in_a_tight_loop_all_arrive_in_order(network: Network) -> None:
    receiver = DataReceiver(network, "127.0.0.1", 0, max_part=MAX_PART)
    sender = DataSender(network, receiver.endpoint)
    count = 60_000
    wrong: list[int] = []

    def take() -> None:
        for number in range(count):
            if int.from_bytes(receive(receiver), "little") != number:
                wrong.append(number)

    taker = threading.Thread(target=take)
    taker.start()
    for number in range(count):
        send(sender, number.to_bytes(4, "little"))
    taker.join()
    assert wrong == []
    sender.close()
    receiver.close()


def test_stk_02_small_payloads_are_copied_and_large_ones_are_not(network: Network) -> None:
    """The threshold means what the sender relies on, in this version of pyzmq."""
    assert zmq.COPY_THRESHOLD < COPY_THRESHOLD
    receiver = DataReceiver(network, "127.0.0.1", 0, max_part=MAX_PART)
    sender = DataSender(network, receiver.endpoint)
    out = rows(1)
    small = np.ones((1, HIDDEN), np.float32)
    send(sender, b"h", small)
    small[:] = 2
    receive(receiver)
    assert receiver.recv_payload(out)
    assert float(out.max()) == 1.0
    sender.close()
    receiver.close()


def test_stk_03_received_rows_can_be_written(transport: FrameTransport) -> None:
    receiver = transport.bind("127.0.0.1", 0, max_part=MAX_PART)
    sender = transport.connect(receiver.endpoint)
    send(sender, b"h", np.ones((1, 8), np.float32))
    out = rows(1, 8)
    assert receive(receiver) == b"h"
    assert receiver.recv_payload(out)
    out += 1
    assert float(out.min()) == 2.0
    sender.close()
    receiver.close()


def test_a_part_beyond_the_bound_ends_only_that_connection(network: Network) -> None:
    receiver = DataReceiver(network, "127.0.0.1", 0, max_part=1 << 20)
    hostile = DataSender(network, receiver.endpoint)
    send(hostile, b"x", np.zeros((2, 1 << 18), np.float32))
    honest = DataSender(network, receiver.endpoint)
    send(honest, b"honest")
    assert receive(receiver) == b"honest"
    hostile.close()
    honest.close()
    receiver.close()


def test_cas_24_a_port_scan_does_no_harm(network: Network) -> None:
    receiver = DataReceiver(network, "127.0.0.1", 0, max_part=MAX_PART)
    address = (receiver.endpoint.host, receiver.endpoint.port)
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 300, bytes(range(256)) * 8):
        with socket.create_connection(address, timeout=5) as stray:
            stray.sendall(garbage)
    sender = DataSender(network, receiver.endpoint)
    send(sender, b"served")
    assert receive(receiver) == b"served"
    sender.close()
    receiver.close()


def test_a_foreign_empty_message_is_only_a_wake(network: Network) -> None:
    receiver = DataReceiver(network, "127.0.0.1", 0, max_part=MAX_PART)
    sender = DataSender(network, receiver.endpoint)
    send(sender, b"", np.zeros((1, 8), np.float32))
    send(sender, b"real")
    assert receive(receiver) == b"real"
    receiver.wake()
    assert receiver.recv_header(True) is None
    sender.close()
    receiver.close()


def test_a_port_in_use_is_named_with_its_owner_and_the_flag(network: Network) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortError) as caught:
            DataReceiver(network, "127.0.0.1", port, max_part=MAX_PART, flag="--port")
    message = str(caught.value)
    assert str(port) in message
    assert "in use" in message
    assert f"(process {os.getpid()})" in message
    assert "--port" in message


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid", "a" * 300])
def test_an_address_of_another_machine_is_named(network: Network, host: str) -> None:
    with pytest.raises(PortError, match="--bind"):
        DataReceiver(network, host, 0, max_part=MAX_PART)


def test_names_and_ipv6_can_be_bound(network: Network) -> None:
    receiver = DataReceiver(network, "localhost", 0, max_part=MAX_PART)
    sender = DataSender(network, receiver.endpoint)
    send(sender, b"h")
    assert receive(receiver) == b"h"
    sender.close()
    receiver.close()


def test_the_memory_twin_refuses_a_taken_address_and_a_full_queue() -> None:
    transport = MemoryTransport(capacity=2)
    receiver = transport.bind("h", 5, max_part=MAX_PART)
    with pytest.raises(PortError, match="5"):
        transport.bind("h", 5, max_part=MAX_PART)
    sender = transport.connect(receiver.endpoint)
    assert sender.send(b"1", None)
    assert sender.send(b"2", None)
    assert not sender.send(b"3", None)
    sender.close()
    assert not sender.send(b"4", None)


def test_stk_06_a_successor_that_takes_nothing_and_then_goes_holds_nobody(network: Network) -> None:
    receiver = DataReceiver(network, "127.0.0.1", 0, max_part=MAX_PART)
    sender = DataSender(network, receiver.endpoint)
    send(sender, b"h")
    payload = np.zeros((16, HIDDEN), np.float32)
    full = sum(sender.send(b"h", payload) for _ in range(3000))
    assert full < 3000, "the queue has an end"
    receiver.close()
    started = time.monotonic()
    for _ in range(3):
        sender.send(b"h", payload)
        sender.wait(20)
    sender.close()
    assert time.monotonic() - started < DEADLINE_S
