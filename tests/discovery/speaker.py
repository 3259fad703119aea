"""A process with one Discovery, for tests: JSON lines out, commands in.

The argument is a JSON object: fleet, node, bind, peers, mdns, alone_s, look_s, port, client. Events out:
`up`, `candidate`, `connected` (over TCP to the node that a candidate belongs to), `log`, `moved`, `alone`.
Commands in: `alone` and `exit`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping

import structlog

import cascadia_p2p.discovery.discovery as discovery_module
from cascadia_p2p.discovery import (
    Address,
    Announcement,
    Candidate,
    Discovery,
    choose_address,
    list_interfaces,
)
from cascadia_p2p.identity import new_instance
from cascadia_p2p.types import Endpoint, NodeId
from cascadia_p2p.wire import PROTOCOL


def say(event: str, **values: object) -> None:
    print(json.dumps({"event": event, **values}, default=str), flush=True)


class Log:
    def msg(self, line: str) -> None:
        print(line, flush=True)

    debug = info = warning = error = critical = msg


async def connect(candidate: Candidate) -> str | None:
    try:
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(candidate.endpoint.host, candidate.endpoint.port)
            node = (await reader.readline()).decode().strip()
            writer.close()
            return node
    except (OSError, TimeoutError):
        return None


async def follow(discovery: Discovery, own: str) -> None:
    async for candidate in discovery:
        words = candidate.announcement
        say(
            "candidate",
            endpoint=candidate.endpoint,
            node=words.node_id if words else None,
            instance=words.instance if words else None,
            client=words.client if words else None,
            peer=candidate.peer,
        )
        node = await connect(candidate)
        if node is not None:
            discovery.reached(candidate)
        if node not in (None, own):
            say("connected", endpoint=candidate.endpoint, node=node, peer=candidate.peer)


async def main(options: Mapping[str, object]) -> None:
    structlog.configure(
        processors=[structlog.processors.add_log_level, rename, structlog.processors.JSONRenderer()],
        logger_factory=lambda *_: Log(),
    )
    bind = options.get("bind")
    address = choose_address(bind if isinstance(bind, str) else None, list_interfaces())
    node = str(options["node"])
    if "look_s" in options:
        discovery_module._LOOK = float(str(options["look_s"]))

    async def welcome(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"{node}\n".encode())
        writer.close()

    hosts = [address.ip] if address.loopback else ["0.0.0.0", "::"]
    server = await asyncio.start_server(welcome, hosts, int(str(options.get("port", 0))))
    port = server.sockets[0].getsockname()[1]
    peers = options.get("peers", [])
    assert isinstance(peers, list)
    instance = new_instance()

    def moved(to: Address) -> None:
        say("moved", ip=to.ip)

    discovery = Discovery(
        str(options["fleet"]),
        address,
        instance=instance,
        peers=[Endpoint.parse(peer) for peer in peers],
        mdns=bool(options.get("mdns", True)),
        bind=bind if isinstance(bind, str) else None,
        moved=moved,
        alone_s=float(str(options.get("alone_s", 10))),
    )
    client = options.get("client")
    announcement = Announcement(
        protocol=PROTOCOL,
        fleet=str(options["fleet"]),
        node_id=NodeId(node),
        instance=instance,
        model="0123abcd",
        shard=None,
        shards=1,
        control=port,
        data=port,
        client=int(str(client)) if client else None,
    )
    await discovery.start(announcement)
    say("up", ip=address.ip, port=port, instance=instance, warning=address.warning)
    task = asyncio.create_task(follow(discovery, node))
    loop = asyncio.get_running_loop()
    while (word := (await loop.run_in_executor(None, sys.stdin.readline)).strip()) not in ("", "exit"):
        if word == "alone":
            say("alone", message=discovery.explain_alone())
    task.cancel()
    await discovery.stop()
    server.close()


def rename(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    event["name"] = event.pop("event")
    event["event"] = "log"
    return event


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
