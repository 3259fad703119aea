"""A small model, and its exports, shared by the tests of this directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fixtures.exports import exact_export as export

from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import Recipe

SMALL = Recipe("small", layers=7, hidden=32, experts=5, chosen=2, expert_width=8, dense_width=24)


@pytest.fixture(scope="session")
def small() -> Recipe:
    """Seven layers, the sixth of them global, the first two dense."""
    return SMALL


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model as transformers writes it."""
    return make_checkpoint(tmp_path_factory.mktemp("source") / "model", SMALL)


@pytest.fixture(scope="session")
def unspoiled(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model in three shards of 3, 2 and 2 layers, to be left as it is."""
    out = tmp_path_factory.mktemp("unspoiled") / "exported"
    export(checkpoint, out, split=(3, 2, 2))
    return out


@pytest.fixture
def exported(unspoiled: Path, tmp_path: Path) -> Path:
    """A copy of it, for a test to spoil."""
    return shutil.copytree(unspoiled, tmp_path / "exported")
