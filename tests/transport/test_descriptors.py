"""A process whose descriptors strangers use up goes on, keeps its peers, and ends those that are too many."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time

import pytest
import zmq
from cluster.sockets import plain
from fixtures.zmtp import GREETING, ready

from cascadia_p2p.transport.network import allow_many_descriptors
from cascadia_p2p.types import Endpoint

PATIENCE_S = 60.0
STRANGERS = 180

PROGRAM = """
import asyncio, resource
from cascadia_p2p.transport.control import ControlDialer, ControlServer
from cascadia_p2p.transport.looping import NoSocketError
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

def dial(network):
    try:
        ControlDialer(network, Endpoint("127.0.0.1", 9)).close(0)
    except NoSocketError:
        return b"no socket"
    return b"dialled"

async def look(server):
    while True:
        server.look()
        await asyncio.sleep(0.02)

async def main():
    with Network() as network:
        server = ControlServer(network, "127.0.0.1", 0)
        print(server.endpoint.port, server.meter.most, flush=True)
        looking = None
        async with asyncio.timeout(90):
            while (call := await server.receive()).data != b"end":
                if call.data == b"look":
                    looking = asyncio.create_task(look(server))
                surplus = b"%d" % server.meter.surplus
                server.reply(call.identity, dial(network) if call.data == b"dial" else surplus)
        looking.cancel()
        server.close(0)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_strangers_that_use_up_the_descriptors_cost_nobody_else_anything() -> None:
    with contextlib.ExitStack() as held:
        child = held.enter_context(
            subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
        )
        held.callback(child.kill)
        assert child.stdout is not None
        port, most = map(int, child.stdout.readline().split())
        assert most == 8
        friend = held.enter_context(plain(zmq.DEALER, Endpoint("127.0.0.1", port)))

        def asked(what: bytes) -> bytes:
            friend.send(what)
            return friend.recv()

        assert (asked(b"dial"), asked(b"surplus")) == (b"dialled", b"0")
        # Beyond its descriptors the process accepts nobody; the others wait in the system's queue.
        for _ in range(STRANGERS):
            made = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
            held.callback(made.close)
            made.sendall(GREETING + ready(b"DEALER"))
        deadline = time.monotonic() + PATIENCE_S
        for question, answer in ((b"dial", b"no socket"), (b"look", b"0"), (b"dial", b"dialled")):
            while asked(question) != answer:
                assert time.monotonic() < deadline, (question, answer)
        while int(asked(b"surplus")) < STRANGERS // 2:
            assert time.monotonic() < deadline, "they are not ended"
        friend.send(b"end")
        assert child.wait(PATIENCE_S) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
@pytest.mark.parametrize(
    ("soft", "hard", "refused", "found"),
    [(256, -1, 24_577, 16_384), (1024, 4096, 65_537, 4096), (1 << 20, 1 << 20, 0, 65_536), (64, 64, 0, 64)],
)
def test_the_limit_of_descriptors_is_raised_as_far_as_the_system_lets_it(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, refused: int, found: int
) -> None:
    """macOS tells of no limit and has one; and what is higher already stays."""
    import resource

    limits = [soft]

    def set_limit(_: int, wanted: tuple[int, int]) -> None:
        if wanted[0] >= refused:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(wanted[0])

    unlimited = resource.RLIM_INFINITY if hard == -1 else hard
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, unlimited))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert allow_many_descriptors() == found
    assert limits[-1] == max(soft, found)
