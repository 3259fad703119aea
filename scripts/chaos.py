"""Chaos: nodes are killed and frozen, links cut, and clients vanish, while every answer is checked.

    python scripts/chaos.py --minutes 20 --streams 30 --nodes 6 --seed 1 --out docs/measurements/chaos.json
    python scripts/chaos.py --lab ...     as root: a network namespace for each node, whose link is cut too

A ring of processes with a small model, and standbys of some shards, the head's among them. A plan of events
is made from the seed, and written down with the results: the same seed and shape give the same plan. Every
token is compared with the answer to the same prompt before the storm; every request must end, once, in time;
afterwards no node may hold a slot, and no process that lived throughout may have grown or have opened files.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson
import psutil
from crowds.crowd import learn, prompts
from crowds.readers import DEADLINE_S, Readers
from crowds.seats import SAMPLE, Machine, Seats, client_endpoint, seated
from crowds.storm import GAP_S, Storm, plan
from netlab import Lab, missing

from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.local import COMMAND
from cascadia_p2p.logs import configure_logs

TOKENS: Final = 60
CONTROL: Final = 7600
CLIENT: Final = 7700
CONTEXT: Final = 256
PROMPTS: Final = 12
CALM: Final = 0.1
"""Share of the time at either end without a storm: memory is compared between these."""

GROWN_MB: Final = 8.0
"""What the allocators of a process may still take up behind the calm at the beginning."""

MORE_OPEN: Final = 4
"""Descriptors beyond those of before: connections to peers that are just made or ended."""

SETTLE_S: Final = 60.0


def shards_of(nodes: int) -> tuple[list[int], list[int]]:
    """The shards that have a standby, and the seats whose processes are never killed.

    The seats that are spared show whether memory is flat: they bear all else.
    """
    return sorted({0, nodes // 2, nodes - 1} - {1}), sorted({1, max(1, nodes - 2)})


class Watch:
    """Looks at the processes that are never killed."""

    def __init__(self, seats: Seats, spared: list[int]) -> None:
        self._processes = {seat: psutil.Process(seats.seats[seat].process.process.pid) for seat in spared}
        self.samples: list[tuple[float, dict[int, float]]] = []
        self.before = self.descriptors()

    async def look(self, every_s: float) -> None:
        """Note resident megabytes for ever."""
        started = time.monotonic()
        while True:
            resident = {seat: each.memory_info().rss / 1e6 for seat, each in self._processes.items()}
            self.samples.append((time.monotonic() - started, resident))
            await asyncio.sleep(every_s)

    def descriptors(self) -> dict[int, int]:
        """Open descriptors by seat."""
        return {seat: each.num_fds() for seat, each in self._processes.items()}

    def faults(self, behind_s: float) -> list[str]:
        """Which processes have grown since a time, or have more open than at first, in words."""
        after = self.descriptors()
        grown = [
            f"the process of seat {seat} has grown by {more} MB; {GROWN_MB} MB are allowed"
            for seat, more in self.grown(behind_s).items()
            if more > GROWN_MB
        ]
        return grown + [
            f"the process of seat {seat} has {after[seat]} descriptors open, {count} before"
            for seat, count in self.before.items()
            if after[seat] > count + MORE_OPEN
        ]

    def slopes(self, behind_s: float) -> dict[int, float]:
        """Megabytes an hour by seat, by least squares over the samples behind a time."""
        found = {}
        for seat in self._processes:
            points = [(at, resident[seat]) for at, resident in self.samples if at >= behind_s]
            mean_at = sum(at for at, _ in points) / len(points)
            mean = sum(value for _, value in points) / len(points)
            spread = sum((at - mean_at) ** 2 for at, _ in points)
            both = sum((at - mean_at) * (value - mean) for at, value in points)
            found[seat] = round(3600 * both / spread, 2) if spread else 0.0
        return found

    def grown(self, behind_s: float) -> dict[int, float]:
        """Megabytes by seat, from a time to the last sample."""
        first = next(resident for at, resident in self.samples if at >= behind_s)
        return {seat: round(value - first[seat], 2) for seat, value in self.samples[-1][1].items()}


async def rage(seats: Seats, args: argparse.Namespace, lab: Lab | None) -> dict[str, Any]:
    """Learn the answers, let the storm and the readers loose, and judge."""
    seconds, (standbys, spared) = args.minutes * 60, shards_of(args.nodes)
    for shard in standbys:
        seats.add(shard)
    head = seats.serving(await seats.whole(), 0)
    asked = prompts(PROMPTS, 60, 250, args.seed)
    known = await learn(client_endpoint(head).tcp, asked, TOKENS)
    watch = Watch(seats, spared)
    looking = asyncio.create_task(watch.look(min(1.0, seconds / 60)))
    calm = seconds * CALM
    started = time.monotonic()
    readers = Readers(seats.ring.fleet, known, args.seed, lambda: time.monotonic() - started > seconds)
    killed = [number for number in range(len(seats.seats)) if number not in spared]
    cuts = lab is not None
    events = plan(args.seed, seconds - 2 * calm, killed, len(seats.seats), cuts=cuts, gap_s=args.gap)
    storm = Storm(seats, events, None if lab is None else partial(cut, lab))

    async def later() -> None:
        await asyncio.sleep(calm)
        await storm.rage()

    async with asyncio.TaskGroup() as group:
        group.create_task(later())
        group.create_task(readers.read(args.streams))
    took = time.monotonic() - started
    outcome, faults = readers.outcome, list(readers.outcome.faults)
    taken = await at_rest(seats, faults)
    await asyncio.sleep(min(calm, 5.0))
    looking.cancel()
    faults += watch.faults(calm) + unexpected(seats)
    return {
        "seconds": round(took, 1),
        "requests": outcome.ended.total(),
        "ended": dict(outcome.ended),
        "tokens_compared": outcome.tokens,
        "longest_request_s": round(outcome.longest_s, 1),
        "deadline_s": DEADLINE_S,
        "rings_opened": len(seats.logged("ring_open", 0.0, shard=0)),
        "slots_taken_after": taken,
        "spared_seats": spared,
        "grown_mb": watch.grown(calm),
        "slope_mb_an_hour": watch.slopes(calm),
        "descriptors": {"before": watch.before, "after": watch.descriptors()},
        "events": count(storm.happened),
        "faults": faults[:40],
        "fault_count": len(faults),
        "plan": storm.happened,
    }


def cut(lab: Lab, seat: int, away: bool) -> None:
    """Drop what goes to a seat's machine and comes from it, or do so no more."""
    if away:
        lab.cut(seat, silent=True)
    else:
        lab.heal(seat)


async def at_rest(seats: Seats, faults: list[str]) -> list[int]:
    """Wait until no node holds a slot and the head has no request; slots that are still taken are a fault."""
    deadline = time.monotonic() + SETTLE_S
    try:
        await seats.whole(SETTLE_S)
    except CascadiaError as error:
        faults.append(str(error))
    while True:
        bodies = await asyncio.gather(*map(seats.status, seats.seats))
        taken = [-1 if body is None else int(body["data_thread"]["slots_taken"]) for body in bodies]
        requests = [body["requests"] for body in bodies if body is not None and body["is_head"]]
        idle = all(not each[name] for each in requests for name in ("pending", "running", "queued"))
        if (not any(taken) and idle) or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    if any(taken):
        faults.append(f"slots are still taken, by seat: {taken}")
    if not idle:
        faults.append(f"the head still has requests: {requests}")
    return taken


def unexpected(seats: Seats) -> list[str]:
    """What nodes said that they never should, and processes that ended by themselves."""
    found = []
    for node in seats.ring.nodes:
        bad = [line for line in node.lines if '"level":"error"' in line or "Traceback" in line]
        found += [f"node {node.index} said: {line}"[:600] for line in bad]
        code = node.process.poll()
        if code not in (None, -9):
            found.append(f"node {node.index} ended with exit code {code}")
    return found


def count(happened: list[dict[str, Any]]) -> dict[str, int]:
    """Events by kind, and those that were skipped."""
    kinds = ["skipped" if each["skipped"] else each["kind"] for each in happened]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=30)
    parser.add_argument("--nodes", type=int, default=6, help="shards; some have a standby beside")
    parser.add_argument(
        "--gap", type=float, default=GAP_S, help="seconds from one event to the next on average"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", default=SAMPLE, help="recipe of the model")
    parser.add_argument("--lab", action="store_true", help="a namespace for each node; needs root")
    parser.add_argument("--inside", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, help="directory for what each process said")
    return parser.parse_args()


def in_lab(args: argparse.Namespace) -> int:
    """Run all this inside a lab, on a machine of its own."""
    reason = missing()
    if reason is not None:
        print(f"chaos: {reason}", file=sys.stderr)
        return 1
    seats = args.nodes + len(shards_of(args.nodes)[0])
    with Lab(seats + 1, f"chaos-{os.getpid()}") as lab:
        command = [sys.executable, *sys.argv, "--inside", lab.name]
        return subprocess.run(lab.command(seats, command), check=False).returncode


def main() -> int:
    """Run it; 1 when anything was wrong."""
    args = parse()
    configure_logs("console", "error")
    if args.lab and args.inside is None:
        return in_lab(args)
    flags = ["--slots", str(args.streams), "--context", str(CONTEXT)]
    lab, machines = None, []
    if args.inside is not None:
        lab = Lab.existing(args.inside)
        flags.append("--insecure")
        machines = [
            Machine(lab.ip(host), lab.command(host, COMMAND), CONTROL, CLIENT)
            for host in range(lab.hosts - 1)
        ]
    with seated(args.nodes, flags, sample=args.sample, machines=machines) as seats:
        try:
            report = asyncio.run(rage(seats, args, lab))
        finally:
            if args.logs is not None:
                args.logs.mkdir(parents=True, exist_ok=True)
                for node in seats.ring.nodes:
                    (args.logs / f"node-{node.index}.jsonl").write_text("\n".join(node.lines) + "\n")
    shape = {
        name: getattr(args, name) for name in ("minutes", "streams", "nodes", "gap", "seed", "sample", "lab")
    }
    machine = {"machine": f"{platform.platform()}, {os.cpu_count()} cores", "load": os.getloadavg()[0]}
    out = orjson.dumps(
        shape | machine | report,
        option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS,
    )
    if args.out is not None:
        args.out.write_bytes(out)
    shown = {name: value for name, value in report.items() if name != "plan"}
    sys.stdout.buffer.write(orjson.dumps(shown, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS) + b"\n")
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
