"""Who waits for a turn is left in peace; who never ends a message is not, whoever else is served."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Callable

import pytest
import zmq
from cluster.sockets import plain
from fixtures.zmtp import GREETING, ready
from transport.scenarios import DEADLINE_S, until

from cascadia_p2p.transport.client_server import ClientCall, ClientServer
from cascadia_p2p.transport.control import ControlServer
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what has arrived")

WHOLE = 2000
LOOKS = 50
PART = b"\x01\x00"
"""Without content, and more follow."""


def control(network: Network) -> tuple[ControlServer, Endpoint]:
    server = ControlServer(network, "127.0.0.1", 0)
    return server, server.endpoint


def clients(network: Network) -> tuple[ClientServer, Endpoint]:
    server = ClientServer(network)
    return server, server.bind("127.0.0.1", 0)


@pytest.mark.parametrize("door", [control, clients])
def test_a_message_without_end_is_ended_whether_others_are_served_or_not(
    door: Callable[[Network], tuple[ControlServer | ClientServer, Endpoint]],
) -> None:
    async def receive(server: ControlServer | ClientServer) -> None:
        while True:
            await server.receive()

    async def run() -> None:
        with Network() as network, contextlib.ExitStack() as held:
            server, endpoint = door(network)
            server.meter.whole = WHOLE
            async with asyncio.timeout(DEADLINE_S):
                receiving = asyncio.create_task(receive(server))
                made = held.enter_context(socket.create_connection((endpoint.host, endpoint.port)))
                made.sendall(GREETING + ready(b"DEALER"))
                await until(lambda: len(server.meter) == 1)
                made.sendall(PART * 8 * WHOLE)
                while not server.meter.cut:
                    server.look()
                    await asyncio.sleep(0.02)
                receiving.cancel()
            server.close(0)

    asyncio.run(run())


def test_a_burst_of_requests_waits_for_as_long_as_those_of_others_take() -> None:
    async def run() -> None:
        with Network() as network, contextlib.ExitStack() as held:
            server, endpoint = clients(network)
            server.meter.whole = WHOLE
            two = [held.enter_context(plain(zmq.DEALER, endpoint)) for _ in range(2)]
            async with asyncio.timeout(DEADLINE_S):
                for each in two:
                    each.send_multipart([b"", b"hello"])
                    assert isinstance(await server.receive(), ClientCall)
                for each in two:
                    for _ in range(10):
                        each.send_multipart([b"", bytes(WHOLE // 2)])
                meter = server.meter
                meter.overfull(time.monotonic())

                def waiting() -> bool:
                    meter.overfull(time.monotonic())
                    return all(flow.waiting > 2 * WHOLE for flow in meter._flows.values())

                await until(waiting)
                for _ in range(20):
                    # So long one request may keep the head.
                    assert [meter.overfull(time.monotonic()) for _ in range(LOOKS)] == [[]] * LOOKS
                    assert isinstance(await server.receive(), ClientCall)
            server.close(0)

    asyncio.run(run())
