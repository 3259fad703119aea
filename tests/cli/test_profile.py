"""`profile`: what it measures, what it keeps, and who reads that."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Run
from cluster.conftest import Shards
from cluster.fleet import fleet

from cascadia_p2p.doctor import bandwidth
from cascadia_p2p.doctor.bandwidth import Bandwidth
from cascadia_p2p.doctor.stage_profile import AHEAD
from cascadia_p2p.engine.stage import Stage
from cascadia_p2p.engine.timing import WorkPart
from cascadia_p2p.planning.measured import MeasuredNode, Timed, read_measured

UNWRITABLE = Path("/proc")
"""A directory of Linux in which nobody can make a file, not even root."""


@pytest.fixture(scope="module")
def model(shards: Shards) -> Path:
    """Layers 0 to 4, two of them dense, and 5 to 11 with the head."""
    return shards("tiny12", (5, 7))


@pytest.fixture(autouse=True)
def bus(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Memory that is fast, then slow from the sixth sample on; what was asked for."""
    asked: list[float] = []
    rates = itertools.chain([50e9] * 5, itertools.repeat(20e9))

    def measure(threads: int, seconds: float = 1.0, size: int | None = None) -> Bandwidth:
        asked.append(seconds)
        rate = next(rates)
        return Bandwidth(rate, rate, rate, 5, threads)

    monkeypatch.setattr(bandwidth, "measure_bandwidth", measure)
    return asked


def profiled(run: Run, model: Path, state: Path, *flags: object) -> MeasuredNode:
    done = run(
        *("profile", "--model", model, "--state-dir", state, "--threads", 1, "--positions", 40),
        *("--rows", "1,4", "--json", *flags),
    )
    assert (done.code, done.err) == (0, "")
    (node,) = read_measured(done.out.encode(), "stdout")
    return node


def times(node: MeasuredNode) -> dict[tuple[Timed, int], float]:
    return {(each.part, each.rows): each.seconds for each in node.times}


def test_the_parts_of_a_first_shard(run: Run, model: Path, tmp_path: Path, bus: list[float]) -> None:
    node = profiled(run, model, tmp_path / "state", "--shard", 0)
    assert [(each.kind, each.rows) for each in node.frames] == [("prefill", 40), ("decode", 1), ("decode", 4)]
    # No head: it is with the last layer.
    assert set(times(node)) == {
        (part, rows) for part in (Timed.SPARSE, Timed.DENSE, Timed.FRAME) for rows in (1, 4)
    }
    for each in node.frames:
        assert each.frames >= 5
        busy = {part for part, seconds in each.parts.items() if seconds > 0}
        assert busy == {part.value for part in WorkPart} - {"head"}
    for rows in (1, 4):
        (frame,) = (each for each in node.frames if (each.kind, each.rows) == ("decode", rows))
        whole = 3 * times(node)[Timed.SPARSE, rows] + 2 * times(node)[Timed.DENSE, rows]
        assert whole == pytest.approx(sum(frame.parts.values()))
    assert len(bus) == 6


def test_pri_03_pri_12_slow_frames_do_not_count_and_nothing_is_written_where_one_stands(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, calls = Stage.apply, itertools.count()

    def disturbed(self: Stage, segments: Any, *args: Any) -> Any:
        # Two in a row are slow, of eight: the first of a group and some later ones.
        if len(segments) and next(calls) % 8 < 2:
            time.sleep(0.3)
        return apply(self, segments, *args)

    monkeypatch.setattr(Stage, "apply", disturbed)
    if UNWRITABLE.exists():
        monkeypatch.chdir(UNWRITABLE)
    node = profiled(run, model, tmp_path / "state", "--shard", 0, "--rows", 1)
    assert all(each.seconds < 0.2 for each in node.frames)
    assert times(node)[Timed.SPARSE, 1] < 0.04


def test_memory_is_sampled_around_every_group(run: Run, model: Path, tmp_path: Path) -> None:
    node = profiled(run, model, tmp_path / "state", "--shard", 0)
    prefill, one, four = node.frames
    assert prefill.steady
    assert one.steady
    assert (four.bus_before, four.bus_after, four.steady) == (50e9, 20e9, False)
    assert one.ratio == pytest.approx(one.seconds * 50e9 / one.read_bytes)
    assert node.bandwidth == 50e9
    # Weights that one row passes, and more of the experts for four.
    assert one.read_bytes < four.read_bytes < 4 * one.read_bytes


def test_the_last_shard_has_the_head_and_no_dense_layer(run: Run, model: Path, tmp_path: Path) -> None:
    node = profiled(run, model / "shard-01", tmp_path / "state")
    parts = {part for part, _ in times(node)}
    assert parts == {Timed.SPARSE, Timed.FRAME, Timed.HEAD}
    decode = node.frames[-1]
    assert decode.parts["head"] > 0
    assert decode.parts["dense"] == 0
    assert node.frames[0].parts["head"] == 0
    assert node.subject is not None
    assert node.subject.shard == 1


def test_plan_reads_what_profile_writes(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "pc.json"
    node = profiled(run, model, tmp_path / "state", "--shard", 0, "--out", out)
    assert read_measured(out.read_bytes(), "pc.json") == [node]
    done = run("plan", model, "--nodes", 2, "--profile", out, "--slots", 4, "--context", 128, "--json")
    assert done.code == 0
    plan: dict[str, Any] = json.loads(done.out)
    by_streams = {each["streams"]: each for each in plan["predictions"]}
    # The measured times of the first shard are those that are predicted for it.
    measured = times(node)
    expected = 3 * measured[Timed.SPARSE, 1] + 2 * measured[Timed.DENSE, 1] + measured[Timed.FRAME, 1]
    assert by_streams[1]["stages_s"][0] == pytest.approx(expected)


def test_a_table_for_people(run: Run, model: Path, tmp_path: Path) -> None:
    done = run(
        *("profile", "--model", model, "--shard", 0, "--state-dir", tmp_path, "--threads", 1),
        *("--positions", 10, "--rows", "1,2"),
    )
    assert done.code == 0
    assert "shard 0, layers 0 to 4, on CPU, precision fine, cache f32, 1 threads" in done.out
    assert "memory gave 20.0 to 50.0 GB/s" in done.out
    lines = {line.split("  ")[0]: line for line in done.out.splitlines()}
    assert "fast" in lines["decode, 1 rows"]
    assert "changed" in lines["decode, 2 rows"]
    assert "their ratio says little" in done.out
    assert f"kept in {tmp_path / 'profiles'}" in done.out.replace("\n", "")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rows", "1,two"), "--rows '1,two' is not right"),
        (("--rows", "0"), "--rows '0' is not right"),
        (("--rows", ""), "--rows '' is not right"),
        (("--rows", "8", "--slots", 4), "--rows 8 is more than --slots 4"),
        (("--positions", 100, "--context", 100), f"--positions 100: expected 1 to {100 - AHEAD}"),
        (("--positions", 0), "--positions 0"),
        (("--precision", "best"), "--precision"),
        (("--shard", 7), "there is no shard 7"),
    ],
)
def test_wrong_flags_are_said(
    run: Run, model: Path, tmp_path: Path, flags: tuple[object, ...], words: str
) -> None:
    done = run("profile", "--model", model, "--shard", 0, "--state-dir", tmp_path, *flags)
    assert done.code == 2
    assert done.out == ""
    assert words in done.err
    assert "Traceback" not in done.err


def test_damaged_weights_are_not_measured(run: Run, model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    path = copy / "shard-00" / "layer-001.weights"
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    done = run("profile", "--model", copy, "--shard", 0, "--state-dir", tmp_path / "state")
    assert done.code == 1
    assert "layer-001.weights is damaged" in done.err


def test_ctrl_c_leaves_nothing_behind(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> Bandwidth:
        raise KeyboardInterrupt

    monkeypatch.setattr(bandwidth, "measure_bandwidth", interrupted)
    done = run("profile", "--model", model, "--shard", 0, "--state-dir", tmp_path, "--threads", 1)
    assert (done.code, done.out, done.err) == (130, "", "")
    assert not (tmp_path / "profiles").exists()


def test_join_finds_the_profile_and_paces_the_ring_by_it(run: Run, model: Path, tmp_path: Path) -> None:
    state = tmp_path / "measured"
    node = profiled(run, model, state, "--shard", 0)
    longest = max(each.seconds for each in node.frames)

    async def live() -> None:
        async with fleet(tmp_path) as ring:
            first = await ring.start(model / "shard-00", state_dir=state)
            await ring.start(model / "shard-01")
            head = await ring.open()
            assert head is first
            own: Any = head.node.status()["nodes"]
            loaded = head.node.loaded
            assert loaded is not None
            assert own[0]["layer_s"] == pytest.approx(longest / len(loaded.stage.model.layers))
            assert own[1]["layer_s"] == 0.0
            scheduler, wanted = head.node._conductor._scheduler, node.decoding()[1][1]
            # The data thread takes it between two frames.
            await ring.until(
                lambda: abs(scheduler.policy.stage_time.of(4) / wanted - 1) < 0.01, "the ring's pace is told"
            )
            assert scheduler.policy.queue_limit == 256

    asyncio.run(live())


def test_a_state_directory_that_can_not_be_made_is_refused_before_measuring(
    run: Run, model: Path, tmp_path: Path, bus: list[float]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    state = tmp_path / "file" / "state"
    done = run("profile", "--model", model, "--shard", 0, "--rows", 1, "--state-dir", state)
    assert done.code == 1
    assert f"the state directory {state} can not be used: " in done.err
    assert "--state-dir DIR" in done.err
    assert bus == []
