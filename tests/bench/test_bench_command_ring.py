"""`bench` on a ring of three real processes whose stages wait: answers, counters, rates, and what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli.conftest import Run, run

from cascadia_p2p.bench.asking import Asked
from cascadia_p2p.bench.emulation import VOCAB, EmulatedRing, Emulation, emulated_ring
from cascadia_p2p.bench.prompts import ID_PROMPT, IdPrompts, Prompts
from cascadia_p2p.bench.running import Bench, LevelReport
from cascadia_p2p.cli.bench import node_asker, wrong_answers
from cascadia_p2p.client import AsyncClient
from cascadia_p2p.models.emulated.config import EmulatedConfig
from cascadia_p2p.simulate.fleet import Fleet, Hop, Stage, even_hops
from cascadia_p2p.simulate.tables import StageTable
from cascadia_p2p.types import Promise
from cascadia_p2p.workload import Protocol

__all__ = ["run"]

SLOTS = 6
TOKENS = 24
PROTOCOL = Protocol(tokens=TOKENS, least_requests=1)
LONGER = Protocol(tokens=4 * TOKENS, least_requests=1)


def fleet() -> Fleet:
    """Three stages that take 16 ms and 4 ms a row, the second a little longer."""
    tables = [StageTable(((1.0, 0.020 * more), (9.0, 0.052 * more))) for more in (1.0, 1.1, 1.0)]
    head = StageTable(((1.0, 0.002), (8.0, 0.002)))
    stages = tuple(
        Stage(f"stage {place}", table, 6, head if place == 2 else None) for place, table in enumerate(tables)
    )
    return Fleet("three", stages, even_hops(3, Hop(0.0005, 0.0002)), Promise(SLOTS, 256, 8))


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedRing]:
    said: list[str] = []
    # A node that a stalled machine keeps silent for a while is not lost: a ring formed anew is a fault here.
    limits = tmp_path_factory.mktemp("limits") / "limits.toml"
    limits.write_text("[limits]\ngone_s = 60.0\nstuck_s = 60.0\n")
    with ExitStack() as held:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CASCADIA_CONFIG", str(limits))
            made = held.enter_context(emulated_ring(Emulation(fleet(), 6144), said.append))
        yield made
    assert said[0].startswith("starting 3 nodes")


def measure(
    ring: EmulatedRing,
    *levels: int,
    model: EmulatedConfig | None = None,
    prompts: Prompts | None = None,
    protocol: Protocol = PROTOCOL,
) -> list[LevelReport]:
    async def go() -> list[LevelReport]:
        async with AsyncClient(ring.endpoint) as client:
            judged, asking = model or ring.model, prompts or IdPrompts(VOCAB)

            def judge(asked: Sequence[Asked]) -> list[str | None]:
                return wrong_answers(judged, asked, protocol.tokens)

            bench = Bench(client, node_asker(None), protocol, asking, judge, lambda sentence: None)
            await bench.run(levels)
            return bench.levels

    return asyncio.run(go())


def simulated(streams: int) -> float:
    found = Emulation(fleet(), 6144).simulated(streams, PROTOCOL).decode_tok_s
    assert found is not None
    return found


def rate(level: LevelReport) -> float:
    assert level.result is not None
    assert level.result.decode_tok_s is not None
    return level.result.decode_tok_s


def test_answers_and_counts_are_right(ring: EmulatedRing) -> None:
    (six,) = measure(ring, 6)
    assert six.faults == ()
    assert six.result is not None
    assert (six.result.requests, six.result.tokens) == (6, 6 * TOKENS)
    rows = 6 * (ID_PROMPT + TOKENS - 1)
    assert [node.rows for node in six.nodes] == [rows] * 3
    assert [node.stage for node in six.nodes] == [0, 1, 2]
    for node in six.nodes:
        assert node.cpu_ms_token is not None
        assert 0 < node.cpu_ms_token < 1e3
        assert node.parts["dense"] > 0
    assert six.bench_cpu_s > 0


@pytest.mark.parametrize("streams", [1, 6])
def test_rates_are_near_those_of_the_simulator(ring: EmulatedRing, streams: int) -> None:
    possible = simulated(streams)
    tried: list[float] = []
    for _ in range(20):
        (level,) = measure(ring, streams)
        tried.append(rate(level) / possible)
        # A machine that is busy with other things may spoil a try, but not all of them: it slows the ring, or
        # keeps this process from the first tokens until there are more, which looks like a faster ring.
        if 0.75 < tried[-1] < 1.05:
            return
    raise AssertionError(f"shares of the simulator's rate: {tried}")


def test_another_client_of_the_ring_is_noticed(ring: EmulatedRing) -> None:
    async def both() -> list[LevelReport]:
        other = asyncio.create_task(_ask_once(ring))
        levels = await asyncio.to_thread(measure, ring, 2, protocol=LONGER)
        await other
        return levels

    (level,) = asyncio.run(both())
    assert any("3 finished requests where 2 came here" in fault for fault in level.faults)
    assert any(fault.startswith("stage 2") and "rows where" in fault for fault in level.faults)


@dataclass(frozen=True)
class Same:
    """The same prompt for all, of three blocks of 64 and two ids."""

    words: str = "one prompt"

    def of(self, streams: int, request: int) -> tuple[int, ...]:
        return tuple(range(3 * 64 + 2))


def test_kept_prefixes_are_counted_and_change_no_answer(ring: EmulatedRing) -> None:
    (level,) = measure(ring, 1, prompts=Same(), protocol=Protocol(tokens=8, least_requests=3))
    assert level.faults == ()
    assert level.reused_tokens == 2 * 3 * 64
    assert [node.rows for node in level.nodes] == [3 * 64 + 2 + 7 + 2 * (2 + 7)] * 3


async def _ask_once(ring: EmulatedRing) -> None:
    async with AsyncClient(ring.endpoint) as client:
        # In the middle of the level, which takes seconds from when its first request is seen.
        # Counters have no event.
        while (await client.status())["requests"]["pending"] == 0:  # type: ignore[index,call-overload]  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await client.generate([1, 2, 3], max_tokens=4, ignore_eos=True)


def test_answers_of_other_stages_are_noticed(ring: EmulatedRing) -> None:
    other = EmulatedConfig(16, VOCAB, 256, ((0.0,),) * 4, (0.0,), ((0.0,),) * 4)
    (level,) = measure(ring, 2, model=other)
    assert [fault.partition(":")[0] for fault in level.faults] == ["request 0", "request 1"]
    assert "wrong from token" in level.faults[0]


def test_the_command_measures_a_ring_that_runs(ring: EmulatedRing, run: Run, tmp_path: Path) -> None:
    asked = ("--levels", "2,8", "--tokens", 8, "--requests", 1, "--note", "a try")
    done = run("bench", "--endpoint", ring.endpoint.tcp, *asked, "--json", tmp_path / "out.json")
    assert done.code == 0, done.err
    body = json.loads((tmp_path / "out.json").read_bytes())
    assert body["note"] == "a try"
    assert body["prompts"] == f"{ID_PROMPT} random token ids"
    assert body["protocol"] == {"tokens": 8, "gap_s": 0.015, "least_requests": 1}
    assert (body["complete"], body["emulated"]) == (True, None)
    assert body["ring"]["stages"] == 3
    assert [level["streams"] for level in body["levels"]] == [2, 8]
    assert [level["result"]["tokens"] for level in body["levels"]] == [16, 64]
    assert all(level["faults"] == [] and len(level["nodes"]) == 3 for level in body["levels"])
    assert f"holds {SLOTS} streams at once" in done.err


def test_a_table_has_a_line_a_level_and_the_curve_is_drawn(
    ring: EmulatedRing, run: Run, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    asked = ("--levels", "1", "--tokens", 2, "--requests", 1, "--plot", tmp_path / "curve.png")
    done = run("bench", "--endpoint", ring.endpoint.tcp, *asked)
    assert done.code == 0, done.err
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    head, line = [line.split() for line in done.out.splitlines() if line.strip()]
    assert head[0] == "streams"
    assert line[0] == "1"
    assert line[2] == "7.96", "the published rate stands beside it"
