from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.exports import exact_export as export
from fixtures.reference import load_case

from cascadia_p2p.local import LocalRing


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in one shard."""
    root = tmp_path_factory.mktemp("examined")
    export(load_case("tiny12").build(root / "checkpoint"), root / "model", shards=1)
    return root / "model"


@pytest.fixture(scope="session")
def living_node(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRing]:
    """A node that serves the model alone, on 127.0.0.1."""
    with LocalRing(exported, tmp_path_factory.mktemp("state")) as ring:
        ring.start_node()
        ring.wait_for("ring_open", 240)
        yield ring
