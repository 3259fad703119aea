"""A machine made of files, an OpenVINO made of answers, and a node made of one socket."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import JsonValue

from cascadia_p2p import __version__
from cascadia_p2p.doctor.host import Host
from cascadia_p2p.transport.control import ControlServer
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint, Instance, NodeId
from cascadia_p2p.wire.messages import StatusQuery, StatusReport, decode_control, encode

GIB = 2**30


class FileHost(Host):
    """A host whose files lie in a directory.

    Args:
        root: stands for `/`.
        system: as `sys.platform`.
        release: of its kernel.
        missing: libraries that can not be loaded, with reasons.
        forbidden: names of files that this user may not use.
        said: output of commands by their first word; others do not exist.
    """

    def __init__(
        self,
        root: Path,
        system: str = "linux",
        *,
        release: str = "6.17.0",
        missing: Mapping[str, str] | None = None,
        forbidden: Sequence[str] = (),
        said: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(root, system)
        self._release = release
        self._missing = missing or {}
        self._forbidden = forbidden
        self._said = said or {}

    def put(self, name: str, text: str = "") -> FileHost:
        """Write a file."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return self

    def may_use(self, path: Path) -> bool:
        return path.name not in self._forbidden

    def loads(self, library: str) -> str:
        return self._missing.get(library, "")

    def kernel(self) -> str:
        return self._release

    def run(self, command: Sequence[str]) -> str | None:
        return self._said.get(command[0])


class Answers:
    """An OpenVINO that says what it is told to."""

    def __init__(
        self, version: str = "2026.4.1-22982", devices: tuple[str, ...] = ("CPU",), **properties: str
    ) -> None:
        self._version, self._devices, self._properties = version, devices, properties

    def version(self) -> str:
        return self._version

    def devices(self) -> tuple[str, ...]:
        return self._devices

    def ask(self, device: str, name: str) -> str:
        return self._properties.get(name, "")


def status(**changes: JsonValue) -> dict[str, JsonValue]:
    """The body of a status report of a node that is alone."""
    own: dict[str, JsonValue] = {
        "node": "ab" * 8,
        "host": "elsewhere",
        "software": __version__,
        "control": "127.0.0.1:1",
        "data": "127.0.0.1:2",
        "shard": 0,
    }
    body: dict[str, JsonValue] = {
        "software": __version__,
        "fleet": "cascadia",
        "state": "looking",
        "fingerprint": "f" * 64,
        "is_head": False,
        "nodes": [own],
    }
    for name, value in changes.items():
        (own if name in own and name != "software" else body)[name] = value
    return body


@asynccontextmanager
async def speaking_node(
    body: dict[str, JsonValue], delay_s: float = 0.0, padding: bool = True, slow_first: int = 0
) -> AsyncIterator[Endpoint]:
    """Something that answers status queries on 127.0.0.1.

    Args:
        body: of its reports.
        delay_s: before each answer.
        slow_first: so many answers come only after 0.4 s.
        padding: False answers only short queries, as a release does that does not know padding.
    """
    with Network() as network:
        server = ControlServer(network, "127.0.0.1", 0)

        async def serve() -> None:
            for number in itertools.count():
                call = await server.receive()
                message = decode_control(call.data)
                if isinstance(message, StatusQuery) and (padding or message.padding is None):
                    if delay_s or number < slow_first:
                        await asyncio.sleep(0.4 if number < slow_first else delay_s)
                    report = StatusReport(node=NodeId("ab" * 8), instance=Instance("cd" * 8), body=body)
                    server.reply(call.identity, encode(report))

        task = asyncio.create_task(serve())
        try:
            yield server.endpoint
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            server.close(0)
