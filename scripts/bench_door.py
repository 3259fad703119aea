"""What an answer's token costs the head's event loop, from the data thread's call to the client's socket.

    python scripts/bench_door.py --json docs/measurements/bench_door.json

The head's door alone, with its real socket and a client process that reads: no ring, no model. Tokens come in
frames of 8 streams. CPU time is that of the loop's thread, in microseconds a token: streamed with a piece for
every token (the most that can be asked), streamed with pieces at least 20 ms apart, and unstreamed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import orjson
import tokenizers
import zmq

from cascadia_p2p.errors import RequestError
from cascadia_p2p.logs import configure_logs
from cascadia_p2p.node import head as head_module
from cascadia_p2p.node.answers import AnswerDesk, ModelFacts
from cascadia_p2p.node.head import HeadService
from cascadia_p2p.ring.scheduler import Stream, StreamRequest, Update
from cascadia_p2p.sample.tokenizer import tokenizer_json
from cascadia_p2p.text.tokenizer import Tokenizer
from cascadia_p2p.transport.client_server import ClientServer
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import StreamId
from cascadia_p2p.wire.client import FinishReason

FRAME: Final = 8
WAYS: Final = ("every token", "pieces", "unstreamed")


class Ring:
    """Stands in for scheduler and data thread."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def call(self, function: Callable[[], None]) -> None:
        """Run at once."""
        function()

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


async def measure(streams: int, tokens: int, way: str) -> float:
    """Microseconds of the loop's thread a token."""
    head_module.PIECE_S = 0.0 if way == "every token" else 0.02
    with Network() as network:
        ring, server = Ring(), ClientServer(network)
        endpoint = server.bind("127.0.0.1", 0)
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(280))))
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
        )
        service.start()
        command = [sys.executable, __file__, "--read", endpoint.tcp, str(streams), str(way != "unstreamed")]
        reader = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: ASYNC220 - it is not waited for
        try:
            while len(ring.streams) < streams:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            started = time.thread_time()
            for number in range(tokens):
                last = FinishReason.LENGTH if number == tokens - 1 else None
                for first in range(0, streams, FRAME):
                    frame = ring.streams[first : first + FRAME]
                    service.deliver([Update(stream, (65 + number % 26,), last) for stream in frame])
                    await asyncio.sleep(0)
                if way == "pieces" and number % 8 == 7:
                    await asyncio.sleep(0.02)
            while service.pending:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0)
            spent = time.thread_time() - started
            await asyncio.to_thread(reader.wait, 60)
        finally:
            reader.kill()
            reader.wait()
        await service.close("done")
    return 1e6 * spent / (streams * tokens)


def read(endpoint: str, streams: int, streamed: bool) -> None:
    """The client process: ask, and read until all answers are complete."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    for number in range(streams):
        body = {"token_ids": [1], "max_tokens": 10**6, "stream": streamed, "id": str(number)}
        socket.send_multipart([b"", orjson.dumps(body)])
    left = streams
    while left:
        left -= b"finish_reason" in socket.recv_multipart()[-1]
    context.destroy(linger=0)


def main() -> None:
    """Measure all levels, the ways in turns."""
    if sys.argv[1:2] == ["--read"]:
        read(sys.argv[2], int(sys.argv[3]), sys.argv[4] == "True")
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
