"""Kill each node of a ring in turn while clients read their answers, and time how it goes on.

    python scripts/kill_each.py [--nodes 11] [--victims 0,1,...] [--moments prefill,token_1,...]
                                [--ways standby,restarted] [--pairs] [--streams 40] [--closed]
                                [--out FILE] [--check]
    python scripts/kill_each.py --quick

A ring of processes with a small model from a seed. Each case asks, kills one node with SIGKILL at its moment,
and compares every client's tokens with those of an undisturbed run; a repeated or lost token is a fault. With
`standby` the shard has a second node that waits, and the killed one is started again for the next case; with
`restarted` the node is started again at once. Shard 0 is the head's: there the client library comes back by
itself. `--pairs` kills two nodes at once, neighbours and others. The times are taken from the nodes' logs and
from the readers: killed to detected (`ring_closed`), to formed anew (`ring_open`), to the next token of any
reader behind that, and of the reader with the longest prompt, which is prefilled last. With `--closed` nodes
have a key, and all that they say is encrypted. JSON goes to stdout or FILE, a table to stderr. `--quick` is a
bounded sample: three shards and few cases.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from crowds.seats import SAMPLE, Machine, Seats, client_endpoint, seated

from cascadia_p2p.client import AsyncClient, Options
from cascadia_p2p.local import free_ports
from cascadia_p2p.logs import configure_logs

MOMENTS: Final = {"prefill": 0, "token_1": 1, "token_2": 2, "token_20": 20, "streams": 5}
"""Tokens that the reader has when the node is killed; at `streams` many clients read at once."""

WAYS: Final = ("standby", "restarted")
PROMPT: Final = 200
TOKENS: Final = 60
CASE_S: Final = 120.0
BARS_S: Final = {"detect": 0.3, "token": 3.0}
"""Killed to detected, and with a standby detected to the next token."""

Group: TypeAlias = tuple[str, tuple[int, ...], tuple[str, ...]]
"""Way, shards that are killed together, and moments."""

TIMES: Final = ("detect_s", "form_s", "any_token_s", "token_s")


@dataclass
class Case:
    """One kill.

    Args:
        shards: of the nodes that were killed, one or two.
        moment: see `MOMENTS`.
        way: who took their places: "standby" or "restarted".
        clients: readers at the time.
        right: readers whose tokens are those of an undisturbed run.
        detect_s: killed to detected.
        form_s: detected to formed anew.
        any_token_s: formed anew to the next token of any reader.
        token_s: formed anew to the next token of the reader with the longest prompt.
        errors: what other readers were told.
    """

    shards: tuple[int, ...]
    moment: str
    way: str
    clients: int
    right: int = 0
    detect_s: float | None = None
    form_s: float | None = None
    any_token_s: float | None = None
    token_s: float | None = None
    errors: list[str] = field(default_factory=list)


def prompt(number: int) -> list[int]:
    """A prompt that no other client has; that of client 0 is the longest."""
    return [4 + (number * 31 + place * 7) % 200 for place in range(PROMPT if number == 0 else 12)]


class Killing:
    """A ring of processes, whole again before each case.

    Args:
        seats: the processes.
        tokens: of each answer.
    """

    def __init__(self, seats: Seats, tokens: int) -> None:
        self.seats = seats
        self.client = client_endpoint(seats.seats[0])
        self.tokens = tokens
        self.expected: dict[int, tuple[int, ...]] = {}

    async def undisturbed(self, clients: int) -> None:
        """Learn what each client must get."""
        await self.seats.whole()
        async with AsyncClient(self.client, timeout_s=CASE_S) as client:
            options: Options = {"max_tokens": self.tokens, "ignore_eos": True}
            asked = [client.generate(prompt(i), **options) for i in range(clients)]
            for number, reply in enumerate(await asyncio.gather(*asked)):
                self.expected[number] = reply.token_ids

    async def case(self, case: Case, *, again: bool) -> Case:
        """Ask, kill at the moment, and wait for all answers.

        Args:
            case: what to do; it is filled and returned.
            again: who was replaced by a standby becomes the standby for the next case; else its seat is gone.
        """
        body = await self.seats.whole()
        victims = [self.seats.serving(body, shard) for shard in case.shards]
        killed: list[float] = []
        arrivals: list[tuple[float, int]] = []

        def kill() -> None:
            killed.append(self.seats.kill(*victims))
            if case.way == "restarted":
                for seat in victims:
                    self.seats.start(seat)

        async def read(client: AsyncClient, number: int) -> tuple[int, ...]:
            answer = client.stream(prompt(number), max_tokens=self.tokens, ignore_eos=True)
            ids: list[int] = []
            if number == 0 and MOMENTS[case.moment] == 0:
                asyncio.get_running_loop().call_later(0.02, kill)
            async for piece in answer:
                ids += piece.token_ids
                if piece.token_ids:
                    arrivals.append((time.time(), number))
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
        if case.way == "standby":
            for seat in victims:
                if again:
                    self.seats.start(seat)
                else:
                    self.seats.seats.remove(seat)
        return case

    def _time(self, case: Case, killed: float, arrivals: Sequence[tuple[float, int]]) -> None:
        # A head that died can not say when; the others do.
        closed = self.seats.logged("ring_closed", killed, shard=None if 0 in case.shards else 0)
        opened = self.seats.logged("ring_open", killed, shard=0)
        if closed:
            case.detect_s = round(closed[0] - killed, 3)
        if closed and opened:
            case.form_s = round(opened[-1] - closed[0], 3)
        after = [(at, number) for at, number in arrivals if opened and at > opened[-1]]
        if after:
            case.any_token_s = round(after[0][0] - opened[-1], 3)
        longest = [at for at, number in after if number == 0]
        if longest:
            case.token_s = round(longest[0] - opened[-1], 3)


def plan(args: argparse.Namespace) -> list[Group]:
    """All cases, those that need the same standbys together."""
    if args.quick:
        return [("standby", (0,), ("token_2",)), ("restarted", (1,), ("streams",))]
    together: list[tuple[tuple[int, ...], tuple[str, ...]]]
    together = [((shard,), tuple(args.moments)) for shard in args.victims]
    if args.pairs:
        count = args.nodes
        neighbours = [(0, 1), (1, 2), (count // 2, count // 2 + 1), (0, count - 1)]
        others = [(0, count // 2), (1, count - 2), (2, count - 1)]
        together += [(pair, ("token_20", "streams")) for pair in (*neighbours, *others)]
    return [(way, shards, moments) for way in args.ways for shards, moments in together]


async def run(seats: Seats, args: argparse.Namespace) -> list[Case]:
    """All cases, one after the other."""
    killing = Killing(seats, args.tokens)
    await killing.undisturbed(args.streams)
    cases: list[Case] = []
    for way, shards, moments in plan(args):
        if way == "standby":
            for shard in shards:
                seats.add(shard)
        for moment in moments:
            clients = args.streams if moment == "streams" else 1
            cases.append(await killing.case(Case(shards, moment, way, clients), again=moment != moments[-1]))
            print(json.dumps(asdict(cases[-1])), file=sys.stderr, flush=True)
            if args.out is not None:
                args.out.write_text(report(args, cases))
    return cases


def table(cases: Sequence[Case]) -> str:
    """Medians and the worst, by way and moment."""
    lines = [
        "| way | killed | moment | cases | answers right "
        "| detect s | form s | next token s | longest prompt's s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys((case.way, kind(case), case.moment) for case in cases)
    for way, killed, moment in kinds:
        group = [case for case in cases if (case.way, kind(case), case.moment) == (way, killed, moment)]
        cells = [way, killed, moment, str(len(group))]
        cells.append(f"{sum(c.right for c in group)} of {sum(c.clients for c in group)}")
        for name in TIMES:
            values = [value for case in group if (value := getattr(case, name)) is not None]
            cells.append(f"{statistics.median(values):.3f} ({max(values):.3f})" if values else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def kind(case: Case) -> str:
    """What was killed, in words."""
    if len(case.shards) > 1:
        return "two, the head too" if 0 in case.shards else "two"
    return "the head" if 0 in case.shards else "one"


def faults(cases: Sequence[Case]) -> list[str]:
    """What does not keep to the bars, in words."""
    found = []
    for case in cases:
        which = ", ".join(map(str, case.shards))
        name = f"{'shards' if len(case.shards) > 1 else 'shard'} {which} killed at {case.moment}, {case.way}"
        if case.right != case.clients:
            found.append(f"{name}: {case.right} of {case.clients} answers are right {case.errors[:1]}")
        if case.detect_s is None or case.detect_s > BARS_S["detect"]:
            found.append(f"{name}: detected after {case.detect_s} s")
        took = None if case.any_token_s is None else round((case.form_s or 0.0) + case.any_token_s, 3)
        if case.way == "standby" and (took is None or took > BARS_S["token"]):
            found.append(f"{name}: the next token came {took} s after detection")
    return found


def report(args: argparse.Namespace, cases: Sequence[Case]) -> str:
    """All cases so far, as JSON."""
    result = {
        "nodes": args.nodes,
        "model": args.sample,
        "closed": args.closed,
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "faults": faults(cases),
        "cases": [asdict(case) for case in cases],
    }
    return json.dumps(result, indent=1) + "\n"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=11)
    parser.add_argument("--victims", help="shards, as in 0,1,2 (default: all)")
    parser.add_argument("--moments", default=",".join(MOMENTS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--pairs", action="store_true", help="also two nodes at once")
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--sample", default=SAMPLE, help="recipe of the model")
    parser.add_argument("--closed", action="store_true", help="with a key: all is encrypted")
    parser.add_argument("--quick", action="store_true", help="a bounded sample of all this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="end with 1 when a bar is missed")
    args = parser.parse_args()
    args.tokens = TOKENS
    if args.quick:
        # Its small model is quick, and some of each answer must be left when the node is killed.
        args.nodes, args.streams, args.sample, args.tokens = 3, 6, "tiny12", 300
    listed = range(args.nodes) if args.victims is None else args.victims.split(",")
    args.victims = [int(each) for each in listed if each != ""]
    args.moments, args.ways = args.moments.split(","), args.ways.split(",")
    return args


def main() -> int:
    """Run, print, and judge with `--check`."""
    args = parse()
    configure_logs("console", "error")
    flags = ("--slots", str(max(4, args.streams)), "--context", "512", "--no-mdns")
    # Who is killed leaves its port to the next head; clients are told one address.
    machine = Machine(client_port=free_ports())
    machines = itertools.repeat(machine)
    with seated(args.nodes, flags, sample=args.sample, machines=machines, closed=args.closed) as seats:
        cases = asyncio.run(run(seats, args))
    missed = faults(cases)
    if args.out is None:
        print(report(args, cases), end="")
    print(table(cases), *missed, sep="\n", file=sys.stderr)
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
