"""Exported sample models, and commands run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog
from cluster.conftest import shards

from cascadia_p2p.cli import main

__all__ = ["shards"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`run("status", "--json")` runs a command in this process."""
    for name in [name for name in os.environ if name.startswith("CASCADIA_")]:
        monkeypatch.delenv(name)

    before = structlog.get_config()

    def command(*arguments: object) -> Outcome:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            # argparse leaves this way.
            code = stop.code if isinstance(stop.code, int) else 1
        said = capsys.readouterr()
        return Outcome(code, said.out, said.err)

    yield command
    # A ring that stands for the module logs on.
    structlog.configure(**before)


@pytest.fixture
def joins(run: Run, tmp_path: Path) -> Run:
    """`joins(model, "--shard", 0)` is a `join` that meets nobody but whom its flags name."""

    def join(model: Path, *flags: object) -> Outcome:
        given = ("--model", model, "--fleet", "join-tests", "--bind", "127.0.0.1", "--no-mdns")
        places = ("--port", 0, "--client-port", 0, "--state-dir", tmp_path / "state", "--threads", 1)
        return run("join", *given, *places, "--slots", 2, "--context", 64, *flags)

    return join


@pytest.fixture
def process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`process("join", ...)` starts a command as a process of its own, ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CASCADIA_")}
        # Output into a pipe is buffered for users.
        environment.pop("PYTHONUNBUFFERED", None)
        made = subprocess.Popen(
            [sys.executable, "-m", "cascadia_p2p", *map(str, arguments)],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(made)
        return made

    yield start
    for made in started:
        if made.poll() is None:
            made.kill()
        made.communicate()
