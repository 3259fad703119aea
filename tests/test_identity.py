from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.identity import Identity

HOLD = """
import sys
from pathlib import Path
from cascadia_p2p.identity import Identity
identity = Identity.open(Path(sys.argv[1]))
identity.scratch("left").write_text("x")
print(identity.number, identity.node_id, identity.instance, flush=True)
sys.stdin.read()
"""


def hold(root: Path) -> tuple[subprocess.Popen[str], list[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def end(process: subprocess.Popen[str], kill: bool = False) -> None:
    if kill:
        process.kill()
    process.communicate(timeout=90)


def test_exo_09_node_id_lasts_and_instance_is_new_at_each_start(tmp_path: Path) -> None:
    seen = []
    for _ in range(5):
        with Identity.open(tmp_path) as identity:
            seen.append((identity.node_id, identity.number, identity.instance))
    assert len({(node_id, number) for node_id, number, _ in seen}) == 1
    assert len({instance for *_, instance in seen}) == 5


def test_exo_09_killed_process_frees_its_identity(tmp_path: Path) -> None:
    process, first = hold(tmp_path)
    end(process, kill=True)
    with Identity.open(tmp_path) as identity:
        assert [str(identity.number), identity.node_id] == first[:2]
        assert identity.instance != first[2]


def test_pri_07_second_node_of_one_user_takes_the_next_directory(tmp_path: Path) -> None:
    process, first = hold(tmp_path)
    try:
        with Identity.open(tmp_path) as second, Identity.open(tmp_path) as third:
            assert [first[0], second.number, third.number] == ["0", 1, 2]
            assert len({first[1], second.node_id, third.node_id}) == 3
            assert second.scratch("plan") != third.scratch("plan")
        with Identity.open(tmp_path) as again:
            assert again.node_id == second.node_id
    finally:
        end(process)


def test_pri_07_scratch_of_the_dead_is_removed_and_of_the_living_kept(tmp_path: Path) -> None:
    dead, _ = hold(tmp_path)
    end(dead, kill=True)
    assert list(tmp_path.rglob("left"))
    living, _ = hold(tmp_path)
    try:
        with Identity.open(tmp_path) as identity:
            identity.scratch("own").write_text("x")
            names = [path.name for path in tmp_path.rglob("scratch-*/*")]
            assert sorted(names) == ["left", "own"]
        assert [path.name for path in tmp_path.rglob("scratch-*/*")] == ["left"]
    finally:
        end(living)


@pytest.fixture
def read_only_cwd(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "cwd"
    directory.mkdir()
    before = Path.cwd()
    os.chdir(directory)
    directory.chmod(0o500)
    yield directory
    directory.chmod(0o700)
    os.chdir(before)


def test_pri_03_nothing_is_written_to_the_current_directory(read_only_cwd: Path, tmp_path: Path) -> None:
    with Identity.open(tmp_path / "state") as identity:
        identity.scratch("profile").write_text("x")
    assert list(read_only_cwd.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"0123", b"\xff\xfe", b"0123456789ABCDEF\n", b"g" * 16])
def test_damaged_node_id_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "node-0").mkdir()
    (tmp_path / "node-0" / "node-id").write_bytes(content)
    with structlog.testing.capture_logs() as logs, Identity.open(tmp_path) as first:
        assert len(first.node_id) == 16
    assert [entry["event"] for entry in logs] == (["node_id_replaced"] if content else [])
    with Identity.open(tmp_path) as second:
        assert second.node_id == first.node_id


def test_unusable_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CascadiaError, match=r"file/state can not be used: part of the path is a file.*--state-dir"
    ):
        Identity.open(tmp_path / "file" / "state")


@pytest.mark.parametrize(
    ("options", "words"),
    [("size=4k,nr_inodes=4", "the disk is full"), ("ro", "the file system is read-only")],
)
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs Linux and root to mount a tmpfs"
)
def test_full_or_read_only_disk_is_a_clear_error(tmp_path: Path, options: str, words: str) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", tmp_path], capture_output=True)
    if done.returncode:
        pytest.skip("this machine does not allow mounting a tmpfs")
    try:
        with pytest.raises(CascadiaError, match=words):
            Identity.open(tmp_path / "state")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_close_twice_is_fine(tmp_path: Path) -> None:
    identity = Identity.open(tmp_path)
    identity.close()
    identity.close()
    with Identity.open(tmp_path) as again:
        assert again.number == 0
