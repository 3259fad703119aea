"""Runs targets, a process each, led by coverage where atheris is installed and by chance elsewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from fuzzing.target import LONGEST, Judge, Mutator, Target

GRACE_S: Final = 600.0
"""Beyond its seconds, for a process to start and to end."""

MORE_MEMORY: Final = 2 << 30
"""Bytes of address space beyond those at the start: a claimed size that is allocated fails there."""

_COVERAGE: Final = re.compile(rb"cov: (\d+)")


def has_atheris() -> bool:
    """Whether coverage can lead."""
    return importlib.util.find_spec("atheris") is not None


def drive(script: Path, name: str, seconds: float, corpus: Path | None) -> dict[str, Any]:
    """Run one target for so long; what came of it.

    Args:
        script: the program, which runs one target with `--child`.
        name: of the target.
        seconds: how long.
        corpus: where inputs that reached something new are kept for the next time; None keeps none.
    """
    command = [sys.executable, str(script), "--child", name, "--seconds", str(seconds)]
    if corpus is not None:
        (corpus / name).mkdir(parents=True, exist_ok=True)
        command += ["--corpus", str(corpus / name)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds + GRACE_S, check=False)
    except subprocess.TimeoutExpired as error:
        return _fallen(name, "no end", (error.stderr or b"")[-2000:])
    line = next((each for each in done.stdout.splitlines()[::-1] if each.startswith(b'{"target"')), None)
    if line is None:
        return _fallen(name, f"the process ended with {done.returncode}", done.stderr[-2000:])
    found: dict[str, Any] = json.loads(line)
    reached = _COVERAGE.findall(done.stderr)
    found["coverage"] = int(reached[-1]) if reached else None
    return found


def _fallen(name: str, why: str, said: bytes) -> dict[str, Any]:
    fault = {"kind": why, "input": "", "trace": said.decode(errors="replace")}
    return {"target": name, "inputs": 0, "refused": 0, "seconds": 0.0, "coverage": None, "faults": [fault]}


def bound_memory() -> None:
    """Let this process have only so much more address space than it has now."""
    try:
        import resource
    except ImportError:
        return
    import psutil

    most = psutil.Process().memory_info().vms + MORE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def run_child(target: Target, seconds: float, corpus: Path | None, start: Callable[[], None]) -> NoReturn:
    """Fuzz in this process until the time is over, print the result as JSON, and end the process.

    Args:
        target: what to fuzz.
        seconds: how long.
        corpus: see `drive`.
        start: called before the first input.
    """
    judge, seeds = Judge(target), list(target.seeds())
    for seed in seeds:
        judge.give(seed)
    start()
    begun = time.monotonic()

    def give(data: bytes) -> None:
        judge.give(data)
        if time.monotonic() - begun > seconds:
            _end(judge, time.monotonic() - begun)

    if has_atheris():
        _follow_coverage(give, seeds, corpus)
    mutator = Mutator(seeds)
    while True:
        give(mutator.next())


def _follow_coverage(give: Callable[[bytes], None], seeds: list[bytes], corpus: Path | None) -> None:
    import atheris

    from fuzzing.file_targets import scratch

    directory = corpus or scratch() / "corpus"
    directory.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds):
        (directory / f"seed-{number}").write_bytes(seed[:LONGEST])
    flags = [f"-max_len={LONGEST}", "-rss_limit_mb=0", "-timeout=60", "-len_control=0"]
    atheris.Setup([sys.argv[0], *flags, str(directory)], give)
    atheris.Fuzz()


def _end(judge: Judge, seconds: float) -> NoReturn:
    faults = [
        {"kind": each.kind, "input": each.data.hex(), "trace": each.trace[-4000:]}
        for each in judge.faults.values()
    ]
    result: Mapping[str, Any] = {
        "target": judge.target.name,
        "inputs": judge.inputs,
        "refused": judge.refused,
        "seconds": round(seconds, 1),
        "faults": faults,
    }
    sys.stderr.flush()
    print(json.dumps(result), flush=True)
    # The driver of atheris would end the process without a word.
    os._exit(0)
