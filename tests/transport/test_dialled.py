"""What a dialled peer sends without end is bounded too, though nobody reads it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from fixtures.zmtp import GREETING, ready

from cascadia_p2p.transport.control import ControlDialer, ControlServer, Dial
from cascadia_p2p.transport.data import DataSender, DataTransport
from cascadia_p2p.transport.dialled import WAITING_BYTES, Dialled
from cascadia_p2p.transport.looping import NoSocketError
from cascadia_p2p.transport.meter import bytes_came, hang_up
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint

DEADLINE_S = 30.0
EMPTY = bytes(2)


class Liar:
    """Takes connections as a socket of a kind would, and sends empty messages for as long as they last."""

    def __init__(self, kind: bytes) -> None:
        self._hello = GREETING + ready(kind)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                made, _ = self._listener.accept()
                with made, contextlib.suppress(OSError):
                    made.sendall(self._hello)
                    said = b""
                    while b"READY" not in said:
                        said += made.recv(4096)
                    while True:
                        made.sendall(EMPTY * 10_000)
                        time.sleep(0.01)
                self.ended.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(DEADLINE_S)


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what has arrived")
def test_a_receiver_that_sends_back_without_end_is_cut_off(network: Network) -> None:
    liar = Liar(b"PULL")
    sender = DataSender(network, liar.endpoint)
    deadline = time.monotonic() + DEADLINE_S
    while not liar.ended.wait(0.05):
        assert time.monotonic() < deadline
        sender.look()
        network.dialled.look()
    assert network.dialled.meter.cut
    sender.close()
    liar.close()
    assert not len(network.dialled.meter)


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what has arrived")
def test_a_node_that_sends_more_than_is_taken_is_cut_off(network: Network) -> None:
    liar = Liar(b"ROUTER")

    async def run() -> None:
        dialer = ControlDialer(network, liar.endpoint)
        async with asyncio.timeout(DEADLINE_S):
            # It is connected, and may have been told a message before that.
            await dialer.receive()
            while not liar.ended.is_set():
                network.dialled.look()
                await asyncio.sleep(0.05)
            # Whose messages are taken now, which lets nobody wait.
            while await dialer.receive() is not Dial.DISCONNECTED:
                pass
        dialer.close(0)

    asyncio.run(run())
    assert network.dialled.meter.cut
    assert not len(network.dialled.meter)
    liar.close()


def test_who_is_read_may_say_any_amount(network: Network) -> None:
    async def run() -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        dialer = ControlDialer(network, server.endpoint)
        async with asyncio.timeout(DEADLINE_S):
            assert await dialer.receive() is Dial.CONNECTED
            dialer.send(b"hello")
            call = await server.receive()
            part = bytes(100_000)
            for _ in range(8 * WAITING_BYTES // len(part)):
                server.reply(call.identity, part)
                assert await dialer.receive() == part
                network.dialled.look()
        dialer.close(0)
        server.close(0)

    asyncio.run(run())
    assert not network.dialled.meter.cut
    assert not len(network.dialled.meter)


def test_connections_are_followed_as_long_as_they_last(network: Network) -> None:
    receiver = DataTransport(network).bind("127.0.0.1", 0, max_part=1 << 16)
    sender = DataSender(network, receiver.endpoint)
    meter, deadline = network.dialled.meter, time.monotonic() + DEADLINE_S

    def until(count: int) -> None:
        while len(meter) != count:
            assert time.monotonic() < deadline
            sender.look()
            time.sleep(0.01)

    assert sender.send(b"one", None) or sender.wait(5000) is None
    until(1)
    receiver.close()
    until(0)
    sender.close()


def test_what_a_socket_tells_late_is_not_taken_for_another_that_has_its_descriptor_now(
    network: Network,
) -> None:
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        made = held.enter_context(socket.create_connection(listener.getsockname()))
        here, before = Endpoint(*listener.getsockname()), Endpoint("127.0.0.2", listener.getsockname()[1])
        dialled, descriptor = network.dialled, made.fileno()
        # Of another node, whose port has the same number.
        dialled.opened(descriptor, before)
        assert not watched(dialled)
        dialled.opened(descriptor, here)
        dialled.opened(descriptor, before)
        dialled.closed(descriptor, before)
        assert watched(dialled) == [descriptor]
        dialled.closed(descriptor, here)
        dialled.closed(None, here)
        assert not watched(dialled)
        # Neither is it of a pipe.
        one, other = socket.socketpair()
        held.enter_context(one)
        held.enter_context(other)
        dialled.opened(one.fileno(), here)
        assert not watched(dialled)
        assert not hang_up(one.fileno(), lambda at: at[1] == here.port, socket.socket.getpeername)


def watched(dialled: Dialled) -> list[int]:
    return list(dialled._ends)


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what has arrived")
def test_what_the_system_still_holds_has_not_come_yet() -> None:
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        sender = held.enter_context(socket.create_connection(listener.getsockname()))
        made = held.enter_context(listener.accept()[0])
        sender.sendall(bytes(10_000))
        assert len(made.recv(4000, socket.MSG_WAITALL)) == 4000
        assert bytes_came(made.fileno()) == 4000
        assert len(made.recv(6000, socket.MSG_WAITALL)) == 6000
        assert bytes_came(made.fileno()) == 10_000


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what has arrived")
def test_a_sender_that_has_nothing_to_send_lets_go_of_what_came_over_connections_that_ended(
    network: Network,
) -> None:
    """A socket that is not used keeps it: a connection after the other filled the memory."""
    liar = Liar(b"PULL")
    sender = DataSender(network, liar.endpoint)
    used = sender._push = Asked(sender._push)  # type: ignore[assignment]
    deadline = time.monotonic() + DEADLINE_S
    while network.dialled.meter.cut < 2:
        assert time.monotonic() < deadline
        sender.look()
        network.dialled.look()
        time.sleep(0.05)
    assert used.asked >= 2
    sender.close()
    liar.close()


class Asked:
    """A socket, and how often it was asked for what is ready: then it follows its connections."""

    def __init__(self, inner: zmq.Socket[bytes]) -> None:
        self._inner = inner
        self.asked = 0

    def getsockopt(self, option: int) -> object:
        self.asked += option == zmq.EVENTS
        return self._inner.getsockopt(option)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@pytest.mark.parametrize("step", ["watch", "connect"])
def test_a_sender_that_can_not_be_made_says_why_and_leaves_nothing(
    network: Network, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise NoSocketError("no socket can be made")

    monkeypatch.setattr(f"cascadia_p2p.transport.data.{step}", fail)
    with pytest.raises(NoSocketError, match="no socket can be made"):
        DataSender(network, Endpoint("127.0.0.1", 9))
    assert [each for each in network._sockets if not each.closed] == []
