from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest
from speakers import ROOT, Speaker, speaker_command


@pytest.fixture
def start_speaker() -> Iterator[Callable[..., Speaker]]:
    """Starts speakers on this machine's own network, and ends them."""
    processes: list[subprocess.Popen[str]] = []

    def start(**options: object) -> Speaker:
        process = subprocess.Popen(
            speaker_command(**options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        processes.append(process)
        return Speaker(process)

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=60)
