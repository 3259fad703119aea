"""A peer that sends much and breaks off ends no process: ZeroMQ aborts where it has stopped reading."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, socket, struct, sys, threading, time
from cascadia_p2p.transport.client_server import ClientServer
from cascadia_p2p.transport.control import ControlServer
from cascadia_p2p.transport.data import DataReceiver
from cascadia_p2p.transport.network import Network

def frame(body, flags=0):
    return bytes([flags, len(body)]) + body

def named(key, value):
    return bytes([len(key)]) + key + struct.pack(">I", len(value)) + value

def attack(port, kind):
    with socket.create_connection(("127.0.0.1", port)) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        made.sendall(b"\\xff" + bytes(8) + b"\\x7f\\3\\1NULL" + bytes(48))
        greeting = b""
        while len(greeting) < 64:
            part = made.recv(4096)
            if not part:
                return
            greeting += part
        made.sendall(frame(b"\\5READY" + named(b"Socket-Type", kind) + named(b"Identity", b""), 4))
        time.sleep(0.2)
        one = frame(b"x", 1) + frame(b"y") if kind == b"PUSH" else frame(b"", 1) + frame(b"{}")
        made.settimeout(3)
        try:
            for _ in range(100):
                made.sendall((one * 3 + frame(b"\\4PING\\0\\0", 4)) * 200)
        except OSError:
            pass

async def main(which):
    with Network() as network:
        if which == "data":
            receiver = DataReceiver(network, "127.0.0.1", 0, max_part=1 << 16)
            port, kind = receiver.endpoint.port, b"PUSH"
        elif which == "control":
            receiver = ControlServer(network, "127.0.0.1", 0)
            port, kind = receiver.endpoint.port, b"DEALER"
        else:
            receiver = ClientServer(network)
            port, kind = receiver.bind("127.0.0.1", 0).port, b"DEALER"
        for _ in range(4):
            await asyncio.to_thread(attack, port, kind)
        # Longer than it takes until the next heartbeat.
        await asyncio.sleep(1.5)
        receiver.close()
    print("lives")

asyncio.run(main(sys.argv[1]))
"""


CLIENT = """
import asyncio, sys, threading, time, zmq
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.transport import client_connection
from cascadia_p2p.transport.client_connection import AsyncClientConnection
from cascadia_p2p.types import Endpoint

context = zmq.Context()
head = context.socket(zmq.ROUTER)
head.setsockopt(zmq.SNDHWM, 0)
head.setsockopt(zmq.LINGER, 10000)
head.setsockopt(zmq.HEARTBEAT_IVL, 100)
# Only `close` ends the connection, however long either side is held up.
head.setsockopt(zmq.HEARTBEAT_TIMEOUT, 60000)
client_connection.HEARTBEAT_TIMEOUT_MS = 60000
port = head.bind_to_random_port("tcp://127.0.0.1")

def serve():
    way = head.recv_multipart()
    for number in range(20000):
        head.send_multipart([*way[:-1], b"%d" % number])
    time.sleep(0.5)
    head.close()

async def main():
    async with AsyncClientConnection(Endpoint("127.0.0.1", port), connect_timeout_s=60.0) as connection:
        exchange = await connection.exchange(b"question")
        # A program that lets its loop stand.
        time.sleep(2.0)
        got = 0
        try:
            while True:
                await exchange.receive(60.0)
                got += 1
        except CascadiaError as error:
            print(got, type(error).__name__)

threading.Thread(target=serve, daemon=True).start()
asyncio.run(main())
"""


def test_a_client_that_let_its_loop_stand_reads_what_came_and_hears_of_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", CLIENT], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (0, "20000 HeadLostError\n"), done.stderr


@pytest.mark.parametrize("which", ["client", "control", "data"])
def test_a_peer_that_breaks_off_ends_no_process(which: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, which], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr
