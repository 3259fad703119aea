"""What answers in pieces cost a ring: streamed and unstreamed requests in turns, on one ring of processes.

    python scripts/bench_streaming.py --json docs/measurements/bench_streaming.json

For each number of streams: tokens a second streamed and not, their ratio, and CPU seconds a token of the head
(its event loop, its data thread, the rest of its process), of one other node on average, and of the client.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import orjson
import psutil

from cascadia_p2p.client import AsyncClient
from cascadia_p2p.local import LocalRing
from cascadia_p2p.logs import configure_logs
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import find_recipe
from cascadia_p2p.shards.encodings import EXACT
from cascadia_p2p.shards.export import export
from cascadia_p2p.types import Endpoint

SAMPLE: Final = "tiny66"
START_S: Final = 300.0
PROMPT: Final = 8


@dataclass(slots=True)
class Spent:
    """CPU seconds so far."""

    loop: float
    threads: dict[int, float]
    head: float
    others: float
    client: float

    @classmethod
    def read(cls, head: psutil.Process, others: list[psutil.Process]) -> Spent:
        """What the ring and this process have spent."""
        threads = {each.id: each.user_time + each.system_time for each in head.threads()}
        return cls(
            loop=threads.pop(head.pid),
            threads=threads,
            head=_cpu(head),
            others=sum(map(_cpu, others)),
            client=time.process_time(),
        )


@dataclass(slots=True)
class Turn:
    """One measurement: tokens a second, and milliseconds of CPU a token by who spent them."""

    rate: float
    loop_ms: float
    data_ms: float
    head_ms: float
    other_ms: float
    client_ms: float
    pieces: float = 0.0


@dataclass(slots=True)
class Level:
    """All turns of one number of streams, streamed and not."""

    streams: int
    turns: dict[bool, list[Turn]] = field(default_factory=lambda: {False: [], True: []})

    def summary(self) -> dict[str, object]:
        """Medians, and the ratio of the rates: the median over neighbouring turns."""
        pairs = zip(self.turns[True], self.turns[False], strict=True)
        shown: dict[str, object] = {
            "streams": self.streams,
            "ratio": round(statistics.median(one.rate / other.rate for one, other in pairs), 4),
        }
        for streamed, turns in self.turns.items():
            names = [name for name in Turn.__dataclass_fields__ if turns[0].pieces or name != "pieces"]
            shown["streamed" if streamed else "unstreamed"] = {
                name: round(statistics.median(getattr(turn, name) for turn in turns), 4) for name in names
            }
        return shown


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def ask_all(client: AsyncClient, streams: int, tokens: int, *, streamed: bool) -> int:
    """Ask so many requests at once; the number of pieces that came."""

    async def one(number: int) -> int:
        prompt = [1 + (number * 7 + place) % 250 for place in range(PROMPT)]
        if not streamed:
            reply = await client.generate(prompt, max_tokens=tokens, ignore_eos=True)
            assert reply.usage.completion_tokens == tokens
            return 0
        count = 0
        async with client.stream(prompt, max_tokens=tokens, ignore_eos=True) as answer:
            async for _ in answer:
                count += 1
            assert answer.reply.usage.completion_tokens == tokens
        return count

    return sum(await asyncio.gather(*map(one, range(streams))))


async def measure(ring: LocalRing, endpoint: Endpoint, args: argparse.Namespace) -> list[Level]:
    """All levels, the two kinds in turns."""
    head, *others = (psutil.Process(node.process.pid) for node in ring.nodes)
    levels = []
    async with AsyncClient(endpoint) as client:
        await ask_all(client, 4, 32, streamed=True)
        for streams in args.streams:
            level = Level(streams)
            tokens = max(args.least, args.tokens // streams)
            for number in range(args.rounds):
                for streamed in (True, False) if number % 2 else (False, True):
                    turn = await _turn(client, head, others, streams, tokens, streamed=streamed)
                    level.turns[streamed].append(turn)
            levels.append(level)
            print(orjson.dumps(level.summary()).decode(), flush=True)
    return levels


async def _turn(
    client: AsyncClient,
    head: psutil.Process,
    others: list[psutil.Process],
    streams: int,
    tokens: int,
    *,
    streamed: bool,
) -> Turn:
    before, started = Spent.read(head, others), time.perf_counter()
    pieces = await ask_all(client, streams, tokens, streamed=streamed)
    seconds, after = time.perf_counter() - started, Spent.read(head, others)
    count = streams * tokens
    spent = {tid: each - before.threads.get(tid, 0.0) for tid, each in after.threads.items()}

    def ms(cpu: float) -> float:
        return 1e3 * cpu / count

    return Turn(
        rate=count / seconds,
        loop_ms=ms(after.loop - before.loop),
        data_ms=ms(max(spent.values())),
        head_ms=ms(after.head - before.head),
        other_ms=ms((after.others - before.others) / max(1, len(others))),
        client_ms=ms(after.client - before.client),
        pieces=pieces / count,
    )


def main() -> None:
    """Start a ring and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=11)
    parser.add_argument("--checkpoint", type=Path, help="a model in place of the small sample")
    parser.add_argument(
        "--streams", type=lambda text: [int(each) for each in text.split(",")], default=[1, 11, 40]
    )
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of all streams of one turn together")
    parser.add_argument("--least", type=int, default=24, help="tokens of one stream, at least")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    configure_logs("console", "error")
    slots = max(args.streams)
    with tempfile.TemporaryDirectory(prefix="cascadia-bench-") as scratch:
        root = Path(scratch)
        checkpoint = args.checkpoint or make_checkpoint(root / "checkpoint", find_recipe(SAMPLE))
        export(checkpoint, root / "model", shards=args.nodes, encodings=EXACT)
        flags = ("--threads", "1", "--slots", str(slots), "--context", "2048")
        with LocalRing(root / "model", root / "state", flags=flags) as ring:
            for shard in range(args.nodes):
                ring.start_node("--shard", str(shard))
            served = ring.wait_for("clients_served", START_S)
            endpoint = Endpoint.parse(str(served.fields["endpoint"]))
            levels = asyncio.run(measure(ring, endpoint, args))
    if args.json is not None:
        body = {
            "machine": {
                "cpus": os.cpu_count(),
                "python": platform.python_version(),
                "system": platform.platform(),
            },
            "nodes": args.nodes,
            "model": args.checkpoint.name if args.checkpoint else SAMPLE,
            "levels": [level.summary() for level in levels],
        }
        args.json.write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
