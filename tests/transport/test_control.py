from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import zmq
from transport.scenarios import DEADLINE_S, run, turns, until

from cascadia_p2p.errors import PortError, UnreachableError
from cascadia_p2p.local import free_ports
from cascadia_p2p.node.query import ask_node
from cascadia_p2p.transport import looping
from cascadia_p2p.transport.control import ControlDialer, ControlServer, Dial, knock
from cascadia_p2p.transport.looping import Delivery, LoopSocket, Signal, SocketClosedError
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint

T = TypeVar("T")


async def until_received(receive: Callable[[], Awaitable[T]], wanted: T) -> None:
    while await receive() != wanted:
        pass


def test_a_message_that_went_with_its_connection_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket has said that there is one; a receive finds that there is not."""

    async def scenario(network: Network) -> None:
        made = LoopSocket(network.socket(zmq.DEALER, linger_ms=0, max_part=1 << 10), Signal())
        monkeypatch.setattr(LoopSocket, "_ready", lambda _: int(zmq.POLLIN))
        assert made.take() is None
        made.close(0)

    run(scenario)


def test_messages_go_both_ways() -> None:
    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        dialer = ControlDialer(network, server.endpoint)
        await until_received(dialer.receive, Dial.CONNECTED)
        for number in range(100):
            assert dialer.send(b"%d" % number) is Delivery.SENT
        for number in range(100):
            call = await server.receive()
            assert call.data == b"%d" % number
            assert server.reply(call.identity, call.data) is Delivery.SENT
        for number in range(100):
            assert await dialer.receive() == b"%d" % number
        dialer.close()
        await until(lambda: server.reply(call.identity, b"x") is Delivery.GONE)
        server.close()

    run(scenario)


def test_what_was_sent_to_a_port_is_read_after_its_sender_has_ended() -> None:
    """A head's journal goes this way: the other way, what nobody has looked at ends with the connection."""

    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        dialer = ControlDialer(network, server.endpoint)
        await until_received(dialer.receive, Dial.CONNECTED)
        for number in range(20):
            assert dialer.send(b"%d" % number) is Delivery.SENT
        dialer.close()
        await asyncio.sleep(0.2)
        for number in range(20):
            assert (await server.receive()).data == b"%d" % number
        server.close()

    run(scenario)


def test_a_closed_port_is_reported_as_refused_and_dialled_on() -> None:
    async def scenario(network: Network) -> None:
        port = free_ports()
        dialer = ControlDialer(network, Endpoint("127.0.0.1", port))
        assert dialer.send(b"too early") is Delivery.FULL
        assert await dialer.receive() is Dial.REFUSED
        assert not dialer.connected
        server = ControlServer(network, "127.0.0.1", port)
        await until_received(dialer.receive, Dial.CONNECTED)
        assert dialer.connected
        server.close(0)
        assert await dialer.receive() is Dial.DISCONNECTED
        await until_received(dialer.receive, Dial.REFUSED)
        dialer.close()

    run(scenario)


def test_a_stranger_on_the_port_is_reported() -> None:
    async def scenario(network: Network) -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-OpenSSH_9.6\r\n" * 4)
            writer.close()

        stranger = await asyncio.start_server(talk, "127.0.0.1", 0)
        port = stranger.sockets[0].getsockname()[1]
        dialer = ControlDialer(network, Endpoint("127.0.0.1", port))
        assert await dialer.receive() is Dial.HANDSHAKE_FAILED
        dialer.close()
        stranger.close()
        await stranger.wait_closed()

    run(scenario)


def test_knocking_tells_silence_from_refusal() -> None:
    async def scenario(network: Network) -> None:
        assert await knock(Endpoint("127.0.0.1", free_ports())) is Dial.REFUSED
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            place = full.getsockname()
            fillers = [socket.socket() for _ in range(4)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(place)
            assert await knock(Endpoint(*place), 0.2) is Dial.UNANSWERED
            for filler in fillers:
                filler.close()

    run(scenario)


def test_a_cancelled_receive_loses_no_message() -> None:
    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        dialer = ControlDialer(network, server.endpoint)
        await until_received(dialer.receive, Dial.CONNECTED)
        received: list[bytes] = []

        async def take() -> None:
            received.append((await server.receive()).data)

        for number in range(200):
            task = asyncio.create_task(take())
            await asyncio.sleep(0)
            dialer.send(b"%d" % number)
            await asyncio.sleep(0.0005 * (number % 3))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        while len(received) < 200:
            await take()
        assert received == [b"%d" % number for number in range(200)]
        dialer.close()
        server.close()

    run(scenario)


def test_messages_without_end_leave_turns_to_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looping, "TURN_S", 0.0)

    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        dialer = ControlDialer(network, server.endpoint)
        await until_received(dialer.receive, Dial.CONNECTED)
        for number in range(300):
            assert dialer.send(b"%d" % number) is Delivery.SENT
        # All of them are there before the first is taken.
        time.sleep(0.3)  # noqa: ASYNC251
        async with turns() as taken:
            for number in range(300):
                call = await server.receive()
                assert call.data == b"%d" % number
                assert server.reply(call.identity, call.data) is Delivery.SENT
            assert taken() >= 299
            time.sleep(0.3)  # noqa: ASYNC251
            for number in range(300):
                assert await dialer.receive() == b"%d" % number
            assert taken() >= 598
        dialer.close()
        server.close()

    run(scenario)


def test_a_dialer_reads_nothing_behind_a_part_that_has_more() -> None:
    """ZeroMQ ends the process of a dialer whose connection ends inside a message that it reads."""

    async def scenario(network: Network) -> None:
        stranger = network.socket(zmq.ROUTER, linger_ms=0, max_part=1 << 16)
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        dialer = ControlDialer(network, Endpoint("127.0.0.1", port))
        await until_received(dialer.receive, Dial.CONNECTED)
        dialer.send(b"hello")
        assert await asyncio.to_thread(stranger.poll, 1000 * int(DEADLINE_S))
        identity, _ = stranger.recv_multipart()
        stranger.send_multipart([identity, b"one"])
        assert await dialer.receive() == b"one"
        stranger.send_multipart([identity, *[b"x"] * 3])
        assert await dialer.receive() is Dial.MALFORMED
        with pytest.raises(SocketClosedError):
            await dialer.receive()
        dialer.close()
        asking = asyncio.create_task(ask_node(dialer.endpoint, DEADLINE_S))
        assert await asyncio.to_thread(stranger.poll, 1000 * int(DEADLINE_S))
        identity, _ = stranger.recv_multipart()
        stranger.send_multipart([identity, b"x", b"y"])
        with pytest.raises(UnreachableError, match="is no node of ours"):
            await asking
        stranger.close()

    run(scenario)


def test_garbage_on_the_port_is_counted_and_survived() -> None:
    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0, client_answer=b"not here")
        place = (server.endpoint.host, server.endpoint.port)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 200, b"\xff" * 9 + b"\x7f" * 90):
            with socket.create_connection(place) as stray:
                stray.sendall(garbage)
        crowd = network.socket(zmq.DEALER, linger_ms=0, max_part=1 << 16)
        crowd.setsockopt(zmq.IMMEDIATE, 0)
        crowd.connect(server.endpoint.tcp)
        crowd.send_multipart([b"x"] * 200)
        request = network.socket(zmq.REQ, linger_ms=0, max_part=1 << 16)
        request.setsockopt(zmq.IMMEDIATE, 0)
        request.connect(server.endpoint.tcp)
        request.send(b'{"prompt": "hi"}')
        dialer = ControlDialer(network, server.endpoint)
        await until_received(dialer.receive, Dial.CONNECTED)
        call = asyncio.create_task(server.receive())
        await until(lambda: server.malformed == 1)
        await until(lambda: bool(request.poll(0)))
        assert request.recv() == b"not here"
        dialer.send(b"still here")
        assert (await call).data == b"still here"
        dialer.close()
        server.close()

    run(scenario)


def test_closing_ends_a_waiting_receive() -> None:
    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        dialer = ControlDialer(network, server.endpoint)
        await until_received(dialer.receive, Dial.CONNECTED)
        waits = [asyncio.create_task(server.receive()), asyncio.create_task(dialer.receive())]
        await asyncio.sleep(0)
        server.close()
        dialer.close()
        for wait in waits:
            with pytest.raises(SocketClosedError):
                await wait
        assert dialer.send(b"x") is Delivery.GONE
        server.close()

    run(scenario)


def test_a_taken_control_port_is_named() -> None:
    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        with pytest.raises(PortError, match=str(server.endpoint.port)):
            ControlServer(network, "127.0.0.1", server.endpoint.port)
        server.close()

    run(scenario)


def test_a_dialer_that_is_closed_while_it_knocks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though somebody listens by then: it went on with sockets that were closed."""

    async def scenario(network: Network) -> None:
        inside, go = asyncio.Event(), asyncio.Event()

        async def slow(_: Endpoint) -> None:
            inside.set()
            await go.wait()

        monkeypatch.setattr("cascadia_p2p.transport.control.knock", slow)
        dialer = ControlDialer(network, Endpoint("127.0.0.1", free_ports()))
        receiving = asyncio.create_task(dialer.receive())
        await inside.wait()
        dialer.close(0)
        go.set()
        with pytest.raises(SocketClosedError):
            await receiving

    run(scenario)
