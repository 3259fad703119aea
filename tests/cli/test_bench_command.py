"""What `bench` refuses, and in which words."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from cli.conftest import ROOT, Run

LIMIT_S = 100.0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--levels", "1,none"), "--levels '1,none'"),
        (("--levels", "0"), "--levels '0'"),
        (("--tokens", 1), "1 tokens a request"),
        (("--requests", 0), "0 requests a level"),
        (("--seed", -1), "--seed -1"),
        (("--slots", 4), "--slots is what emulated nodes promise"),
        (("--context", 400), "--context is what emulated nodes promise"),
        (("--time-scale", 2), "--time-scale goes with --emulate"),
        (("--emulate", "a.json"), "give --model"),
        (("--emulate", "a.json", "--model", "configs/inkling-975b"), "a.json is neither 'published' nor"),
        (("--emulate", "published", "--nodes", 3), "'published' has its own"),
        (("--nodes", 3), "--nodes goes with --emulate"),
        (("--emulate", "published", "--endpoint", "tcp://127.0.0.1:1"), "leave out --endpoint"),
        (("--emulate", "published", "--prompt-file", "x"), "leave out --prompt-file"),
        (("--emulate", "published", "--time-scale", 0), "--time-scale 0"),
        (("--emulate", "published", "--context", 100), "--context 100"),
        (("--json", "/no/such/directory/a.json"), "no directory /no/such/directory"),
        (("--plot", "/no/such/directory/a.png"), "no directory /no/such/directory"),
    ],
)
def test_what_can_not_be_measured_is_refused_before_anything_starts(
    run: Run, flags: tuple[object, ...], words: str
) -> None:
    done = run("bench", *flags)
    assert done.code == 2
    assert words in done.err
    assert done.out == ""


def test_nobody_there_is_said_and_ends_with_its_code(run: Run) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    done = run("bench", "--endpoint", address, "--levels", "1")
    assert done.code == 6
    assert "no head node answers" in done.err


def test_a_file_of_prompts_that_is_missing_is_named(run: Run, tmp_path: Path) -> None:
    done = run("bench", "--prompt-file", tmp_path / "absent.txt", "--levels", "1")
    assert done.code == 2
    assert "absent.txt can not be read" in done.err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_prints_what_was_measured_and_leaves_no_process(
    process: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    profile, out = tmp_path / "profile.json", tmp_path / "out.json"
    profile.write_text(
        json.dumps(json.loads((ROOT / "configs" / "fleet-of-eleven.profile.json").read_text())[1])
    )
    fleet = (
        "--emulate",
        profile,
        "--model",
        ROOT / "configs" / "inkling-975b",
        "--nodes",
        2,
        "--time-scale",
        20,
    )
    # The second level takes seconds: it is interrupted, however late its first line is seen.
    asked = ("--levels", "1,2", "--tokens", 4, "--requests", 18, "--json", out)
    bench = process("bench", *fleet, *asked)
    assert bench.stderr is not None
    said = ""
    while "2 streams: cohort 1 of 9" not in said:
        line = bench.stderr.readline()
        assert line, f"it ended early: {said}"
        said += line
    nodes = psutil.Process(bench.pid).children()
    assert len(nodes) == 2
    bench.send_signal(signal.SIGINT)
    printed, rest = bench.communicate(timeout=LIMIT_S)
    assert bench.returncode == 130, rest
    assert "interrupted" in rest
    assert [line.split()[0] for line in printed.splitlines() if line.split()] == ["streams", "1"]
    body = json.loads(out.read_bytes())
    assert (body["complete"], [level["streams"] for level in body["levels"]]) == (False, [1])
    assert body["emulated"] == {"fleet": "profile.json", "time_scale": 20.0}
    assert not [node for node in nodes if node.is_running() and node.status() != psutil.STATUS_ZOMBIE]
