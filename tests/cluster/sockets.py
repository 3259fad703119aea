"""Plain ZeroMQ sockets, as a user's own program would have them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import zmq

from cascadia_p2p.types import Endpoint

PATIENCE_MS = 100_000


@contextlib.contextmanager
def plain(kind: int, endpoint: Endpoint, **options: int) -> Iterator[zmq.Socket[bytes]]:
    """One connected socket with a context of its own; gives up receiving after a while."""
    context = zmq.Context()
    made: zmq.Socket[bytes] = context.socket(kind)
    try:
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        for name, value in options.items():
            made.setsockopt(getattr(zmq, name), value)
        made.connect(endpoint.tcp)
        yield made
    finally:
        made.close()
        context.term()


def ask(request: zmq.Socket[bytes], body: object) -> dict[str, Any]:
    """Send one frame over a REQ socket (bytes as they are, anything else as JSON): the one frame back."""
    request.send(body if isinstance(body, bytes) else json.dumps(body).encode())
    parts = request.recv_multipart()
    assert len(parts) == 1
    reply = json.loads(parts[0])
    assert isinstance(reply, dict)
    return reply
