"""Processes that run one Discovery each, as tests see them."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SPEAKER = Path(__file__).with_name("speaker.py")


class Speaker:
    """A process that runs `Discovery`; its lines are read by a thread."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: queue.Queue[dict[str, object]] = queue.Queue()
        self._seen: list[dict[str, object]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def wait_for(
        self, accept: Callable[[dict[str, object]], bool], seconds: float = 60.0
    ) -> dict[str, object]:
        """The first line, old or new, that is accepted."""
        for line in self._seen:
            if accept(line):
                return line
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no such line within {seconds} s; there were {self._seen}")
            self._seen.append(line)
            if accept(line):
                return line

    def everything(self) -> list[dict[str, object]]:
        """All lines so far."""
        while not self._lines.empty():
            self._seen.append(self._lines.get())
        return list(self._seen)

    def say(self, word: str) -> None:
        """Send a command line to the process."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()


def speaker_command(**options: object) -> list[str]:
    """The command line of an speaker."""
    return [sys.executable, str(SPEAKER), json.dumps(options)]
