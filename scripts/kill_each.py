"""Kill each node of a ring in turn while clients read their answers, and time how it goes on.

    python scripts/kill_each.py [--nodes 11] [--victims 1,2,...] [--moments prefill,token_1,...]
                                [--ways standby,restarted] [--streams 40] [--out FILE] [--check]

A ring of processes with a small model from a seed. Each case asks, kills one node with SIGKILL at its moment,
and compares every client's tokens with those of an undisturbed run; a repeated or lost token is a fault. With
`standby` every shard has a second node that waits; with `restarted` the node is started again at once. The
times are taken from the head's log and from the reader: killed to detected (`ring_closed`), to formed anew
(`ring_open`), to the first token behind that. JSON goes to stdout or FILE, a table to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from cascadia_p2p.client import AsyncClient, Client
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.local import HOST, LocalNode, LocalRing, free_ports
from cascadia_p2p.logs import configure_logs
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import find_recipe
from cascadia_p2p.shards.encodings import EXACT
from cascadia_p2p.shards.export import export
from cascadia_p2p.types import Endpoint

RECIPE = "tiny66"
MOMENTS = {"prefill": 0, "token_1": 1, "token_2": 2, "token_20": 20, "streams": 5}
"""Tokens that the reader has when the node is killed; at `streams` many clients read at once."""

PROMPT = 200
TOKENS = 60
START_S = 300.0
CASE_S = 120.0
BARS_S = {"detect": 0.3, "token": 3.0}
"""Killed to detected, and with a standby detected to the next token."""


@dataclass
class Case:
    """One kill.

    Args:
        shard: of the node that was killed.
        moment: see `MOMENTS`.
        way: who took its place: "standby" or "restarted".
        clients: readers at the time.
        right: readers whose tokens are those of an undisturbed run.
        detect_s: killed to detected.
        form_s: detected to formed anew.
        token_s: formed anew to the first reader's next token.
        errors: what other readers were told.
    """

    shard: int
    moment: str
    way: str
    clients: int
    right: int = 0
    detect_s: float | None = None
    form_s: float | None = None
    token_s: float | None = None
    errors: list[str] = field(default_factory=list)


def prompt(number: int) -> list[int]:
    """A prompt that no other client has."""
    return [4 + (number * 31 + place * 7) % 200 for place in range(PROMPT if number == 0 else 12)]


class Killing:
    """A ring of processes, whole again before each case.

    Args:
        ring: the processes.
        nodes: shards of the model.
        client: where the head serves clients.
    """

    def __init__(self, ring: LocalRing, nodes: int, client: Endpoint) -> None:
        self.ring, self.nodes, self.client = ring, nodes, client
        self.holders: dict[int, list[LocalNode]] = {shard: [] for shard in range(nodes)}
        self.expected: dict[int, tuple[int, ...]] = {}

    def start(self, shard: int, port: int | None = None) -> None:
        """Start one more node for a shard, or one again at its port."""
        node = self.ring.start_node("--shard", str(shard), "--client-port", str(self.client.port), port=port)
        self.holders[shard].append(node)

    def whole(self) -> dict[str, list[dict[str, object]]]:
        """Wait until every process that runs serves or stands by; the head's status."""
        deadline = time.monotonic() + START_S
        wanted = sum(map(len, self.holders.values()))
        while time.monotonic() < deadline:
            try:
                with Client(self.client, timeout_s=5) as client:
                    status = dict(client.status())
            except CascadiaError:
                status = {}
            ready = [node for node in status.get("nodes", ()) if node["claim"] in ("serving", "loaded")]  # type: ignore[union-attr,index,call-overload]
            if status.get("state") == "open" and len(ready) == wanted:
                return status  # type: ignore[return-value]
            time.sleep(0.1)
        raise CascadiaError(f"the ring is not whole after {START_S:g} s\n{self.ring.tail()}")

    def serving(self, shard: int) -> LocalNode:
        """The process that serves a shard now."""
        stage = self.whole()["stages"][shard]
        return next(node for node in self.holders[shard] if str(node.control) == stage["control"])

    def head_times(self, name: str, since: float) -> list[float]:
        """When each of the shard 0 processes logged an event after a time, earliest first."""
        found = []
        for node in self.holders[0]:
            for line in list(node.lines):
                if f'"event":"{name}"' in line:
                    at = datetime.fromisoformat(json.loads(line)["timestamp"].replace("Z", "+00:00"))
                    found += [at.timestamp()] if at.timestamp() > since else []
        return sorted(found)

    async def undisturbed(self, clients: int) -> None:
        """Learn what each client must get."""
        async with AsyncClient(self.client, timeout_s=CASE_S) as client:
            asked = [client.generate(prompt(i), max_tokens=TOKENS, ignore_eos=True) for i in range(clients)]
            for number, reply in enumerate(await asyncio.gather(*asked)):
                self.expected[number] = reply.token_ids

    async def case(self, case: Case) -> Case:
        """Ask, kill at the moment, and wait for all answers."""
        victim = self.serving(case.shard)
        killed: list[float] = []
        arrivals: list[float] = []

        def kill() -> None:
            victim.process.kill()
            killed.append(time.time())
            victim.process.wait()
            self.holders[case.shard].remove(victim)
            self.start(case.shard, victim.port)

        async def read(client: AsyncClient, number: int) -> tuple[int, ...]:
            answer = client.stream(prompt(number), max_tokens=TOKENS, ignore_eos=True)
            ids: list[int] = []
            if number == 0 and MOMENTS[case.moment] == 0:
                asyncio.get_running_loop().call_later(0.02, kill)
            async for piece in answer:
                ids += piece.token_ids
                if number == 0 and piece.token_ids:
                    arrivals.append(time.time())
                if number == 0 and not killed and len(ids) >= MOMENTS[case.moment] > 0:
                    kill()
            return tuple(ids) if tuple(ids) == answer.reply.token_ids else ()

        async with AsyncClient(self.client, timeout_s=CASE_S) as client:
            reading = [read(client, number) for number in range(case.clients)]
            for number, ids in enumerate(await asyncio.gather(*reading, return_exceptions=True)):
                if isinstance(ids, BaseException):
                    case.errors.append(str(ids))
                else:
                    case.right += ids == self.expected[number]
        self._time(case, killed[0], arrivals)
        return case

    def _time(self, case: Case, killed: float, arrivals: Sequence[float]) -> None:
        closed, opened = self.head_times("ring_closed", killed), self.head_times("ring_open", killed)
        after = [at for at in arrivals if opened and at > opened[-1]]
        if closed:
            case.detect_s = round(closed[0] - killed, 3)
        if closed and opened:
            case.form_s = round(opened[-1] - closed[0], 3)
        if after:
            case.token_s = round(after[0] - opened[-1], 3)


def run(args: argparse.Namespace, scratch: Path) -> list[Case]:
    """All cases, one after the other."""
    checkpoint = make_checkpoint(scratch / "checkpoint", find_recipe(RECIPE))
    export(checkpoint, scratch / "model", shards=args.nodes, encodings=EXACT)
    flags = ("--threads", "1", "--slots", str(max(4, args.streams)), "--context", "512", "--no-mdns")
    client = Endpoint(HOST, free_ports())
    cases = []
    with LocalRing(scratch / "model", scratch / "state", flags=flags) as ring:
        killing = Killing(ring, args.nodes, client)
        for shard in range(args.nodes):
            killing.start(shard)
        killing.whole()
        asyncio.run(killing.undisturbed(args.streams))
        for way in sorted(args.ways):
            if way == "standby":
                for shard in args.victims:
                    killing.start(shard)
            for shard in args.victims:
                for moment in args.moments:
                    clients = args.streams if moment == "streams" else 1
                    done = asyncio.run(killing.case(Case(shard, moment, way, clients)))
                    cases.append(done)
                    print(json.dumps(asdict(done)), file=sys.stderr, flush=True)
                    if args.out is not None:
                        args.out.write_text(report(args.nodes, cases))
    return cases


def table(cases: Sequence[Case]) -> str:
    """Medians and the worst, by way and moment."""
    lines = [
        "| way | moment | kills | answers right | detect s | form s | next token s |",
        "|---|---|---|---|---|---|---|",
    ]
    for way in dict.fromkeys(case.way for case in cases):
        for moment in dict.fromkeys(case.moment for case in cases):
            group = [case for case in cases if (case.way, case.moment) == (way, moment)]
            cells = [way, moment, str(len(group))]
            cells.append(f"{sum(c.right for c in group)} of {sum(c.clients for c in group)}")
            for name in ("detect_s", "form_s", "token_s"):
                values = [value for case in group if (value := getattr(case, name)) is not None]
                cells.append(f"{statistics.median(values):.3f} ({max(values):.3f})" if values else "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def faults(cases: Sequence[Case]) -> list[str]:
    """What does not keep to the bars, in words."""
    found = []
    for case in cases:
        name = f"shard {case.shard} killed at {case.moment}, {case.way}"
        if case.right != case.clients:
            found.append(f"{name}: {case.right} of {case.clients} answers are right {case.errors[:1]}")
        if case.detect_s is None or case.detect_s > BARS_S["detect"]:
            found.append(f"{name}: detected after {case.detect_s} s")
        took = None if case.token_s is None else (case.form_s or 0.0) + case.token_s
        if case.way == "standby" and (took is None or took > BARS_S["token"]):
            found.append(f"{name}: the next token came {took} s after detection")
    return found


def report(nodes: int, cases: Sequence[Case]) -> str:
    """All cases so far, as JSON."""
    result = {
        "nodes": nodes,
        "model": RECIPE,
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "faults": faults(cases),
        "cases": [asdict(case) for case in cases],
    }
    return json.dumps(result, indent=1) + "\n"


def main() -> int:
    """Run, print, and judge with `--check`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=11)
    parser.add_argument("--victims", default="", help="shards, as in 1,2,3 (default: all but the head's)")
    parser.add_argument("--moments", default=",".join(MOMENTS))
    parser.add_argument("--ways", default="restarted,standby")
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="end with 1 when a bar is missed")
    args = parser.parse_args()
    args.victims = [int(each) for each in args.victims.split(",") if each] or list(range(1, args.nodes))
    args.moments, args.ways = args.moments.split(","), args.ways.split(",")
    configure_logs("console", "error")
    with tempfile.TemporaryDirectory(prefix="kill-each-") as scratch:
        cases = run(args, Path(scratch))
    missed = faults(cases)
    if args.out is None:
        print(report(args.nodes, cases), end="")
    print(table(cases), *missed, sep="\n", file=sys.stderr)
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
