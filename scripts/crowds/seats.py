"""Node processes that are killed, frozen and started again while a crowd reads its answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import orjson

from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.keys.places import lay_key, make_fleet_key
from cascadia_p2p.local import COMMAND, HOST, LocalNode, LocalRing, free_ports
from cascadia_p2p.node.query import ask_node
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import find_recipe
from cascadia_p2p.shards.encodings import EXACT
from cascadia_p2p.shards.export import export
from cascadia_p2p.transport.curve import Keys
from cascadia_p2p.types import Endpoint

SAMPLE: Final = "tiny66"
START_S: Final = 300.0
ANSWER_S: Final = 2.0
"""How long a node may take to say its status, in seconds."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a seat stands.

    Args:
        host: its address.
        program: runs the command line there.
        port: of its node's control; None for any free one.
        client_port: where its node serves clients when it is the head; None for any free one. A frozen head
            keeps its port, so seats that share an address and may freeze must not share it.
    """

    host: str = HOST
    program: Sequence[str] = COMMAND
    port: int | None = None
    client_port: int | None = None


@dataclass(slots=True, eq=False)
class Seat:
    """A place in the fleet: who sits there is a process that may be killed and followed by another.

    Args:
        shard: what its node holds.
        machine: where it is.
        client_port: where its node serves clients when it is the head.
        node: the process, the last one if that has ended; None before the first.
        port: its control port, once it has one.
    """

    shard: int
    machine: Machine
    client_port: int
    node: LocalNode | None = None
    port: int | None = None

    @property
    def runs(self) -> bool:
        """Whether its process lives; a frozen one does."""
        return self.node is not None and self.node.process.poll() is None

    @property
    def process(self) -> LocalNode:
        """Its process, the last one if that has ended."""
        if self.node is None:
            raise CascadiaError(f"nobody has sat at this seat of shard {self.shard}")
        return self.node


class Seats:
    """The seats of a fleet on this machine; each process knows the ports of all seats before its own.

    Args:
        ring: starts the processes.
        shards: of the model.
        machines: where each seat stands, the first one first; behind the last, all stand here.
        keys: the fleet's; None where it has none.
    """

    def __init__(
        self, ring: LocalRing, shards: int, machines: Iterable[Machine] = (), keys: Keys | None = None
    ) -> None:
        self.ring, self.shards, self._keys = ring, shards, keys
        self.seats: list[Seat] = []
        self._machines = itertools.chain(machines, itertools.repeat(Machine()))
        self._shard_of: dict[int, int] = {}

    def add(self, shard: int) -> Seat:
        """One more seat, with its process."""
        machine = next(self._machines)
        seat = Seat(shard, machine, machine.client_port or free_ports(), port=machine.port)
        self.seats.append(seat)
        self.start(seat)
        return seat

    def start(self, seat: Seat) -> None:
        """Start a seat's process, at the ports that it had."""
        others = [each.node.control for each in self.seats if each.node is not None and each is not seat]
        peers = [flag for other in others for flag in ("--peer", str(other))]
        flags = ("--shard", str(seat.shard), "--client-port", str(seat.client_port), *peers)
        seat.node = self.ring.start_node(
            *flags, port=seat.port, host=seat.machine.host, program=seat.machine.program
        )
        seat.port = seat.node.port
        self._shard_of[seat.node.index] = seat.shard

    def kill(self, *seats: Seat) -> float:
        """End processes by SIGKILL, all at once; when, in seconds of the wall clock that their logs show."""
        killed = time.time()
        for seat in seats:
            seat.process.process.kill()
        for seat in seats:
            seat.process.process.wait()
        return killed

    async def status(self, seat: Seat) -> dict[str, Any] | None:
        """What a seat's node says of itself; None when it does not answer."""
        try:
            return dict(await ask_node(seat.process.control, ANSWER_S, self._keys)) if seat.runs else None
        except CascadiaError:
            return None

    async def head(self) -> dict[str, Any] | None:
        """The status of the head of an open ring; None when there is none."""
        found = [seat for seat in self.seats if seat.shard == 0]
        for body in await asyncio.gather(*map(self.status, found)):
            if body is not None and body["is_head"] and body["state"] == "open":
                return body
        return None

    async def whole(self, timeout_s: float = START_S) -> dict[str, Any]:
        """Wait until every process that runs serves or stands by; the head's status.

        Raises:
            CascadiaError: not within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            running = {str(seat.process.control) for seat in self.seats if seat.runs}
            body = await self.head()
            nodes = [] if body is None else body["nodes"]
            ready = {each["control"] for each in nodes if each["claim"] in ("serving", "loaded")}
            if body is not None and running <= ready and len(body["stages"]) == self.shards:
                return body
            await asyncio.sleep(0.1)
        raise CascadiaError(f"the ring is not whole after {timeout_s:g} s\n{self.ring.tail()}")

    def serving(self, body: dict[str, Any], shard: int) -> Seat:
        """The seat whose process serves a shard, by the head's status."""
        control = body["stages"][shard]["control"]
        return next(seat for seat in self.seats if str(seat.process.control) == control)

    def logged(self, event: str, since: float, *, shard: int | None = None) -> list[float]:
        """When the processes (of one shard) logged an event after a time, earliest first; wall clock."""
        found = []
        for node in self.ring.nodes:
            if shard is not None and self._shard_of[node.index] != shard:
                continue
            for line in list(node.lines):
                if f'"event":"{event}"' in line:
                    at = datetime.fromisoformat(orjson.loads(line)["timestamp"].replace("Z", "+00:00"))
                    found += [at.timestamp()] if at.timestamp() > since else []
        return sorted(found)


@contextlib.contextmanager
def seated(
    shards: int,
    flags: Sequence[str],
    *,
    sample: str = SAMPLE,
    machines: Iterable[Machine] = (),
    closed: bool = False,
) -> Iterator[Seats]:
    """A fleet of a sample model with a seat a shard, whose processes have just been started.

    Args:
        shards: of the model.
        flags: for every node.
        sample: name of the model's recipe.
        machines: where each seat stands, the first one first; behind the last, all stand here.
        closed: a key lies beside the shards, and nodes speak in cipher, here too.
    """
    with tempfile.TemporaryDirectory(prefix="cascadia-seats-") as scratch:
        root = Path(scratch)
        checkpoint = make_checkpoint(root / "checkpoint", find_recipe(sample))
        export(checkpoint, root / "model", shards=shards, encodings=EXACT)
        with LocalRing(root / "model", root / "state", flags=("--threads", "1", *flags)) as ring:
            keys = _lock(root, ring.fleet) if closed else None
            seats = Seats(ring, shards, machines, keys)
            for shard in range(shards):
                seats.add(shard)
            yield seats


def _lock(root: Path, fleet: str) -> Keys:
    """Lay a new key beside the model in `root`."""
    made = make_fleet_key(fleet, root / "fleet.key")
    lay_key(made, root / "model", ())
    return Keys(made.pair, made.server)


def client_endpoint(seat: Seat) -> Endpoint:
    """Where a seat's node serves clients when it is the head."""
    return Endpoint(seat.machine.host, seat.client_port)
