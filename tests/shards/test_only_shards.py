"""Exporting some shards on the PC that will hold them: the same bytes, from no more files than they need."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_export_resume import Stop, tree

from cascadia_p2p.cli import export as command
from cascadia_p2p.errors import CapacityError, CheckpointError, ShardError, UsageError
from cascadia_p2p.matrices.packing import dense
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.nvfp4 import Nvfp4
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.shards import export as export_module
from cascadia_p2p.shards.export import Progress, export, needed_files
from cascadia_p2p.shards.manifest import Manifest
from cascadia_p2p.shards.reader import ShardReader, held_shards, held_sources
from cascadia_p2p.shards.safetensors import Checkpoint

RECIPE = Recipe(
    "spread", layers=7, hidden=32, experts=4, chosen=2, expert_width=16, dense_width=24, dense_layers=1
)
SPLIT = (3, 2, 2)


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised model in as many files as the published one, its layers scattered over them."""
    return make_checkpoint(
        tmp_path_factory.mktemp("source") / "model",
        RECIPE,
        spelling="A",
        encoding="BF16",
        files=109,
        nvfp4=Nvfp4(plain_layers=(1,)),
    )


@pytest.fixture(scope="module")
def whole(spread: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All shards of it, exported at once; not for a test to change."""
    out = tmp_path_factory.mktemp("whole") / "out"
    export(spread, out, split=SPLIT)
    return out


def only_files(source: Path, directory: Path, files: tuple[str, ...]) -> Path:
    """The checkpoint as a PC has it that fetched these files and all small ones."""
    directory.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors" or path.name in files:
            shutil.copy(path, directory)
    return directory


def test_every_shard_is_the_same_to_the_byte_wherever_it_is_exported(
    tmp_path: Path, spread: Path, whole: Path
) -> None:
    total = len(list(spread.glob("*.safetensors")))
    for shard in range(3):
        files = needed_files(spread, split=SPLIT, only=[shard])
        assert 0 < len(files) < total
        source = only_files(spread, tmp_path / f"in{shard}", files)
        manifest = export(source, tmp_path / f"out{shard}", split=SPLIT, only=[shard])
        assert manifest.listed == (shard,)
        assert manifest.fingerprint == Manifest.load(whole).fingerprint
        found = tree(tmp_path / f"out{shard}")
        assert {place.partition("/")[0] for place in found} == {f"shard-{shard:02d}", "manifest.json"}
        del found["manifest.json"]
        assert found == {place: data for place, data in tree(whole).items() if place in found}
        assert found.keys() == {place for place in tree(whole) if place.startswith(f"shard-{shard:02d}/")}


def test_shards_that_are_exported_one_by_one_become_the_whole(
    tmp_path: Path, spread: Path, whole: Path
) -> None:
    out = tmp_path / "out"
    listed = []
    for only in ([1], [2, 1], [0]):
        listed.append(export(spread, out, split=SPLIT, only=only).listed)
        assert held_shards(out) == listed[-1]
        assert not (out / ".export").exists()
    assert listed == [(1,), (1, 2), (0, 1, 2)]
    assert tree(out) == tree(whole)


def test_a_file_that_is_needed_and_not_here_is_named(tmp_path: Path, spread: Path) -> None:
    files = needed_files(spread, split=SPLIT, only=[1])
    source = only_files(spread, tmp_path / "in", files[2:])
    with pytest.raises(
        CheckpointError,
        match=rf"lacks 2 of the {len(files)} files that are needed: {files[0]}, {files[1]}; download them",
    ):
        export(source, tmp_path / "out", split=SPLIT, only=[1])
    assert not (tmp_path / "out").exists()


def test_a_download_under_way_does_not_disturb(tmp_path: Path, spread: Path) -> None:
    files = needed_files(spread, split=SPLIT, only=[2])
    source = only_files(spread, tmp_path / "in", files)
    strange = next(path.name for path in spread.glob("*.safetensors") if path.name not in files)
    (source / strange).write_bytes((spread / strange).read_bytes()[:100])
    export(source, tmp_path / "out", split=SPLIT, only=[2])


def test_cas_21_shards_that_there_are_not_are_refused(tmp_path: Path, spread: Path) -> None:
    for only, sentence in (
        ([3], r"names shard 3: the model is split into 3, 0 to 2"),
        ([-1], r"names shard -1"),
        ([], "names no shard"),
    ):
        with pytest.raises(UsageError, match=sentence):
            export(spread, tmp_path / "out", split=SPLIT, only=only)
    assert not (tmp_path / "out").exists()


def spoil(directory: Path, by: Callable[[dict[str, object]], object]) -> None:
    value = json.loads((directory / "manifest.json").read_text())
    by(value)
    (directory / "manifest.json").write_text(json.dumps(value))


def drop(place: str) -> Callable[[dict[str, object]], None]:
    def by(manifest: dict[str, object]) -> None:
        files = manifest["files"]
        assert isinstance(files, dict)
        for name in [name for name in files if name.startswith(place)]:
            del files[name]

    return by


@pytest.mark.parametrize(
    ("by", "sentence"),
    [
        (drop("shard-01/layer-004"), r"is damaged: it does not list shard-01/layer-004\.weights"),
        (drop("shard-01/shard.json"), r"is damaged: it does not list shard-01/shard\.json"),
        (drop("shard-"), "is damaged: it lists no shard"),
        (lambda m: m.update(sources={"a": "0" * 15}), r"sources\.a: String should match pattern"),
    ],
)
def test_cas_21_a_shard_is_listed_in_full_or_not_at_all(
    tmp_path: Path, spread: Path, by: Callable[[dict[str, object]], object], sentence: str
) -> None:
    export(spread, tmp_path / "out", split=SPLIT, only=[1])
    spoil(tmp_path / "out", by)
    with pytest.raises(ShardError, match=sentence):
        ShardReader(tmp_path / "out", 1)


def test_a_manifest_without_samples_is_read(tmp_path: Path, spread: Path) -> None:
    export(spread, tmp_path / "out", split=SPLIT, only=[1])
    spoil(tmp_path / "out", lambda manifest: manifest.pop("sources"))
    ShardReader(tmp_path / "out", 1).verify()
    assert set(held_sources(tmp_path / "out")) <= {""}


def test_a_shard_from_another_pc_can_be_laid_beside_the_others(tmp_path: Path, spread: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    export(spread, here, split=SPLIT, only=[0])
    export(spread, there, split=SPLIT, only=[2])
    shutil.copytree(there / "shard-02", here / "shard-02")
    assert held_shards(here) == (0, 2)
    for shard in (0, 2):
        reader = ShardReader(here, shard)
        reader.verify()
        assert reader.index == shard
    manifests = [Manifest.load(directory) for directory in (here, there)]
    both = [[sample or "" for _, sample in sorted(manifest.sources.items())] for manifest in manifests]
    assert held_sources(here) == tuple(one or other for one, other in zip(*both, strict=True))
    assert held_sources(there) == held_sources(here / "shard-02") == tuple(both[1])
    own = (here / "shard-02" / "manifest.json").read_bytes()
    shutil.copy(here / "shard-00" / "manifest.json", here / "shard-02")
    for directory in (here, here / "shard-02"):
        with pytest.raises(ShardError, match=r"manifest\.json does not list shard 2: copy"):
            ShardReader(directory, 2)
    (here / "shard-02" / "manifest.json").write_bytes(own)
    assert ShardReader(here / "shard-02").index == 2
    (here / "shard-02" / "manifest.json").unlink()
    with pytest.raises(ShardError, match=r"shard-02 has no manifest\.json"):
        ShardReader(here, 2)
    with pytest.raises(ShardError, match=r"has no directory shard-01 \(it holds 0, 2\)"):
        ShardReader(here, 1)


# --- models of one shape ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other numbers under the same index, as a second revision of the model has."""
    return make_checkpoint(
        tmp_path_factory.mktemp("twin") / "model",
        RECIPE,
        seed=1,
        spelling="A",
        encoding="BF16",
        files=109,
        nvfp4=Nvfp4(plain_layers=(1,)),
    )


def test_twins_have_one_fingerprint_and_other_samples(
    tmp_path: Path, spread: Path, twin: Path, whole: Path
) -> None:
    ours = Manifest.load(whole)
    theirs = export(twin, tmp_path / "out", split=SPLIT, only=[1])
    assert theirs.fingerprint == ours.fingerprint
    read = needed_files(twin, split=SPLIT, only=[1])
    assert {file for file, sample in theirs.sources.items() if sample} == set(read)
    assert theirs.sources.keys() == ours.sources.keys() == {p.name for p in spread.glob("*.safetensors")}
    # A file that holds only what is the same in both, as parts beside the text model, is not read at all.
    assert all(theirs.sources[file] != ours.sources[file] for file in read)


def test_a_twin_is_not_exported_beside_the_other(tmp_path: Path, spread: Path, twin: Path) -> None:
    out = tmp_path / "out"
    export(spread, out, split=SPLIT, only=[1])
    before = tree(out)
    with pytest.raises(UsageError, match="holds the export of something else"):
        export(twin, out, split=SPLIT, only=[1, 2])
    assert tree(out) == before


def test_an_unfinished_export_is_not_continued_from_a_twin(tmp_path: Path, spread: Path, twin: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        export(spread, out, split=SPLIT, only=[1], progress=Stop(40))
    with pytest.raises(UsageError, match="holds an unfinished export of something else"):
        export(twin, out, split=SPLIT, only=[1])


def test_a_twins_shard_is_not_taken_from_another_pc(tmp_path: Path, twin: Path, whole: Path) -> None:
    export(twin, tmp_path / "twin", split=SPLIT, only=[2])
    here = tmp_path / "here"
    shutil.copytree(whole / "shard-01", here / "shard-01")
    shutil.copy(whole / "shard-01" / "manifest.json", here)
    shutil.copytree(tmp_path / "twin" / "shard-02", here / "shard-02")
    common = set(needed_files(twin, split=SPLIT, only=[1])) & set(needed_files(twin, split=SPLIT, only=[2]))
    assert common, "the test needs a file that both shards were read from"
    with pytest.raises(ShardError, match=r"shard-02 was exported from another .* but other weights"):
        ShardReader(here, 2)


def test_another_index_is_another_model(tmp_path: Path, spread: Path, whole: Path) -> None:
    fewer = make_checkpoint(
        tmp_path / "in", RECIPE, spelling="A", encoding="BF16", files=50, nvfp4=Nvfp4(plain_layers=(1,))
    )
    assert export(fewer, tmp_path / "out", split=SPLIT).fingerprint != Manifest.load(whole).fingerprint
    other = make_checkpoint(
        tmp_path / "in2", replace(RECIPE, route_scale=2.0), spelling="A", encoding="BF16", files=109,
        nvfp4=Nvfp4(plain_layers=(1,)),
    )  # fmt: skip
    assert export(other, tmp_path / "out2", split=SPLIT).fingerprint != Manifest.load(whole).fingerprint


# --- going on, and what is said ---------------------------------------------------------------------------


def test_another_selection_keeps_what_was_finished(tmp_path: Path, spread: Path, whole: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        export(spread, out, split=SPLIT, only=[0], progress=Stop(45))
    kept = {path: path.stat().st_mtime_ns for path in out.glob("shard-00/*.weights")}
    assert kept
    export(spread, out, split=SPLIT, only=[2])
    assert (out / ".export" / "journal").exists()
    export(spread, out, split=SPLIT)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert tree(out) == tree(whole)


def test_shards_that_another_export_finishes_meanwhile_stay_listed(
    tmp_path: Path, spread: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    right = export_module.FileLock

    def first_another(*args: object, **more: object) -> object:
        # Between the first look at the directory and the lock.
        monkeypatch.setattr(export_module, "FileLock", right)
        export(spread, out, split=SPLIT, only=[0, 2])
        (out / ".export").mkdir()
        return right(*args, **more)

    monkeypatch.setattr(export_module, "FileLock", first_another)
    assert export(spread, out, split=SPLIT, only=[1]).listed == (0, 1, 2)
    assert tree(out) == tree(whole)


def test_what_another_export_begins_behind_the_lock_is_left_to_it(
    tmp_path: Path, spread: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    right = export_module.FileLock

    class ThenAnother(right):  # type: ignore[misc, valid-type]
        def __exit__(self, *exc: object) -> None:
            super().__exit__(*exc)  # type: ignore[arg-type]
            monkeypatch.setattr(export_module, "FileLock", right)
            with pytest.raises(KeyboardInterrupt):
                export(spread, out, split=SPLIT, only=[0], progress=Stop(45))

    monkeypatch.setattr(export_module, "FileLock", ThenAnother)
    export(spread, out, split=SPLIT, only=[1])
    kept = {path: path.stat().st_mtime_ns for path in out.glob("shard-00/*.weights")}
    assert kept
    assert (out / ".export" / "journal").exists()
    export(spread, out, split=SPLIT, only=[0, 2])
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert tree(out) == tree(whole)


def test_exo_23_a_deleted_part_and_a_deleted_file_are_fetched_again(
    tmp_path: Path, spread: Path, whole: Path
) -> None:
    out = tmp_path / "out"
    steps: list[Progress] = []
    export(spread, tmp_path / "timed", split=SPLIT, only=[1], progress=steps.append)
    with pytest.raises(KeyboardInterrupt):
        export(spread, out, split=SPLIT, only=[1], progress=Stop(int(0.4 * len(steps))))
    for part in out.glob("shard-01/*.part"):
        part.unlink()
    done = sorted(out.glob("shard-01/*.weights"))
    for path in done:
        path.unlink()
    seen: list[Progress] = []
    export(spread, out, split=SPLIT, only=[1], progress=seen.append)
    # What the disk says counts, not what was noted: nothing is done, and all of it is done again.
    assert seen[0].done < seen[0].total
    assert (seen[-1].done, seen[-1].total) == (steps[-1].done, steps[-1].total)
    expected = {place: data for place, data in tree(whole).items() if place.startswith("shard-01/")}
    assert {place: data for place, data in tree(out).items() if place != "manifest.json"} == expected


def test_progress_starts_with_what_is_done(tmp_path: Path, spread: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        export(spread, out, split=SPLIT, only=[1], progress=Stop(30))
    done = sum(path.stat().st_size for path in out.glob("shard-01/*.weights"))
    seen: list[Progress] = []
    export(spread, out, split=SPLIT, only=[1], progress=seen.append)
    assert done > 0
    assert done <= seen[0].done < seen[0].total == seen[-1].done


def test_only_the_chosen_shards_need_room(
    tmp_path: Path, spread: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(path.stat().st_size for path in whole.glob("shard-01/*.weights"))
    spare = export_module._SPARE_BYTES
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=size + spare))
    with pytest.raises(CapacityError, match=r"needs 17\.0 MB on the disk of .*, where 16\.8 MB is free"):
        export(spread, tmp_path / "all", split=SPLIT)
    export(spread, tmp_path / "out", split=SPLIT, only=[1])
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=size + spare - 1))
    with pytest.raises(CapacityError):
        export(spread, tmp_path / "less", split=SPLIT, only=[1])


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args([*map(str, words)]))


def test_the_command_names_the_files_to_fetch(
    tmp_path: Path, spread: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = only_files(spread, tmp_path / "in", ())
    out = tmp_path / "out"
    assert run(small, out, "--split", "3,2,2", "--only-shards", "1", "--list-files") == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed == list(needed_files(spread, split=SPLIT, only=[1]))
    assert not out.exists()
    for file in listed:
        shutil.copy(spread / file, small)
    assert run(small, out, "--split", "3,2,2", "--only-shards", "1") == 0
    said = capsys.readouterr()
    assert said.out == f"{out / 'manifest.json'}\n"
    assert "shard 1 of 3 with layers 3 to 4" in said.err
    assert f"join --model {out}" in said.err


def test_the_command_judges_the_shards_before_it_reads(tmp_path: Path) -> None:
    for text in ("", "a", "1,,2", "1-3", "-1"):
        with pytest.raises(UsageError, match=r"--only-shards has '.*': expected indexes of shards"):
            run(tmp_path / "absent", tmp_path / "out", "--shards", "3", f"--only-shards={text}")


UNHURRIED = """
import sys, time
from pathlib import Path
from cascadia_p2p.__main__ import start
from cascadia_p2p.shards.files import WholeFile
from cascadia_p2p.shards.journal import Journal

right, note, begun = WholeFile.write, Journal.note, []

def noted(self, *args):
    note(self, *args)
    begun.append(True)

def write(self, offset, values):
    right(self, offset, values)
    if begun:
        time.sleep(600)

Journal.note, WholeFile.write = noted, write
raise SystemExit(start())
"""
"""The command, which does not get beyond the second file."""


def noted(out: Path) -> list[str]:
    """The files that an export under way has noted as finished."""
    try:
        lines = (out / ".export" / "journal").read_text().splitlines()
    except FileNotFoundError:
        lines = []
    return [found[1] for found in (re.match(r'\{"place":"([^"]+)"', line) for line in lines) if found]


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_leaves_what_the_same_command_finishes(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "in", RECIPE, spelling="A", encoding="BF16", files=9)
    out = tmp_path / "out"
    words = ["export", str(source), str(out), "--split", "3,2,2", "--only-shards", "0,2"]
    here = Path(__file__).resolve().parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", UNHURRIED, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=here,
    )
    limit = time.monotonic() + 100.0
    while not noted(out) and child.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.002)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "it goes on where it stopped" in said
    assert "Traceback" not in said
    assert not (out / "manifest.json").exists()
    kept = {out / place: (out / place).stat().st_mtime_ns for place in noted(out)}
    assert kept
    command_line = [sys.executable, "-m", "cascadia_p2p", *words]
    again = subprocess.run(command_line, capture_output=True, text=True, timeout=100, cwd=here, check=True)
    assert again.stdout == f"{out / 'manifest.json'}\n"
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    for shard in (0, 2):
        ShardReader(out, shard).verify()


def test_the_source_is_not_read_beyond_what_is_needed(
    tmp_path: Path, spread: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: set[str] = set()
    right = Checkpoint._read_at

    def watched(self: Checkpoint, file: str, start: int, count: int, name: str) -> bytes:
        opened.add(file)
        return right(self, file, start, count, name)

    monkeypatch.setattr(Checkpoint, "_read_at", watched)
    export(spread, tmp_path / "out", split=SPLIT, only=[1])
    assert opened == set(needed_files(spread, split=SPLIT, only=[1]))
    reader = ShardReader(tmp_path / "out", 1)
    assert np.isfinite(dense(reader.matrix("layers.3.experts.down"))).all()
