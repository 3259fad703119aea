"""A ring of node processes for a crowd, and what can be seen of it from outside."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from cascadia_p2p.local import LocalRing
from cascadia_p2p.node.query import ask_node
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import find_recipe
from cascadia_p2p.shards.encodings import EXACT
from cascadia_p2p.shards.export import export

SAMPLE: Final = "tiny66"
START_S: Final = 300.0

PATIENT: Final = "[limits]\nsuspect_s = 6.0\ngone_s = 15.0\n"
"""All nodes and their clients share one machine here: nobody is gone who only gets no turn."""


@dataclass(slots=True)
class Nodes:
    """The processes of an open ring."""

    ring: LocalRing
    endpoint: str

    def resident_mb(self) -> list[float]:
        """Resident memory of every node."""
        return [psutil.Process(node.process.pid).memory_info().rss / 1e6 for node in self.ring.nodes]

    def descriptors(self) -> list[int]:
        """Open descriptors of every node."""
        return [psutil.Process(node.process.pid).num_fds() for node in self.ring.nodes]

    async def status(self) -> list[dict[str, Any]]:
        """What every node says of itself."""
        return [dict(await ask_node(node.control, 10.0)) for node in self.ring.nodes]

    async def slots_taken(self) -> list[int]:
        """Slots that hold a stream, by node."""
        return [int(body["data_thread"]["slots_taken"]) for body in await self.status()]


@contextlib.contextmanager
def small_ring(count: int, flags: Sequence[str]) -> Iterator[Nodes]:
    """An open ring of the small exact sample model."""
    with tempfile.TemporaryDirectory(prefix="cascadia-crowd-") as scratch:
        root = Path(scratch)
        export(
            make_checkpoint(root / "checkpoint", find_recipe(SAMPLE)),
            root / "model",
            shards=count,
            encodings=EXACT,
        )
        settings = root / "settings.toml"
        settings.write_text(PATIENT)
        flags = ("--threads", "1", "--config", str(settings), *flags)
        with LocalRing(root / "model", root / "state", flags=flags) as ring:
            for shard in range(count):
                ring.start_node("--shard", str(shard))
            yield Nodes(ring, _opened(ring, count))


def _opened(ring: LocalRing, count: int) -> str:
    endpoint, opened = "", set()
    deadline = time.monotonic() + START_S
    for event in ring.events(START_S, until_one_ends=True):
        if event.event == "clients_served":
            endpoint = str(event.fields["endpoint"])
        elif event.event == "ring_open":
            opened.add(event.node)
        if endpoint and len(opened) == count:
            return endpoint
        if time.monotonic() > deadline:
            break
    raise SystemExit(f"the ring did not open:\n{ring.tail()}")
