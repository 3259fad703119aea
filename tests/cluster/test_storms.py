"""Bounded samples of the long runs of `scripts/`: nodes killed and frozen while every answer is checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.crowds.storm import plan

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")


def sampled(script: str, out: Path, *arguments: str) -> dict[str, Any]:
    """What a script found; it has to end well."""
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments, "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_a_storm_is_planned_by_its_seed_and_over_in_time() -> None:
    events = plan(7, 1200.0, [0, 2, 3], 4, cuts=True)
    assert events == plan(7, 1200.0, [0, 2, 3], 4, cuts=True)
    assert events != plan(8, 1200.0, [0, 2, 3], 4, cuts=True)
    assert {event.kind for event in events} == {"kill", "freeze", "cut"}
    assert {event.seat for event in events if event.kind == "kill"} == {0, 2, 3}
    assert {event.seat for event in events} == {0, 1, 2, 3}
    assert all(event.at_s + event.for_s < 1200.0 for event in events)
    assert {event.kind for event in plan(7, 1200.0, [0], 4, cuts=False)} == {"kill", "freeze"}


def test_the_head_and_another_are_killed_and_no_token_is_lost_or_comes_twice(tmp_path: Path) -> None:
    found = sampled("kill_each.py", tmp_path / "kills.json", "--quick")
    cases = {(case["way"], *case["shards"]): case for case in found["cases"]}
    assert set(cases) == {("standby", 0), ("restarted", 1)}
    for case in cases.values():
        assert case["errors"] == []
        assert case["right"] == case["clients"] > 0
        assert min(case[name] for name in ("detect_s", "form_s", "any_token_s", "token_s")) > 0


def test_chaos_leaves_no_wrong_token_no_waiting_client_and_no_slot(tmp_path: Path) -> None:
    shape = ("--minutes", "0.1", "--streams", "5", "--nodes", "2", "--sample", "tiny12")
    found = sampled("chaos.py", tmp_path / "chaos.json", *shape, "--gap", "1.5", "--seed", "10")
    assert found["fault_count"] == 0
    assert found["requests"] > 5
    assert found["tokens_compared"] > 20
    assert found["slots_taken_after"] == [0, 0, 0]
    happened = [event["kind"] for event in found["plan"] if not event["skipped"]]
    assert sorted(happened) == ["freeze", "kill"]
