"""From a checkpoint of either spelling over its exported shards to the reference's tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_world import NO_OPERATIONS, Window, operations, segments
from fixtures.exports import exact_export as export
from fixtures.reference import load_case, relative_error

from cascadia_p2p.engine.load import LoadProgress, load_stage
from cascadia_p2p.engine.stage import Stage
from cascadia_p2p.errors import CapacityError, ShardError, UsageError
from cascadia_p2p.shards.manifest import Manifest
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import OperationKind, SegmentError

PROMISE = Promise(slots=2, context=400, rows=64)
SOURCES = {
    "A": ("tiny12", "A", 1),
    "B": ("tiny12", "B", 1),
    "B in three files": ("tiny12", "B", 3),
    "BF16": ("tiny12-bf16", "B", 1),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported")
    export(load_case("tiny12").build(out / "checkpoint"), out / "model", split=(5, 7))
    return out / "model"


def logits(stages: list[Stage], ids: tuple[int, ...]) -> np.ndarray:
    marked = segments(Window(1, 0, ids))
    rows: np.ndarray = np.array(ids, np.int32)
    for stage in stages:
        start = operations((OperationKind.START, 1, 0))
        rows = stage.apply(marked, start, rows, lambda: None)
    assert marked["error"].tolist() == [SegmentError.NONE]
    return stages[-1].logits(rows)


@pytest.mark.parametrize(("case", "spelling", "files"), SOURCES.values(), ids=SOURCES)
def test_exported_checkpoints_give_the_reference_tokens(
    case: str, spelling: str, files: int, tmp_path: Path
) -> None:
    found = load_case(case)
    checkpoint = found.build(tmp_path / "checkpoint", spelling, files)
    export(checkpoint, tmp_path / "model", split=(5, 7))
    stages = [load_stage(tmp_path / "model", shard, PROMISE, threads=1) for shard in range(2)]
    assert [stage.number for stage in stages] == [0, 1]
    prompt = found.prompts[1]
    got = logits(stages, prompt.ids + prompt.generated[:-1])
    assert relative_error(got[list(prompt.positions)], prompt.logits) < 1e-4
    assert tuple(got[len(prompt.ids) - 1 :].argmax(1).tolist()) == prompt.generated


def test_a_shard_directory_alone_is_enough(exported: Path) -> None:
    told: list[LoadProgress] = []
    stage = load_stage(exported / "shard-01", None, PROMISE, threads=1, progress=told.append)
    assert (stage.number, stage.model.first, stage.model.last) == (1, False, True)
    weights = [step for step in told if step.phase == "weights"]
    assert [step.part for step in weights] == [*(f"layer {n}" for n in range(5, 12)), "head"]
    assert [(step.done, step.total) for step in weights] == [(n, 8) for n in range(1, 9)]


def test_the_files_are_not_changed_by_use(exported: Path) -> None:
    """They are mapped copy-on-write, because graphs ask for memory that may be written."""
    files = sorted(exported.rglob("*.weights"))
    before = [path.read_bytes() for path in files]
    stages = [load_stage(exported, shard, PROMISE, threads=1) for shard in range(2)]
    logits(stages, (1, 2, 3))
    assert [path.read_bytes() for path in files] == before
    assert len(files) == 14


def test_too_little_memory_is_refused_before_anything_is_read(exported: Path) -> None:
    told: list[LoadProgress] = []
    with pytest.raises(CapacityError, match=r"needs \d+ MiB of memory and 190 MiB are free.*more shards"):
        load_stage(exported, 0, PROMISE, progress=told.append, available=190 * 2**20)
    roomy = Promise(slots=400, context=4000, rows=64)
    with pytest.raises(CapacityError, match=r"it would fit with --slots \d\d"):
        load_stage(exported, 1, roomy, progress=told.append, available=300 * 2**20)
    assert not told


def test_what_this_version_can_not_do_is_refused_in_words(exported: Path) -> None:
    with pytest.raises(UsageError, match="--precision best is not known here: choose exact, fine, fast"):
        load_stage(exported, 0, PROMISE, precision="best")
    with pytest.raises(UsageError, match="--cache int8 is not known here: choose f32 or bf16"):
        load_stage(exported, 0, PROMISE, cache="int8")
    with pytest.raises(UsageError, match=r"--device GPU.*only CPU"):
        load_stage(exported, 0, PROMISE, device="GPU")
    with pytest.raises(UsageError, match="there is no shard 2"):
        load_stage(exported, 2, PROMISE)


def test_a_shard_that_contradicts_its_config_is_refused(tmp_path: Path) -> None:
    """As if someone had edited the manifest's config by hand."""
    model = tmp_path / "model"
    export(load_case("tiny12").build(tmp_path / "checkpoint"), model, shards=1)
    manifest = Manifest.load(model)
    config = manifest.config | {"n_routed_experts": 13}
    path = model / "manifest.json"
    path.write_bytes(manifest.model_copy(update={"config": config}).to_bytes())
    with pytest.raises(
        ShardError, match=r"layers\.2\.experts\.gate is \[12, 32, 64\].*asks for \[13, 32, 64\]"
    ):
        load_stage(model, 0, PROMISE, threads=1)


def test_a_stage_without_segments_only_applies_operations(exported: Path) -> None:
    stage = load_stage(exported, 1, PROMISE, threads=1)
    rows = np.empty((0, stage.model.hidden), np.float32)
    out = stage.apply(segments(), operations((OperationKind.START, 5, 1)), rows, lambda: None)
    assert out.shape == rows.shape
    marked = segments(Window(5, 0, [0, 0], 1))
    stage.apply(marked, NO_OPERATIONS, np.ones((2, stage.model.hidden), np.float32), lambda: None)
    assert marked["error"].tolist() == [SegmentError.NONE]
    assert stage.held(1) == 2
