"""An export that is interrupted goes on, and ends in the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from cascadia_p2p.errors import CascadiaError, UsageError
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.shards import files
from cascadia_p2p.shards.encodings import EXACT
from cascadia_p2p.shards.export import Progress, export
from cascadia_p2p.shards.journal import Journal
from cascadia_p2p.shards.manifest import FileEntry


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory by its relative path."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


class Stop:
    """A progress callback that ends the export at its n-th step."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, _: Progress) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def test_an_export_stopped_anywhere_ends_in_the_same_bytes(tmp_path: Path, checkpoint: Path) -> None:
    steps: list[Progress] = []
    export(checkpoint, tmp_path / "whole", shards=3, progress=steps.append)
    expected = tree(tmp_path / "whole")
    for after in range(0, len(steps), 17):
        out = tmp_path / f"stopped{after}"
        with pytest.raises(KeyboardInterrupt):
            export(checkpoint, out, shards=3, progress=Stop(after))
        assert not (out / "manifest.json").exists()
        export(checkpoint, out, shards=3)
        assert tree(out) == expected


def test_an_export_stopped_again_and_again_gets_done(tmp_path: Path, checkpoint: Path) -> None:
    export(checkpoint, tmp_path / "whole", shards=2)
    longest = 0
    for attempt in range(200):
        try:
            export(checkpoint, tmp_path / "out", shards=2, progress=Stop(40))
            break
        except KeyboardInterrupt:
            longest = attempt
    assert longest > 1
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


CHILD = """
import sys
from pathlib import Path
from cascadia_p2p.shards.export import export

def wait(step):
    if step.done > step.total // 2:
        print(step.file, flush=True)
        sys.stdin.read()

export(Path(sys.argv[1]), Path(sys.argv[2]), shards=3, progress=wait)
"""


def test_a_killed_export_goes_on(tmp_path: Path, checkpoint: Path) -> None:
    out = tmp_path / "out"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(checkpoint), str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        at = child.stdout.readline().decode().strip()
        child.kill()
        child.wait(30)
    assert at.startswith("shard-0")
    assert (out / f"{at}.part").exists()
    finished = {path: path.stat().st_mtime_ns for path in out.glob("shard-*/*.weights")}
    assert finished
    export(checkpoint, out, shards=3)
    export(checkpoint, tmp_path / "whole", shards=3)
    assert tree(out) == tree(tmp_path / "whole")
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


def test_a_file_that_changed_after_the_interruption_is_written_again(
    tmp_path: Path, checkpoint: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, out, shards=3, progress=Stop(60))
    spoiled = out / "shard-00" / "layer-000.weights"
    spoiled.write_bytes(bytes(spoiled.stat().st_size))
    export(checkpoint, out, shards=3)
    export(checkpoint, tmp_path / "whole", shards=3)
    assert tree(out) == tree(tmp_path / "whole")


def test_a_complete_export_is_mended_file_by_file(exported: Path, checkpoint: Path) -> None:
    expected = tree(exported)
    (exported / "shard-01" / "layer-004.weights").unlink()
    (exported / "shard-02" / "head.weights").write_bytes(b"short")
    kept = exported / "shard-00" / "layer-000.weights"
    before = kept.stat().st_mtime_ns
    export(checkpoint, exported, split=(3, 2, 2), encodings=EXACT)
    assert tree(exported) == expected
    assert kept.stat().st_mtime_ns == before


def test_an_unfinished_export_of_something_else_is_not_continued(
    tmp_path: Path, checkpoint: Path, small: Recipe
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, out, shards=3, progress=Stop(30))
    other = make_checkpoint(tmp_path / "other", small, seed=1)
    with pytest.raises(UsageError, match="holds an unfinished export of something else"):
        export(other, out, shards=3)


def test_two_exports_do_not_write_to_one_directory(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / ".export").mkdir()
    with (
        FileLock(tmp_path / ".export" / "lock", timeout=0),
        pytest.raises(UsageError, match="another export is writing to"),
    ):
        export(checkpoint, tmp_path, shards=3)


def test_a_full_disk_is_told_with_what_to_do(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.WholeFile, "write", full)
    with pytest.raises(CascadiaError, match="is full: free some space and run the same command, it goes on"):
        export(checkpoint, tmp_path / "out", shards=3)


def test_a_journal_that_was_cut_is_read_up_to_the_cut(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").write_bytes(b"345")
    entry = {
        name: FileEntry(size=size, sha256=letter * 64)
        for name, size, letter in (("a", 2, "a"), ("b", 3, "b"))
    }
    path = tmp_path / "journal"
    sources = {"one.safetensors": "1" * 16}
    journal = Journal(path, tmp_path, "0" * 64, sources)
    journal.note("a", entry["a"], 3)
    whole = path.read_bytes()
    journal.note("b", entry["b"], 0)
    for length in range(len(whole), len(path.read_bytes()) - 2):
        cut = tmp_path / "cut"
        cut.write_bytes(path.read_bytes()[:length])
        found = Journal(cut, tmp_path, "0" * 64, sources)
        assert found.finished("a") == entry["a"]
        assert (found.attenuation("a"), found.attenuation("b")) == (3, 0)
        assert found.finished("b") is None
        found.note("b", entry["b"], 0)
        assert Journal(cut, tmp_path, "0" * 64, sources).finished("b") == entry["b"]
