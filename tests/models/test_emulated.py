"""Stages that wait: what they are read from, the tokens that a ring of them gives, and how long they take."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from cascadia_p2p.bench.emulation import write_emulated
from cascadia_p2p.engine.load import load_stage
from cascadia_p2p.engine.stage import Stage
from cascadia_p2p.errors import CheckpointError, ShardError, UsageError
from cascadia_p2p.models.emulated.config import EmulatedConfig
from cascadia_p2p.models.emulated.model import expected_answers
from cascadia_p2p.shards.manifest import Manifest
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import (
    OPERATION,
    SEGMENT,
    OperationKind,
    SegmentError,
    SegmentFlag,
    Table,
)

MASK = (1 << 64) - 1
PROMISE = Promise(slots=4, context=64, rows=8)


def emulated(layers: int, frame: float = 0.0, head: float = 0.0, link: float = 0.0) -> EmulatedConfig:
    rows = PROMISE.rows
    return EmulatedConfig(16, 97, 64, ((frame,) * rows,) * layers, (head,) * rows, ((link,) * rows,) * layers)


def mixed(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def answer(layers: int, vocab: int, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The definition, one number after the other."""
    sums, ids = [0] * layers, list(prompt)
    while len(ids) < len(prompt) + count:
        start = 0 if len(ids) == len(prompt) else len(ids) - 1
        for position in range(start, len(ids)):
            value = ids[position]
            for layer in range(layers):
                add = mixed(value + (position + 1) * 0x9E3779B97F4A7C15 + layer & MASK)
                sums[layer] = sums[layer] + add & MASK
                value = mixed(sums[layer]) >> 16
        ids.append(value % vocab)
    return tuple(ids[len(prompt) :])


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Stage]:
    """The two stages of a model, loaded as a node loads them."""
    model = tmp_path_factory.mktemp("emulated") / "model"
    write_emulated(model, emulated(2))
    return [load_stage(model, shard, PROMISE, threads=1) for shard in range(2)]


def frame(
    stages: list[Stage], windows: list[tuple[int, int, tuple[int, ...]]], operations: Table | None = None
) -> Table:
    """The records of a frame of windows (slot, start, ids) that went through all stages."""
    segments = np.zeros(len(windows), SEGMENT)
    for segment, (slot, start, ids) in zip(segments, windows, strict=True):
        segment["stream"], segment["slot"], segment["start"], segment["rows"] = (
            slot + 1,
            slot,
            start,
            len(ids),
        )
        segment["flags"] = SegmentFlag.WANT_TOKEN
    rows = np.array([each for _, _, ids in windows for each in ids], np.int32)
    for stage in stages:
        rows = stage.apply(
            segments, np.zeros(0, OPERATION) if operations is None else operations, rows, lambda: None
        )
    records, _ = stages[-1].tokens(segments, rows)
    return records


def operation(kind: OperationKind, *slots: int, position: int = 0) -> Table:
    table = np.zeros(len(slots), OPERATION)
    for row, slot in zip(table, slots, strict=True):
        row["kind"], row["stream"], row["slot"], row["position"] = kind, slot + 1, slot, position
    return table


PROMPT = (5, 96, 0, 33, 5, 5, 71)


def test_answers_follow_from_all_ids_and_places(stages: list[Stage]) -> None:
    expected = answer(2, 97, PROMPT, 12)
    swapped = (PROMPT[1], PROMPT[0], *PROMPT[2:])
    assert expected_answers(emulated(2), [PROMPT, swapped], 12) == [expected, answer(2, 97, swapped, 12)]
    assert answer(2, 97, swapped, 12) != expected
    assert answer(3, 97, PROMPT, 12) != expected


@pytest.mark.parametrize("cuts", [(7,), (1, 6), (3, 2, 2)])
def test_windows_and_company_do_not_change_an_answer(stages: list[Stage], cuts: tuple[int, ...]) -> None:
    start = operation(OperationKind.START, 2, 0)
    at = 0
    for cut in cuts:
        # The other stream sends a row beside every window.
        records = frame(
            stages, [(2, at, PROMPT[at : at + cut]), (0, at // 3, (at,))], start if not at else None
        )
        at += cut
    tokens = [int(records["token"][0])]
    while len(tokens) < 5:
        tokens.append(int(frame(stages, [(2, at, (tokens[-1],))])["token"][0]))
        at += 1
    assert tuple(tokens) == answer(2, 97, PROMPT, 5)


def test_a_stream_can_go_back(stages: list[Stage]) -> None:
    first = frame(stages, [(1, 0, PROMPT)], operation(OperationKind.START, 1))
    frame(stages, [(1, len(PROMPT), (9,))])
    again = frame(stages, [(1, 4, PROMPT[4:])], operation(OperationKind.REWIND, 1, position=4))
    assert int(again["token"][0]) == int(first["token"][0]) == answer(2, 97, PROMPT, 1)[0]


def test_rows_in_the_wrong_place_are_refused_as_by_any_stage(stages: list[Stage]) -> None:
    records = frame(stages, [(3, 2, (1,))], operation(OperationKind.START, 3))
    assert records["status"].tolist() == [SegmentError.POSITION]


def test_time_is_waited_for_and_counted(tmp_path: Path) -> None:
    write_emulated(tmp_path / "model", emulated(1, frame=0.02, head=0.03))
    stage = load_stage(tmp_path / "model", 0, PROMISE, threads=1)
    begin = time.process_time(), time.perf_counter()
    for count in range(5):
        start = operation(OperationKind.START, 0) if not count else None
        frame([stage], [(0, count, (1,))], start)
    cpu, wall = time.process_time() - begin[0], time.perf_counter() - begin[1]
    assert wall >= 5 * 0.05
    assert cpu < wall / 2, "it must wait, not compute"
    times = stage.times()
    assert (times.frames, times.rows) == (5, 5)
    assert times.seconds["dense"] == pytest.approx(5 * 0.02)
    assert times.seconds["head"] == pytest.approx(5 * 0.03)
    assert 0 <= times.seconds["glue"] <= wall - 5 * 0.05 + 1e-3


def test_a_frame_that_is_early_waits_for_its_link(tmp_path: Path) -> None:
    write_emulated(tmp_path / "model", emulated(2, link=0.05))
    stages = [load_stage(tmp_path / "model", shard, PROMISE, threads=1) for shard in range(2)]
    begin = time.perf_counter()
    frame(stages, [(0, 0, (1,))], operation(OperationKind.START, 0))
    # The way to the second stage, and the way back.
    assert time.perf_counter() - begin >= 0.1


def test_the_config_survives_the_manifest(tmp_path: Path) -> None:
    config = emulated(3, frame=0.25, head=0.125, link=0.5)
    write_emulated(tmp_path, config)
    assert Manifest.load(tmp_path).model_config_of() == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_s": []}, "head_s"),
        ({"frame_s": [[0.1]]}, "frame_s"),
        ({"frame_s": []}, "frame_s"),
        ({"link_s": [[0.0] * 8]}, "link_s"),
        ({"head_s": [-1.0] * 8}, "head_s"),
        ({"head_s": [float("nan")] * 8}, "head_s"),
        ({"hidden_size": 3}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_a_config_that_can_not_be_is_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        EmulatedConfig.from_export(emulated(2).to_json() | change)


def test_a_manifest_of_the_family_that_is_no_config_of_it_is_refused(tmp_path: Path) -> None:
    write_emulated(tmp_path, emulated(2))
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"head_s"', '"tail_s"'))
    with pytest.raises(ShardError, match="head_s"):
        Manifest.load(tmp_path)


def test_longer_frames_than_are_known_are_not_promised(tmp_path: Path) -> None:
    write_emulated(tmp_path, emulated(1))
    with pytest.raises(UsageError, match="at most 8"):
        load_stage(tmp_path, 0, Promise(4, 64, 9), threads=1)
