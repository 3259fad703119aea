"""Connections of whom the key is right, and of which a part can not be decrypted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import zmq

from cascadia_p2p.transport import network as networks
from cascadia_p2p.transport.control import ControlServer
from cascadia_p2p.transport.curve import KeyPair, Keys
from cascadia_p2p.transport.data import DataReceiver
from cascadia_p2p.transport.network import Network, connect
from cascadia_p2p.types import Endpoint

DEADLINE_S = 60.0
FLEET = KeyPair.new()
NODE = Keys(FLEET, FLEET.public, lambda _domain, key: key == FLEET.public)

Take = Callable[[], Awaitable[object]]


class Cable:
    """Passes one connection on, damages it from when it is told, and keeps its own end open."""

    def __init__(self, to: Endpoint) -> None:
        self._to = to
        self.damages = False
        self.ended = asyncio.Event()
        """The far end has hung up."""

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._to.host, self._to.port)
        back = asyncio.create_task(self._back(far_reader, writer))
        with contextlib.suppress(OSError):
            while chunk := await reader.read(1 << 16):
                far_writer.write(chunk[:-1] + bytes([chunk[-1] ^ self.damages]))
        await back
        far_writer.close()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
        self.ended.set()
        writer.close()


@contextlib.asynccontextmanager
async def served(network: Network, kind: int) -> AsyncIterator[tuple[Endpoint, Take]]:
    """A port of a node, watched as a node watches it, and a way to take what comes there."""
    if kind == zmq.DEALER:
        server = ControlServer(network, "127.0.0.1", 0)
        yield server.endpoint, server.receive
        server.close(0)
    else:
        receiver = DataReceiver(network, "127.0.0.1", 0, max_part=1 << 16)
        watch = receiver.watch()
        yield receiver.endpoint, lambda: asyncio.to_thread(receiver.recv_header, True)
        receiver.close()
        watch.close()


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.PUSH], ids=["control", "data"])
def test_a_connection_of_which_a_part_can_not_be_decrypted_ends(
    kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ reads no more of it, and would keep the descriptor for ever."""
    monkeypatch.setattr(networks, "PING_MS", 100)
    monkeypatch.setattr(networks, "SILENCE_MS", 500)

    async def scenario() -> None:
        with Network(NODE) as network, Network(NODE) as other:
            async with served(network, kind) as (endpoint, take):
                cable = Cable(endpoint)
                proxy = await asyncio.start_server(cable.join, "127.0.0.1", 0)
                sender = other.socket(kind, linger_ms=0, max_part=1 << 16)
                sender.setsockopt(zmq.RECONNECT_IVL, -1)
                other.present(sender)
                connect(sender, Endpoint("127.0.0.1", proxy.sockets[0].getsockname()[1]))
                await asyncio.to_thread(sender.send, b"whole")
                assert await take() is not None
                # Only a monitor that has been idle hides the fault from ZeroMQ.
                await asyncio.sleep(0.2)
                cable.damages = True
                await asyncio.to_thread(sender.send, b"damaged")
                await cable.ended.wait()
                sender.close(linger=0)
                proxy.close()

    async def bounded() -> None:
        await asyncio.wait_for(scenario(), DEADLINE_S)

    asyncio.run(bounded())
