"""A small HTTP server for `GET /metrics`: few connections, short requests, one answer each."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import structlog
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from cascadia_p2p.types import Endpoint

MAX_CONNECTIONS: Final = 16
BACKLOG: Final = 128
"""Connections that the system may hold until they are looked at: a scraper must not wait behind a crowd."""

MAX_HEAD_BYTES: Final = 8192
"""Of a request with all its headers."""

PATIENCE_S: Final = 5.0
"""For a request to arrive whole, and for its answer to be taken."""

_PLAIN: Final = "text/plain; charset=utf-8"
_TAKEN: Final = b"HTTP/1.1 200 "
_log = structlog.get_logger()


class MetricsServer:
    """Answers scrapers in the running event loop.

    Args:
        listener: a socket that listens; closed by `close`.
        text: makes what `/metrics` says.
    """

    def __init__(self, listener: socket.socket, text: Callable[[], bytes]) -> None:
        self._listener = listener
        self._text = text
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._failed = False
        self.refused = {"surplus": 0, "malformed": 0, "unfinished": 0}
        """Connections and requests that were not answered with metrics, by why."""
        host, port = listener.getsockname()[:2]
        self.endpoint = Endpoint(str(host), int(port))
        """Where it serves."""

    async def start(self) -> None:
        """Serve from now on."""
        self._server = await asyncio.start_server(
            self._connected, sock=self._listener, limit=MAX_HEAD_BYTES, backlog=BACKLOG
        )
        told = _log.info if self.endpoint.loopback else _log.warning
        clear = "" if self.endpoint.loopback else ", in the clear, to everybody who reaches that address"
        told(
            "metrics_served",
            message=f"metrics are served at http://{self.endpoint}/metrics{clear}",
            endpoint=str(self.endpoint),
        )

    async def close(self) -> None:
        """End all connections and unbind."""
        if self._server is not None:
            self._server.close()
        self._listener.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            self.refused["surplus"] += 1
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="metrics")
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, one answer; whatever goes wrong ends this connection and nothing else."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                said = await answer(reader, self._text)
                self.refused["malformed"] += not said.startswith(_TAKEN)
                writer.write(said)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            self.refused["unfinished"] += 1
        except Exception:
            # Said once: a scraper comes again and again.
            if not self._failed:
                self._failed = True
                _log.exception("metrics_failed", message="the metrics could not be told")
        finally:
            writer.transport.abort()


async def answer(reader: asyncio.StreamReader, text: Callable[[], bytes]) -> bytes:
    """The response to one request.

    Args:
        reader: of the connection; its limit bounds the request.
        text: makes what `/metrics` says.

    Raises:
        IncompleteReadError: the connection ended before the request did.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        words = f"a request may have {MAX_HEAD_BYTES} bytes"
        return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, words)
    parts = head.split(b"\r\n", 1)[0].split(b" ")
    if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
        return _response(HTTPStatus.BAD_REQUEST, "this port speaks HTTP/1: GET /metrics")
    method, target, _ = parts
    if target.partition(b"?")[0] != b"/metrics":
        return _response(HTTPStatus.NOT_FOUND, "there is only /metrics")
    if method not in (b"GET", b"HEAD"):
        return _response(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered", b"Allow: GET, HEAD\r\n")
    body = text()
    made = _response(HTTPStatus.OK, body, kind=CONTENT_TYPE_PLAIN_0_0_4)
    return made[: -len(body)] if method == b"HEAD" else made


def _response(status: HTTPStatus, body: str | bytes, more: bytes = b"", *, kind: str = _PLAIN) -> bytes:
    """An HTTP response with its body; the connection ends behind it."""
    data = body if isinstance(body, bytes) else (body + "\n").encode()
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n"
    ).encode() + b"%b\r\n%b" % (more, data)
