from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_benchmark_runs_and_reports(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [sys.executable, str(ROOT / "scripts" / "bench_ring.py")]
    command += ["--nodes", "3", "--turns", "40", "--rounds", "1", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "turn of 3 nodes, ours" in ran.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["hop_ms"]["real"]["count"] >= 36
    assert 0 < result["hop_ms"]["real"]["p50"] < result["turn_ms"]["real"]["p50"]
    assert set(result["bars_ms"]) == {"hop_p50", "hop_p99", "turn_p50"}
