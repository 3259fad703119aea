"""Connections to peers: what their ends tell of the nodes behind them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import structlog
import zmq

from cascadia_p2p.node.control import GREET_AGAIN_S, MAX_UNREAD, ControlPlane
from cascadia_p2p.node.door import Door
from cascadia_p2p.ring.events import ConnectionLost, ConnectionRefused, Event, Heard
from cascadia_p2p.transport.client_server import ClientFault, ClientServer
from cascadia_p2p.transport.control import ControlDialer, ControlServer, Dial
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint, Instance, NodeId
from cascadia_p2p.wire.messages import StatusQuery, encode

NODE = NodeId("ab" * 8)
OLD, NEW = Instance("01" * 8), Instance("02" * 8)
DEADLINE_S = 10.0


def run(scenario: Callable[[Network], Coroutine[Any, Any, None]], limit_s: float = DEADLINE_S) -> None:
    async def bounded() -> None:
        with Network() as network:
            async with asyncio.timeout(limit_s):
                await scenario(network)

    asyncio.run(bounded())


@pytest.mark.parametrize("there", [False, True], ids=["has_ended", "listens"])
def test_a_later_instance_that_was_not_dialled_yet_is_lost_when_its_port_refuses(there: bool) -> None:
    """It has dialled this node; where this node had dialled the one before it, nobody listens."""
    events: list[Event] = []

    async def until(event: type[Event], instance: Instance | None = None) -> Event:
        while True:
            for each in events:
                if isinstance(each, event) and instance in (None, getattr(each, "instance", None)):
                    return each
            await asyncio.sleep(0.005)

    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        door = Door(None, None, "office", Path("/nowhere"))
        plane = ControlPlane(network, server, door, StatusQuery, events.append, lambda task: None)
        plane.start()
        peer = ControlServer(network, "127.0.0.1", 0)
        address = peer.endpoint
        plane.dial(address, lasting=True)
        call = await peer.receive()
        (link,) = plane._dialled
        peer.reply(call.identity, encode(StatusQuery()))
        await until(Heard)
        plane.route(link, NODE, OLD)
        peer.close()
        await until(ConnectionLost, OLD)
        await until(ConnectionRefused, OLD)
        plane.drop_peer(NODE, OLD)
        events.clear()
        later = ControlServer(network, address.host, address.port) if there else None
        dialer = ControlDialer(network, server.endpoint)
        while await dialer.receive() is not Dial.CONNECTED:
            pass
        dialer.send(encode(StatusQuery()))
        heard = await until(Heard)
        assert isinstance(heard, Heard)
        plane.route(heard.link, NODE, NEW)
        if later is None:
            assert await until(ConnectionRefused, NEW) == ConnectionRefused(NODE, NEW, address)
        else:
            await later.receive()
            await asyncio.sleep(0.2)
            assert not [each for each in events if isinstance(each, ConnectionRefused)]
            later.close()
        dialer.close()
        await plane.close()

    run(scenario)


def test_who_answers_and_never_as_a_node_is_let_be() -> None:
    """As a head's client port, which a forged announcement may name."""

    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        door = Door(None, None, "office", Path("/nowhere"))
        plane = ControlPlane(network, server, door, StatusQuery, lambda event: None, lambda task: None)
        plane.start()
        clients = ClientServer(network)
        plane.dial(clients.bind("127.0.0.1", 0))
        asked = 0
        while plane._dialled:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    event = await clients.receive()
                    if isinstance(event, ClientFault):
                        asked += 1
                        clients.reply(event.route, b'{"error": "bad_request"}')
        assert asked >= MAX_UNREAD
        await plane.close()
        clients.close()

    run(scenario, DEADLINE_S + MAX_UNREAD * GREET_AGAIN_S)


@pytest.mark.parametrize("lasting", [False, True])
def test_who_sends_what_no_node_sends_is_let_be(lasting: bool) -> None:
    events: list[Event] = []
    ended: list[asyncio.Task[None]] = []

    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        door = Door(None, None, "office", Path("/nowhere"))
        plane = ControlPlane(network, server, door, StatusQuery, events.append, ended.append)
        plane.start()
        stranger = network.socket(zmq.ROUTER, linger_ms=0, max_part=1 << 16)
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        plane.dial(Endpoint("127.0.0.1", port), lasting=lasting)
        (link,) = plane._dialled
        assert await asyncio.to_thread(stranger.poll, 1000 * int(DEADLINE_S))
        identity, _ = stranger.recv_multipart()
        plane.route(link, NODE, OLD)
        stranger.send_multipart([identity, b"x", b"y"])
        while ConnectionLost(NODE, OLD) not in events:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if lasting:
            assert link in plane._dialled
        else:
            while plane._dialled:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await plane.close()
        stranger.close()
        assert all(task.cancelled() or task.exception() is None for task in ended)

    run(scenario)


def test_an_address_that_can_not_be_dialled_is_forgotten_and_others_are_still_dialled() -> None:
    """Whoever tells it must not end the node, and the sockets of each attempt leave the loop."""
    ended: list[asyncio.Task[None]] = []

    async def scenario(network: Network) -> None:
        server = ControlServer(network, "127.0.0.1", 0)
        door = Door(None, None, "office", Path("/nowhere"))
        plane = ControlPlane(network, server, door, StatusQuery, lambda event: None, ended.append)
        plane.start()
        for host in ("a b", "/etc", "-x", "*", "ü", "fe80::1%a b"):
            for lasting in (False, True):
                plane.dial(Endpoint(host, 7600), lasting=lasting)
        while plane._dialled:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
        assert [task.exception() for task in ended] == [None] * len(ended)
        peers = [ControlServer(network, "127.0.0.1", 0) for _ in range(4)]
        for peer in peers:
            plane.dial(peer.endpoint)
        for peer in peers:
            await peer.receive()
            peer.close()
        await plane.close()

    with structlog.testing.capture_logs() as said:
        run(scenario)
    assert len(ended) >= 6
    refused = [line for line in said if line["event"] == "not_dialled"]
    assert len(refused) == 6
    assert "'/etc:7600' is not an address to connect to" in str(refused)
