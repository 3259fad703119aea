"""The head's end of clients' connections."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
import time

import pytest
import zmq
from fixtures.zmtp import GREETING, ready
from transport.scenarios import DEADLINE_S, client, got, run, turns, until

from cascadia_p2p.transport import client_server, looping
from cascadia_p2p.transport.client_server import (
    ClientCall,
    ClientFault,
    ClientGone,
    ClientServer,
)
from cascadia_p2p.transport.looping import SKIPPED_PARTS, Delivery
from cascadia_p2p.transport.network import Network


def test_req_clients_are_served_on_every_address() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        endpoints = [server.bind("127.0.0.1", 0), server.bind("localhost", 0)]
        assert server.endpoints == endpoints
        for endpoint in endpoints:
            for options in ({}, {"REQ_CORRELATE": 1, "REQ_RELAXED": 1}):
                request = client(network, zmq.REQ, endpoint, **options)
                request.send(b"question")
                event = await server.receive()
                while isinstance(event, ClientGone):
                    event = await server.receive()
                assert isinstance(event, ClientCall)
                assert event.data == b"question"
                assert server.reply(event.route, b"answer") is Delivery.SENT
                assert await got(request) == [b"answer"]
                request.close()
        server.close()

    run(scenario)


def test_a_message_of_very_many_parts_leaves_the_loop_its_turns() -> None:
    """It is dropped bit by bit, and what came behind it on other connections is taken as it was sent."""

    async def scenario(network: Network) -> None:
        server, turns, slices = ClientServer(network), 0, 20
        endpoint = server.bind("127.0.0.1", 0)

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        flood, other = (client(network, zmq.DEALER, endpoint, SNDHWM=0) for _ in range(2))
        events = looping.watch(flood, zmq.EVENT_DISCONNECTED)
        for _ in range(slices * SKIPPED_PARTS):
            flood.send(b"", zmq.SNDMORE)
        flood.send(b"end")
        fault = await server.receive()
        assert isinstance(fault, ClientFault)
        other.send_multipart([b"", b"question"])
        counting, before = asyncio.create_task(count_turns()), turns
        call = await server.receive()
        if isinstance(call, ClientGone):
            assert call.connection == fault.route.connection
            call = await server.receive()
        assert isinstance(call, ClientCall)
        assert call.data == b"question"
        assert turns - before >= slices - 1
        counting.cancel()
        # Its connection has ended, and nothing is left of it that the next question could be taken for.
        await until(lambda: bool(events.poll(0)))
        flood.send_multipart([b"", b"sorry"])
        while isinstance(again := await server.receive(), ClientGone):
            assert again.connection == fault.route.connection
        assert isinstance(again, ClientCall)
        assert again.data == b"sorry"
        assert again.route.connection != fault.route.connection
        looping.unwatch(flood)
        events.close()
        server.close()

    run(scenario)


def test_the_whole_envelope_comes_back() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        dealer = client(network, zmq.DEALER, server.bind("127.0.0.1", 0))
        dealer.send_multipart([b"hop", b"tag", b"", b"question"])
        event = await server.receive()
        assert isinstance(event, ClientCall)
        assert server.reply(event.route, b"answer") is Delivery.SENT
        assert await got(dealer) == [b"hop", b"tag", b"", b"answer"]
        server.close()

    run(scenario)


@pytest.mark.parametrize(
    ("sent", "back"),
    [
        ([b"question"], [b"why"]),
        ([b"a", b"b"], [b"why"]),
        ([b"", b"one", b"two"], [b"", b"why"]),
        ([b"", b"", b"x"], [b"", b"why"]),
        ([b"a", b""], [b"a", b"", b"why"]),
        ([b"a"] * 9 + [b"", b"x"], [b"", b"why"]),
        ([b"a" * 600, b"", b"x"], [b"", b"why"]),
        ([b"a"] * 500, [b"why"]),
    ],
)
def test_other_shapes_are_refused_in_words(sent: list[bytes], back: list[bytes]) -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        dealer = client(network, zmq.DEALER, server.bind("127.0.0.1", 0))
        dealer.send_multipart(sent)
        event = await server.receive()
        assert isinstance(event, ClientFault)
        assert event.reason
        assert server.faults == 1
        assert server.reply(event.route, b"why") is Delivery.SENT
        assert await got(dealer) == back
        server.close()

    run(scenario)


def test_a_vanished_client_is_reported_once_with_its_own_connection() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        endpoint = server.bind("127.0.0.1", 0)
        stays = client(network, zmq.REQ, endpoint)
        leaves = client(network, zmq.REQ, endpoint)
        stays.send(b"stays")
        leaves.send(b"leaves")
        calls: dict[bytes, ClientCall] = {}
        for _ in range(2):
            event = await server.receive()
            assert isinstance(event, ClientCall)
            calls[event.data] = event
        assert server.connections == 2
        leaves.close()
        assert await server.receive() == ClientGone(calls[b"leaves"].route.connection)
        assert server.connections == 1
        await until(lambda: server.reply(calls[b"leaves"].route, b"x") is Delivery.GONE)
        assert server.reply(calls[b"stays"].route, b"x") is Delivery.SENT
        server.close()

    run(scenario)


def test_requests_of_clients_that_left_at_once_end_too() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        endpoint = server.bind("127.0.0.1", 0)
        for _ in range(30):
            hasty = client(network, zmq.REQ, endpoint)
            hasty.send(b"question")
            # Sent, and gone before anybody read it.
            hasty.close(linger=1000 * int(DEADLINE_S))
        await asyncio.sleep(0.3)
        calls: set[int] = set()
        gone: set[int] = set()
        while len(calls) < 30 or not calls <= gone:
            event = await server.receive()
            if isinstance(event, ClientCall):
                calls.add(event.route.connection)
            elif isinstance(event, ClientGone):
                gone.add(event.connection)
        assert len(calls) == 30
        server.close()

    run(scenario)


def test_garbage_on_the_client_port_is_survived() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        endpoint = server.bind("127.0.0.1", 0)
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 400, bytes(256)):
            with socket.create_connection((endpoint.host, endpoint.port)) as stray:
                stray.sendall(garbage)
                linger = struct.pack("ii", 1, 0)
                stray.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        request = client(network, zmq.REQ, endpoint)
        request.send(b"question")
        while not isinstance(event := await server.receive(), ClientCall):
            pass
        assert event.data == b"question"
        server.close()

    run(scenario)


def test_a_slow_client_is_told_from_a_dead_one() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        dealer = client(network, zmq.DEALER, server.bind("127.0.0.1", 0), RCVHWM=1, RCVBUF=4096)
        dealer.send_multipart([b"", b"question"])
        event = await server.receive()
        assert isinstance(event, ClientCall)
        chunk = bytes(60_000)
        for _ in range(3000):
            if (delivery := server.reply(event.route, chunk)) is not Delivery.SENT:
                break
        assert delivery is Delivery.FULL
        dealer.close()
        assert await server.receive() == ClientGone(event.route.connection)
        await until(lambda: server.reply(event.route, b"x") is Delivery.GONE)
        server.close(0)

    run(scenario)


@pytest.mark.parametrize(("kind", "one_reply"), [(zmq.REQ, True), (zmq.DEALER, False)])
def test_a_socket_that_takes_one_reply_is_told_apart(kind: int, one_reply: bool) -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        made = client(network, kind, server.bind("127.0.0.1", 0))
        made.send_multipart([b"question"] if one_reply else [b"", b"question"])
        event = await server.receive()
        assert isinstance(event, ClientCall)
        assert event.one_reply is one_reply
        server.close()

    run(scenario)


def test_one_client_too_many_is_told_so_and_none_is_served_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_server, "SURPLUS", 2)

    async def scenario(network: Network) -> None:
        server = ClientServer(network, limit=3)
        endpoint = server.bind("127.0.0.1", 0)
        served: list[bool] = []
        dealers = []
        for number in range(5):
            dealers.append(client(network, zmq.DEALER, endpoint))
            dealers[-1].send_multipart([b"", b"%d" % number])
            event = await server.receive()
            assert isinstance(event, ClientCall)
            assert event.data == b"%d" % number
            assert server.reply(event.route, b"seen") is Delivery.SENT
            served.append(event.surplus)
        assert served == [False, False, False, True, True]
        with Network() as elsewhere:
            late = client(elsewhere, zmq.DEALER, endpoint, IMMEDIATE=0)
            late.send_multipart([b"", b"late"])
            waiting = asyncio.create_task(server.receive())
            for _ in range(5):
                # It is cut off again and again, and never served.
                await asyncio.sleep(0.1)
                if waiting.done():
                    event = waiting.result()
                    assert isinstance(event, ClientGone) or event.surplus
                    waiting = asyncio.create_task(server.receive())
            assert (await got(dealers[0]))[-1] == b"seen"
            waiting.cancel()
            late.close()
        for dealer in dealers[1:4]:
            dealer.close()
        while server.connections > 2:
            await server.receive()
        fresh = client(network, zmq.DEALER, endpoint)
        fresh.send_multipart([b"", b"fresh"])
        event = await server.receive()
        while isinstance(event, ClientGone) or event.surplus:
            if isinstance(event, ClientCall) and event.data == b"fresh":
                # The one that was cut off was not gone yet.
                fresh.send_multipart([b"", b"fresh"])
            event = await server.receive()
        assert isinstance(event, ClientCall)
        assert event.data == b"fresh"
        assert server.reply(event.route, b"seen") is Delivery.SENT
        server.close()

    run(scenario)


def test_one_client_too_many_is_not_served_even_when_it_left_at_once() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network, limit=1)
        endpoint = server.bind("127.0.0.1", 0)
        client(network, zmq.DEALER, endpoint).send_multipart([b"", b"first"])
        assert (await server.receive()).surplus is False
        with Network() as elsewhere:
            late = client(elsewhere, zmq.DEALER, endpoint)
            late.send_multipart([b"", b"late"])
            late.close(linger=1000 * int(DEADLINE_S))
        await asyncio.sleep(0.2)
        event = await server.receive()
        while isinstance(event, ClientGone):
            event = await server.receive()
        assert isinstance(event, ClientCall)
        assert (event.data, event.surplus) == (b"late", True)
        server.close()

    run(scenario)


def test_one_client_too_many_is_served_as_soon_as_another_has_left() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network, limit=1)
        endpoint = server.bind("127.0.0.1", 0)
        first, second = (client(network, zmq.DEALER, endpoint) for _ in range(2))
        for number, dealer in enumerate((first, second)):
            dealer.send_multipart([b"", b"%d" % number])
            assert (await server.receive()).surplus is bool(number)
        first.close()
        assert isinstance(await server.receive(), ClientGone)
        second.send_multipart([b"", b"again"])
        event = await server.receive()
        assert isinstance(event, ClientCall)
        assert (event.data, event.surplus) == (b"again", False)
        third = client(network, zmq.DEALER, endpoint)
        third.send_multipart([b"", b"third"])
        assert (await server.receive()).surplus is True
        server.close()

    run(scenario)


@pytest.mark.parametrize("name", [b"forged", b"\xff\xfe"])
def test_in_the_clear_nobody_can_pose_as_the_owner_of_a_key(name: bytes) -> None:
    """The names of metadata are the peer's own, and so are their values."""

    def frame(body: bytes, flags: int = 0) -> bytes:
        return bytes([flags, len(body)]) + body

    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        endpoint = server.bind("127.0.0.1", 0)
        with socket.create_connection((endpoint.host, endpoint.port)) as made:
            made.sendall(GREETING)
            made.settimeout(DEADLINE_S)
            greeting = b""
            while len(greeting) < 64:
                greeting += made.recv(64 - len(greeting))
            made.sendall(ready(b"DEALER", User_Id=name))
            assert b"READY" in made.recv(1000)
            made.sendall(frame(b"", 1) + frame(b"question"))
            event = await server.receive()
            assert isinstance(event, ClientCall)
            assert (event.data, event.client) == (b"question", "")
        server.close()

    run(scenario)


def test_nobody_can_guess_the_name_that_a_client_gets() -> None:
    """ZeroMQ ends the process where a peer has taken the next one for its own."""
    program = (
        "import zmq\n"
        "from cascadia_p2p.transport.network import Network\n"
        "with Network() as network:\n"
        "    made = network.socket(zmq.ROUTER, linger_ms=0, max_part=100)\n"
        "    port = made.bind_to_random_port('tcp://127.0.0.1')\n"
        "    peer = network.socket(zmq.DEALER, linger_ms=0, max_part=100)\n"
        "    peer.setsockopt(zmq.IMMEDIATE, 0)\n"
        "    peer.connect(f'tcp://127.0.0.1:{port}')\n"
        "    peer.send(b'x')\n"
        "    print(made.recv_multipart()[0].hex())\n"
    )
    names = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=200).stdout
        for _ in range(2)
    }
    assert len(names) == 2


def test_a_connection_is_ended_by_its_number() -> None:
    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        endpoint = server.bind("127.0.0.1", 0)
        client(network, zmq.DEALER, endpoint).send_multipart([b"", b"x"])
        event = await server.receive()
        assert isinstance(event, ClientCall)
        server.hang_up(event.route.connection + 1)
        server.hang_up(event.route.connection)
        assert await server.receive() == ClientGone(event.route.connection)
        server.close()

    run(scenario)


def test_requests_without_end_leave_turns_to_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looping, "TURN_S", 0.0)

    async def scenario(network: Network) -> None:
        server = ClientServer(network)
        dealer = client(network, zmq.DEALER, server.bind("127.0.0.1", 0))
        for number in range(300):
            dealer.send_multipart([b"", b"%d" % number])
        # All of them are there before the first is taken.
        time.sleep(0.3)  # noqa: ASYNC251
        async with turns() as taken:
            for number in range(300):
                event = await server.receive()
                assert isinstance(event, ClientCall)
                assert event.data == b"%d" % number
            assert taken() >= 299
        server.close()

    run(scenario)
