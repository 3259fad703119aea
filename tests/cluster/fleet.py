"""Real nodes in one event loop: real sockets, real data threads, 127.0.0.1 only."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from cascadia_p2p.client import AsyncClient
from cascadia_p2p.config import Config
from cascadia_p2p.node.node import Node
from cascadia_p2p.node.places import Places
from cascadia_p2p.types import Endpoint

PATIENCE_S = 100.0


@dataclass
class Member:
    """A running node."""

    node: Node
    places: Places
    task: asyncio.Task[None]

    @property
    def control(self) -> Endpoint:
        return self.places.control.endpoint

    @property
    def data(self) -> Endpoint:
        return self.places.receiver.endpoint

    @property
    def client(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.places.client_port)

    @property
    def state(self) -> str:
        return str(self.node.status()["state"])

    async def stop(self) -> None:
        self.node.leave("the test ends it")
        await self.task


@dataclass
class Fleet:
    """Starts nodes that know each other by static peers; mDNS only where a test asks for it."""

    root: Path
    name: str = field(default_factory=lambda: f"test-{secrets.token_hex(4)}")
    members: list[Member] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)

    async def start(self, model: Path, **settings: Any) -> Member:
        """Start one node and return when its sockets are bound."""
        peers = tuple(member.control for member in self.members if not member.task.done())[:1]
        values: dict[str, Any] = {
            "model": model,
            "fleet": self.name,
            "bind": "127.0.0.1",
            "port": 0,
            "client_port": 0,
            "peers": peers,
            "mdns": False,
            "threads": 1,
            "slots": 4,
            "context": 512,
            "state_dir": self.root / f"state-{len(self.members)}",
        }
        config = Config(**(values | settings))
        ready: asyncio.Future[tuple[Node, Places]] = asyncio.get_running_loop().create_future()

        async def live() -> None:
            with Places.open(config) as places:
                node = Node(config, places)
                ready.set_result((node, places))
                await node.run()

        task = asyncio.create_task(live())
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not ready.done():
            await task
        node, places = await ready
        member = Member(node, places, task)
        self.members.append(member)
        return member

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> float:
        """Wait until `condition` holds; the seconds that took."""
        started = time.monotonic()
        while not condition():
            if time.monotonic() - started > timeout_s:
                raise AssertionError(f"not within {timeout_s} s: {what}")
            for member in self.members:
                if member.task.done() and not member.task.cancelled() and member.task.exception():
                    await member.task
            await asyncio.sleep(0.02)
        return time.monotonic() - started

    async def open(self, timeout_s: float = PATIENCE_S) -> Member:
        """Wait for an open ring; its head."""

        def head() -> Member | None:
            for member in self.members:
                if not member.task.done():
                    status = member.node.status()
                    if status["is_head"] and status["state"] == "open":
                        return member
            return None

        await self.until(lambda: head() is not None, "an open ring", timeout_s)
        found = head()
        assert found is not None
        return found

    def sentences(self, event: str) -> list[str]:
        """What was said under an event's name."""
        return [str(line.get("message", "")) for line in self.said if line.get("event") == event]

    def last_words(self) -> list[str]:
        """What nodes said last, and why those that ended by themselves did."""
        ended = [member.task for member in self.members if member.task.done() and not member.task.cancelled()]
        return [*(str(line) for line in self.said[-20:]), *(repr(task.exception()) for task in ended)]

    async def stop(self) -> None:
        for member in self.members:
            if not member.task.done():
                member.node.leave("the test is over")
        await asyncio.gather(*(member.task for member in self.members), return_exceptions=True)


@contextlib.asynccontextmanager
async def fleet(root: Path, name: str | None = None) -> AsyncIterator[Fleet]:
    """A fleet whose nodes all end with the block."""
    made = Fleet(root) if name is None else Fleet(root, name)

    def keep(_: object, __: str, event: Any) -> Any:
        made.said.append(dict(event))
        raise structlog.DropEvent

    structlog.configure(
        processors=[structlog.processors.add_log_level, keep], cache_logger_on_first_use=False
    )
    try:
        yield made
    except Exception as error:
        error.add_note("\n".join(made.last_words()))
        raise
    finally:
        await made.stop()
        structlog.reset_defaults()


@contextlib.contextmanager
def slowed(member: Member, pause_s: float = 0.02) -> Iterator[None]:
    """The member's stage takes this much longer for a frame, so that answers outlast what a test does."""
    loaded = member.node._worker.loaded
    assert loaded is not None
    stage = loaded.stage
    apply = stage.apply

    def slowly(*args: Any) -> Any:
        time.sleep(pause_s)
        return apply(*args)

    stage.apply = slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        del stage.apply  # type: ignore[method-assign]


async def ask(head: Member | Endpoint, prompt: Any, **options: Any) -> Any:
    """One answer from a head, asked for once."""
    endpoint = head.client if isinstance(head, Member) else head
    async with AsyncClient(endpoint, timeout_s=60.0, retry=False) as client:
        return await client.generate(prompt, **options)
