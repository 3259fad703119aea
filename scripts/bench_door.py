"""What an answer's token costs the head's event loop, from the data thread's call to the client's socket.

    python scripts/bench_door.py --json docs/measurements/bench_door.json

The head's door alone, with its real socket and a client process that reads: no ring, no model. Tokens come in
frames of 8 streams. CPU time is that of the loop's thread, in microseconds a token: streamed with a piece for
every token (the most that can be asked), streamed with pieces at least 20 ms apart, and unstreamed; the last
two also with a journal to a standby, which runs in the client's process and acknowledges.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import orjson
import tokenizers
import zmq

from cascadia_p2p.errors import RequestError
from cascadia_p2p.local import free_ports
from cascadia_p2p.logs import configure_logs
from cascadia_p2p.node import head as head_module
from cascadia_p2p.node.answers import AnswerDesk, ModelFacts
from cascadia_p2p.node.head import HeadService
from cascadia_p2p.node.journal import JournalWriter
from cascadia_p2p.node.journal_copy import JournalCopy
from cascadia_p2p.ring.scheduler import Stream, StreamRequest, Update
from cascadia_p2p.sample.tokenizer import tokenizer_json
from cascadia_p2p.text.tokenizer import Tokenizer
from cascadia_p2p.transport.client_server import ClientServer
from cascadia_p2p.transport.control import ControlDialer, ControlServer, Dial
from cascadia_p2p.transport.looping import Delivery, SocketClosedError
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint, Instance, NodeId, StreamId
from cascadia_p2p.wire.client import FinishReason
from cascadia_p2p.wire.messages import Journal, JournalAck, decode_control, encode

FRAME: Final = 8
JOURNALLED: Final = ", journalled"
WAYS: Final = ("every token", "pieces", f"pieces{JOURNALLED}", "unstreamed", f"unstreamed{JOURNALLED}")
HEAD: Final = (NodeId("aa" * 8), Instance("ab" * 8))
STANDBY: Final = (NodeId("bb" * 8), Instance("bc" * 8))


class Ring:
    """Stands in for scheduler and data thread."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self._numbers = itertools.count(1)

    def call(self, function: Callable[[], None]) -> None:
        """Run at once."""
        function()

    def number_stream(self) -> StreamId:
        """A new number."""
        return StreamId(next(self._numbers))

    def overload(self, reading: int) -> RequestError | None:
        """There is room for all."""

    def submit(self, request: StreamRequest, *_: object) -> None:
        """Take a stream."""
        self.streams.append(Stream(request, list(request.prompt), submitted_at=0.0, started_at=0.0))

    def drop(self, stream: StreamId, error: RequestError) -> None:
        """Nothing is cancelled here."""

    def tell_places(self, hear: Callable[[list[StreamId]], None]) -> None:
        """Nobody waits here."""
        hear([])

    def expire(self, *_: object) -> None:
        """Nothing waits here."""


@contextlib.asynccontextmanager
async def standby(network: Network, port: int) -> AsyncIterator[ControlDialer]:
    """A connection to the standby in the client's process."""
    dialer = ControlDialer(network, Endpoint("127.0.0.1", port))
    try:
        while await dialer.receive() is not Dial.CONNECTED:
            pass
        yield dialer
    finally:
        dialer.close()


async def look_after(service: HeadService, dialer: ControlDialer) -> None:
    """What a node does for the journal beside the door's calls."""
    loop = asyncio.get_running_loop()

    async def follow() -> None:
        while True:
            service.follow([STANDBY])
            await asyncio.sleep(0.05)

    following = asyncio.create_task(follow())
    try:
        with contextlib.suppress(SocketClosedError):
            while True:
                happened = await dialer.receive()
                message = decode_control(happened) if isinstance(happened, bytes) else None
                if isinstance(message, JournalAck):
                    service.journal.heard(message, loop.time())
    finally:
        following.cancel()


async def measure(streams: int, tokens: int, way: str) -> float:
    """Microseconds of the loop's thread a token."""
    head_module.PIECE_S = 0.0 if way == "every token" else 0.02
    with Network() as network:
        ring, server = Ring(), ClientServer(network)
        endpoint, port = server.bind("127.0.0.1", 0), free_ports()
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(280))))
        streamed = not way.startswith("unstreamed")
        command = [sys.executable, __file__, "--read", endpoint.tcp, str(streams), str(streamed), str(port)]
        reader = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: ASYNC220 - it is not waited for
        try:
            async with standby(network, port) as dialer:
                service = HeadService(
                    server,
                    AnswerDesk(ModelFacts(280, frozenset()), tokenizer),
                    ring,  # type: ignore[arg-type]
                    ring,
                    status=dict,
                    missing=list,
                    queue_wait_s=60.0,
                    recovery_s=60.0,
                    watch=lambda task: None,
                    journal=JournalWriter(
                        *HEAD, lambda _, data: dialer.send(data) is Delivery.SENT, itertools.count(1)
                    ),
                )
                service.start()
                looking = [asyncio.create_task(look_after(service, dialer))] if JOURNALLED in way else []
                spent = await generate(ring, service, streams, tokens, way)
                told = service.journal.report()
                for task in looking:
                    task.cancel()
                if bool(looking) != any(isinstance(each, dict) and each["followed"] for each in told):
                    raise SystemExit(f"the standby was not told of all: {told}")
                if await asyncio.to_thread(reader.wait, 60):
                    raise SystemExit("the reader did not get all answers")
                await service.close("done")
        finally:
            reader.kill()
            reader.wait()
    return 1e6 * spent / (streams * tokens)


async def generate(ring: Ring, service: HeadService, streams: int, tokens: int, way: str) -> float:
    """Give all streams their tokens; seconds of this thread."""
    while len(ring.streams) < streams:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    started = time.thread_time()
    for number in range(tokens):
        last = FinishReason.LENGTH if number == tokens - 1 else None
        for first in range(0, streams, FRAME):
            frame = ring.streams[first : first + FRAME]
            service.deliver([Update(stream, (65 + number % 26,), last) for stream in frame])
            await asyncio.sleep(0)
        if way.startswith("pieces") and number % 8 == 7:
            await asyncio.sleep(0.02)
        elif number % 16 == 15:
            # The reader has to keep up: a client that lags is dropped.
            await asyncio.sleep(0.02)
    while service.pending:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)
    return time.thread_time() - started


def stand_by(port: int) -> None:
    """Take the journal, as a standby does."""

    async def take() -> None:
        with Network() as network:
            server = ControlServer(network, "127.0.0.1", port)
            copy, loop = JournalCopy(*STANDBY), asyncio.get_running_loop()
            while True:
                call = await server.receive()
                message = decode_control(call.data)
                if isinstance(message, Journal):
                    ack = copy.hear(message, loop.time()) or copy.due(loop.time())
                    if ack is not None:
                        server.reply(call.identity, encode(ack))

    asyncio.run(take())


def read(endpoint: str, streams: int, streamed: bool, port: int) -> None:
    """The client process: ask, and read until all answers are complete; beside it the standby."""
    threading.Thread(target=stand_by, args=(port,), daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    for number in range(streams):
        body = {"token_ids": [1], "max_tokens": 10**6, "stream": streamed, "id": str(number)}
        body["key"] = f"{number:032x}"
        socket.send_multipart([b"", orjson.dumps(body)])
    left = streams
    while left:
        reply = socket.recv_multipart()[-1]
        left -= b"finish_reason" in reply
        if b'"error"' in reply:
            raise SystemExit(f"the head refused: {reply!r}")
    context.destroy(linger=0)


def main() -> None:
    """Measure all levels, the ways in turns."""
    if sys.argv[1:2] == ["--read"]:
        read(sys.argv[2], int(sys.argv[3]), sys.argv[4] == "True", int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,11,40,88,176")
    parser.add_argument("--tokens", type=int, default=20_000, help="of all streams together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    configure_logs("console", "error")
    levels: list[dict[str, Any]] = []
    for streams in map(int, args.streams.split(",")):
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                found[way].append(asyncio.run(measure(streams, max(32, args.tokens // streams), way)))
        us = {way: round(statistics.median(each), 1) for way, each in found.items()}
        levels.append({"streams": streams, "us_a_token": us})
        print(json.dumps(levels[-1]), flush=True)
    if args.json is not None:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        body = {"machine": machine, "levels": levels}
        args.json.write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
