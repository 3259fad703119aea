"""A few of the runs of `scripts/lab_runs.py`, which has more and longer ones: a ring whose network breaks."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def lab_runs(netlab: ModuleType) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
        yield importlib.import_module("lab_runs")


@pytest.fixture(scope="module")
def ring(netlab: ModuleType, lab_runs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with netlab.Lab(lab_runs.HOSTS + 1, f"l{os.getpid()}") as lab:
        made = lab_runs.LabRing(lab, tmp_path_factory.mktemp("lab-runs"), streams=2, tokens=300)
        made.prepare()
        yield made


@pytest.mark.parametrize("name", ["cut_1s", "mute"])
def test_a_ring_whose_network_breaks_answers_all_the_same(ring: Any, lab_runs: ModuleType, name: str) -> None:
    (run,) = lab_runs.runs(ring, [name])
    assert run.faults == []
    assert run.right == run.answers > 0
