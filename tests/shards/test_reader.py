"""Opening shards: what is missing, damaged or foreign is named, and contents are read once."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fixtures.exports import exact_export as export

from cascadia_p2p.errors import ShardError, UsageError
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.shards import reader as reader_module
from cascadia_p2p.shards.manifest import Manifest
from cascadia_p2p.shards.reader import ShardReader, VerifyProgress, held_shards

LAYER = "shard-01/layer-003.weights"


def size_of(out: Path, place: str) -> int:
    return Manifest.load(out).files[place].size


def test_a_missing_file_is_named(exported: Path) -> None:
    (exported / LAYER).unlink()
    expected = rf"layer-003\.weights is missing, expected {size_of(exported, LAYER)} bytes: copy the shard's"
    with pytest.raises(ShardError, match=expected):
        ShardReader(exported, 1)
    ShardReader(exported, 0).verify()


def test_a_truncated_file_is_named_with_both_sizes(exported: Path) -> None:
    path = exported / LAYER
    path.write_bytes(path.read_bytes()[:-1])
    size = size_of(exported, LAYER)
    with pytest.raises(
        ShardError, match=rf"layer-003\.weights is cut short: {size - 1} bytes, expected {size}"
    ):
        ShardReader(exported, 1)
    path.write_bytes(path.read_bytes() + b"12")
    with pytest.raises(
        ShardError, match=rf"layer-003\.weights is too long: {size + 1} bytes, expected {size}"
    ):
        ShardReader(exported, 1)


@pytest.mark.parametrize("name", ["layer-003.weights", "tokenizer.json"])
def test_one_changed_bit_is_found(exported: Path, name: str) -> None:
    path = exported / "shard-01" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    expected = Manifest.load(exported).files[f"shard-01/{name}"].sha256
    reader = ShardReader(exported, 1)
    with pytest.raises(
        ShardError, match=rf"{re.escape(name)} is damaged or of another model: .*expected {expected}"
    ):
        reader.verify()


def test_files_of_another_model_are_found(tmp_path: Path, exported: Path, small: Recipe) -> None:
    other = tmp_path / "other"
    export(make_checkpoint(tmp_path / "in", small, seed=1), other, split=(3, 2, 2))
    shutil.copy(other / LAYER, exported / LAYER)
    with pytest.raises(ShardError, match=r"layer-003\.weights is damaged or of another model"):
        ShardReader(exported, 1).verify()
    shutil.rmtree(exported / "shard-02")
    shutil.copytree(other / "shard-02", exported / "shard-02")
    with pytest.raises(ShardError, match=r"shard\.json belongs to another export"):
        ShardReader(exported, 2)


def test_the_directory_of_another_shard_is_found(exported: Path) -> None:
    shutil.rmtree(exported / "shard-02")
    (exported / "shard-01").rename(exported / "shard-02")
    with pytest.raises(ShardError, match=r"shard\.json is of shard 1, expected shard 2"):
        ShardReader(exported, 2)


def test_which_shards_are_there(exported: Path) -> None:
    assert held_shards(exported) == (0, 1, 2)
    assert held_shards(exported / "shard-01") == (1,)
    shutil.rmtree(exported / "shard-01")
    assert held_shards(exported) == (0, 2)
    with pytest.raises(UsageError, match="holds shards 0, 2: say which one by --shard"):
        ShardReader(exported)
    with pytest.raises(ShardError, match=r"has no directory shard-01 \(it holds 0, 2\)"):
        ShardReader(exported, 1)
    with pytest.raises(UsageError, match=r"there is no shard 3: .* is split into 3, 0 to 2"):
        ShardReader(exported, 3)
    with pytest.raises(UsageError, match="is the directory of shard 2, not of shard 0"):
        ShardReader(exported / "shard-02", 0)
    shutil.rmtree(exported / "shard-00")
    assert ShardReader(exported).index == 2
    (exported / "shard-02" / "shard.json").unlink()
    with pytest.raises(ShardError, match="holds none of its 3 shards"):
        ShardReader(exported)
    with pytest.raises(ShardError, match=r"shard\.json is missing"):
        ShardReader(exported, 2)


def change(path: Path, by: Callable[[dict[str, object]], object]) -> None:
    value = json.loads(path.read_text())
    by(value)
    path.write_text(json.dumps(value))


def remove_layer(manifest: dict[str, object]) -> None:
    files = manifest["files"]
    assert isinstance(files, dict)
    del files[LAYER]


@pytest.mark.parametrize(
    ("by", "sentence"),
    [
        (remove_layer, r"is damaged: it does not list shard-01/layer-003\.weights"),
        (lambda m: m.update(split=[3, 2, 1]), "the split adds up to 6 layers, the config has 7"),
        (lambda m: m.update(split=[3, 0, 4]), r"split\.1: Input should be greater than or equal to 1"),
        (lambda m: m.update(format=1), "has format 1, this version reads 2"),
        (lambda m: m.update(family="gpt"), "model family 'gpt' is not known"),
        (lambda m: m.update(tokenizer=["../../secret"]), r"tokenizer\.0: Input should be 'tokenizer\.json'"),
        (lambda m: m.update(more=1), "more: Extra inputs are not permitted"),
        (lambda m: m.update(fingerprint="x"), "fingerprint: String should match pattern"),
        (
            lambda m: m["files"].update({"shard-09/x": {"size": 1, "sha256": "0" * 64}}),
            "lists the surplus file shard-09/x",
        ),
    ],
)
def test_cas_21_a_manifest_that_does_not_hold_together_is_refused(
    exported: Path, by: Callable[[dict[str, object]], object], sentence: str
) -> None:
    change(exported / "manifest.json", by)
    with pytest.raises(ShardError, match=sentence):
        ShardReader(exported, 0)


def test_no_manifest_is_said_with_what_to_do(tmp_path: Path, exported: Path) -> None:
    with pytest.raises(ShardError, match=r"has no manifest\.json: expected a directory that 'export' wrote"):
        ShardReader(tmp_path)
    (exported / "manifest.json").write_text('{"format"')
    with pytest.raises(ShardError, match=r"manifest\.json is no JSON .*: copy it again, or export again"):
        ShardReader(exported)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("offset", 2**40, r"places layers\.3\.q outside of layer-003\.weights"),
        ("nbytes", 4, r"places layers\.3\.q outside of layer-003\.weights"),
        ("offset", 4, r"shard\.json is damaged: .*multiple of 64"),
        ("encoding", "int5", r"shard\.json is damaged: .*Input should be 'f32'"),
    ],
)
def test_a_table_that_points_elsewhere_is_refused(
    exported: Path, field: str, value: object, sentence: str
) -> None:
    def spoil(table: dict[str, object]) -> None:
        files = table["files"]
        assert isinstance(files, dict)
        files["layer-003.weights"]["layers.3.q"][field] = value

    change(exported / "shard-01" / "shard.json", spoil)
    manifest = Manifest.load(exported)
    # The size has to agree, or the change is found before the table is read.
    size = (exported / "shard-01" / "shard.json").stat().st_size
    change(exported / "manifest.json", lambda m: m["files"]["shard-01/shard.json"].update(size=size))
    assert manifest.shards == 3
    with pytest.raises(ShardError, match=sentence):
        ShardReader(exported, 1)


def test_an_unknown_tensor_is_named(exported: Path) -> None:
    reader = ShardReader(exported, 1)
    with pytest.raises(ShardError, match=r"shard 1 in .* has no tensor head\.weight"):
        reader.tensor("head.weight")


def test_tensors_are_aligned_writable_and_leave_the_file_alone(exported: Path) -> None:
    reader = ShardReader(exported, 1)
    before = (exported / LAYER).read_bytes()
    for name in reader.names:
        values = reader.tensor(name)
        assert values.ctypes.data % 64 == 0
        assert values.flags.c_contiguous
        values[...] = 7.0
    assert (exported / LAYER).read_bytes() == before
    assert reader.nbytes == sum(reader.tensor(name).nbytes for name in reader.names)


class Counted:
    """Counts the files that are read in full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        self._real = reader_module.file_sha256
        monkeypatch.setattr(reader_module, "file_sha256", self._sha256)

    def _sha256(self, path: Path, progress: Callable[[int], None] | None = None) -> str:
        self.read.append(path.name)
        return self._real(path, progress)


def test_contents_are_read_once(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, state = Counted(monkeypatch), tmp_path / "state"
    ShardReader(exported, 1).verify(state)
    assert sorted(counted.read) == ["layer-003.weights", "layer-004.weights", "shard.json", "tokenizer.json"]
    counted.read.clear()
    ShardReader(exported, 1).verify(state)
    assert counted.read == []
    stat = (exported / LAYER).stat()
    os.utime(exported / LAYER, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    ShardReader(exported, 1).verify(state)
    assert counted.read == ["layer-003.weights"]


def test_a_damaged_file_is_not_remembered(exported: Path, tmp_path: Path) -> None:
    path, state = exported / LAYER, tmp_path / "state"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    for _ in range(2):
        with pytest.raises(ShardError, match="is damaged"):
            ShardReader(exported, 1).verify(state)
    path.write_bytes(good)
    ShardReader(exported, 1).verify(state)


@pytest.mark.parametrize("content", [b"", b"{", b'{"files": 3}', b"\xff\xfe"])
def test_a_memory_that_can_not_be_read_is_an_empty_one(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "verified.json").write_bytes(content)
    counted = Counted(monkeypatch)
    ShardReader(exported, 1).verify(tmp_path / "state")
    assert len(counted.read) == 4
    ShardReader(exported, 1).verify(tmp_path / "state")
    assert len(counted.read) == 4


def test_the_check_tells_how_far_it_is(exported: Path) -> None:
    seen: list[VerifyProgress] = []
    ShardReader(exported, 1).verify(None, seen.append)
    done = [step.done for step in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total
    assert np.isclose(seen[0].done, size_of(exported, LAYER))


def test_rpc_03_a_memory_that_can_not_be_written_fails_alone(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    counted = Counted(monkeypatch)
    for _ in range(2):
        ShardReader(exported, 1).verify(tmp_path / "file" / "state")
    assert len(counted.read) == 8, "what is not kept is read again"
