"""A ring that stands for a whole test module: real nodes in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from cluster.fleet import Fleet, Member, fleet

from cascadia_p2p.config import Limits
from cascadia_p2p.types import Endpoint

T = TypeVar("T")

PATIENCE_S = 120.0


class StandingRing:
    """An open ring of as many nodes as the model has shards; use it as a context manager.

    Args:
        root: directory for the nodes' state.
        model: the exported model.
        shards: of the model, one node for each.
        settings: of every node, beside those of `Fleet.start`.
    """

    def __init__(self, root: Path, model: Path, shards: int, **settings: Any) -> None:
        self._root, self._model, self._shards = root, model, shards
        # A machine that stalls again and again loses no node of a ring that is to stand.
        self._settings = {"limits": Limits(gone_s=30.0, stuck_s=30.0)} | settings
        self._ready = threading.Event()
        self._over: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="standing-ring")
        self.fleet: Fleet
        self.head: Member
        self.said: list[dict[str, Any]]

    @property
    def endpoint(self) -> Endpoint:
        """Where clients are served."""
        return self.head.client

    @property
    def name(self) -> str:
        """The fleet's."""
        return self.fleet.name

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the ring's loop, where its nodes may be touched."""

        async def run() -> T:
            return function()

        return self.wait(run())

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the ring's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition on the nodes holds."""
        self.wait(self.fleet.until(condition, what))

    def status(self) -> list[dict[str, Any]]:
        """Every node's status."""
        return self.call(lambda: [dict(member.node.status()) for member in self.fleet.members])

    def rows(self) -> int:
        """Rows that all nodes have computed in this epoch: whatever a request sends has some."""
        return sum(int(body["data_thread"]["rows"]) for body in self.status())

    def __enter__(self) -> StandingRing:
        self._thread.start()
        # What takes too long in there is said there.
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def _live(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _run(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with fleet(self._root) as made:
            self.fleet = made
            for shard in range(self._shards):
                await made.start(self._model, shard=shard, **self._settings)
            self.said = made.said
            self.head = await made.open()
            await made.until(lambda: all(each.state == "open" for each in made.members), "all are open")
            self._ready.set()
            await self._over.wait()


@contextlib.contextmanager
def standing_ring(root: Path, model: Path, shards: int, **settings: Any) -> Iterator[StandingRing]:
    """A ring for the block."""
    with StandingRing(root, model, shards, **settings) as ring:
        yield ring
