"""Exported sample models, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.reference import Case, load_case

from cascadia_p2p.shards.encodings import EXACT
from cascadia_p2p.shards.export import export

Shards = Callable[..., Path]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """`shards(case, split, spelling)` gives the directory of the exported sample model."""
    made: dict[tuple[str, tuple[int, ...], str], Path] = {}

    def make(case: Case | str, split: tuple[int, ...], spelling: str = "B") -> Path:
        case = load_case(case) if isinstance(case, str) else case
        key = (case.name, split, spelling)
        if key not in made:
            root = tmp_path_factory.mktemp(f"{case.name}-{len(split)}")
            checkpoint = case.build(root / "checkpoint", spelling)
            export(checkpoint, root / "model", split=split, encodings=EXACT)
            made[key] = root / "model"
        return made[key]

    return make
