"""Runs levels one after another and keeps what each gave, what its nodes counted, and what was wrong."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cascadia_p2p.bench.asking import Asked, run_cohort
from cascadia_p2p.bench.counting import NodeAsker, NodeCount, RingCount, count_ring, faults
from cascadia_p2p.bench.prompts import Prompts
from cascadia_p2p.client import AsyncClient
from cascadia_p2p.workload import LevelResult, Protocol, level_result


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """What a level took on one node.

    Args:
        stage: its place in the ring.
        node: its id.
        frames, rows: that it computed.
        cpu_s: of its process; None when it does not tell.
        cpu_ms_token: the same for a token of an answer.
        idle_cpu_share: of a core, that the process takes while nobody asks.
        extra_cpu_ms_token: CPU for a token of an answer beyond that.
        busy_s, wait_s, send_s: in the stage, waiting for frames, handing them over.
        parts: seconds in the stage by part of its work.
    """

    stage: int
    node: str
    frames: int
    rows: int
    cpu_s: float | None
    cpu_ms_token: float | None
    idle_cpu_share: float | None
    extra_cpu_ms_token: float | None
    busy_s: float
    wait_s: float
    send_s: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class LevelReport:
    """One level.

    Args:
        streams: at once.
        result: None when no request gave a token.
        faults: what was wrong, a sentence each.
        nodes: what it took on each, in the ring's order.
        reused_tokens: of prompts, that kept prefixes saved.
        bench_cpu_s: of this process.
        wall_s: from the level's start to its end.
        load: the machine's load average at its end, where there is one.
        simulated: what the simulator gives for the same stage times, with software that costs nothing; None
            for a ring that computes.
    """

    streams: int
    result: LevelResult | None
    faults: tuple[str, ...]
    nodes: tuple[NodeLoad, ...]
    reused_tokens: int
    bench_cpu_s: float
    wall_s: float
    load: float | None
    simulated: LevelResult | None = None

    @property
    def overhead(self) -> float | None:
        """Share of the simulated decode rate that is missing: what all but stage times and hops takes."""
        pair = (self.result, self.simulated)
        rates = [None if each is None else each.decode_tok_s for each in pair]
        return None if rates[0] is None or not rates[1] else 1.0 - rates[0] / rates[1]

    @property
    def bench_share(self) -> float:
        """Share of one core that this process took."""
        return self.bench_cpu_s / self.wall_s if self.wall_s > 0 else 0.0


IDLE_S = 3.0
"""How long the ring is watched while nobody asks, in seconds."""

MOST_FAULTS = 12
"""Sentences that are kept of one level."""


@dataclass(slots=True)
class Bench:
    """A run on one ring.

    Args:
        client: to the head.
        ask: asks its other nodes for their counters; None where they may not be asked.
        protocol: what is asked.
        prompts: the texts or ids.
        judge: what is wrong with each of a level's answers; None where nothing is.
        tell: takes a sentence about how far it is.
        simulate: what a level of so many streams should give at best; None where that is not known.
        levels: those that are complete.
        idle_cpu: share of a core that each node takes while nobody asks, by its id.
    """

    client: AsyncClient
    ask: NodeAsker | None
    protocol: Protocol
    prompts: Prompts
    judge: Callable[[Sequence[Asked]], Sequence[str | None]]
    tell: Callable[[str], None]
    simulate: Callable[[int], LevelResult | None] = lambda streams: None
    levels: list[LevelReport] = field(default_factory=list)
    idle_cpu: dict[str, float] = field(default_factory=dict)

    async def run(self, levels: Sequence[int]) -> None:
        """Run all levels; those that are complete stay in `levels` whatever ends it.

        Raises:
            UnreachableError: the head can not be reached, or went away.
        """
        for streams in levels:
            self.levels.append(await self._level(streams))

    async def watch_idle(self) -> None:
        """Fill in `idle_cpu`, before the first level.

        Raises:
            UnreachableError: the head can not be reached, or went away.
        """
        begin, before = time.perf_counter(), await count_ring(self.client, self.ask)
        await asyncio.sleep(IDLE_S)
        after = await count_ring(self.client, self.ask)
        wall = time.perf_counter() - begin
        for old, new in zip(before.nodes, after.nodes, strict=False):
            if old.node == new.node and old.cpu_s is not None and new.cpu_s is not None:
                self.idle_cpu[new.node] = (new.cpu_s - old.cpu_s) / wall

    async def _level(self, streams: int) -> LevelReport:
        count = self.protocol.cohorts(streams)
        before = await count_ring(self.client, self.ask)
        cpu, begin = time.process_time(), time.perf_counter()
        cohorts: list[list[Asked]] = []
        for cohort in range(count):
            prompts = [self.prompts.of(streams, cohort * streams + place) for place in range(streams)]
            cohorts.append(await run_cohort(self.client, prompts, self.protocol))
            self._tell_cohort(streams, cohorts, count)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - begin
        after = await count_ring(self.client, self.ask)
        asked = [each for cohort in cohorts for each in cohort]
        timelines = [[each.timeline for each in cohort if each.timeline is not None] for cohort in cohorts]
        tokens = sum(len(each.reply.token_ids) for each in asked if each.reply is not None)
        return LevelReport(
            streams=streams,
            result=level_result(streams, timelines) if any(timelines) else None,
            faults=tuple(self._faults(asked) + faults(before, after, asked)),
            nodes=_loads(before, after, tokens, wall, self.idle_cpu),
            reused_tokens=after.reused - before.reused,
            bench_cpu_s=cpu,
            wall_s=wall,
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            simulated=self.simulate(streams),
        )

    def _tell_cohort(self, streams: int, cohorts: Sequence[Sequence[Asked]], count: int) -> None:
        answered = sum(each.fault is None for each in cohorts[-1])
        self.tell(f"{streams} streams: cohort {len(cohorts)} of {count}, {answered} answers")

    def _faults(self, asked: Sequence[Asked]) -> list[str]:
        found = []
        for number, (each, judged) in enumerate(zip(asked, self.judge(asked), strict=True)):
            if (fault := each.fault or judged) is not None:
                found.append(f"request {number}: {fault}")
        more = len(found) - MOST_FAULTS
        return found if more <= 0 else [*found[:MOST_FAULTS], f"{more} more requests like these"]


def _loads(
    before: RingCount, after: RingCount, tokens: int, wall_s: float, idle: Mapping[str, float]
) -> tuple[NodeLoad, ...]:
    """What each node did between two counts, so many seconds apart, for so many tokens of answers."""
    if before.epoch != after.epoch:
        return ()
    pairs = zip(before.nodes, after.nodes, strict=True)
    loads = (_load(old, new, tokens, wall_s, idle.get(new.node)) for old, new in pairs)
    return tuple(load for load in loads if load is not None)


def _load(old: NodeCount, new: NodeCount, tokens: int, wall_s: float, idle: float | None) -> NodeLoad | None:
    if old.work is None or new.work is None:
        return None
    told = old.cpu_s is not None and new.cpu_s is not None
    cpu = (new.cpu_s or 0.0) - (old.cpu_s or 0.0) if told else None
    parts = {name: new.work.seconds[name] - old.work.seconds.get(name, 0.0) for name in new.work.seconds}
    parts["other"] = new.work.other_s - old.work.other_s
    return NodeLoad(
        stage=new.stage,
        node=new.node,
        frames=new.work.frames - old.work.frames,
        rows=new.work.rows - old.work.rows,
        cpu_s=cpu,
        cpu_ms_token=1e3 * cpu / tokens if cpu is not None and tokens else None,
        idle_cpu_share=idle,
        extra_cpu_ms_token=(
            1e3 * (cpu - idle * wall_s) / tokens if cpu is not None and idle is not None and tokens else None
        ),
        busy_s=new.work.busy_s - old.work.busy_s,
        wait_s=new.work.wait_s - old.work.wait_s,
        send_s=new.work.send_s - old.work.send_s,
        parts={name: each for name, each in parts.items() if each},
    )
