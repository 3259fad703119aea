from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from speakers import ROOT, Speaker, speaker_command


def _load_netlab() -> ModuleType:
    spec = importlib.util.spec_from_file_location("netlab", ROOT / "scripts" / "netlab.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["netlab"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def netlab() -> ModuleType:
    """The lab's module, or a skip with the reason why there can be none here."""
    module = _load_netlab()
    reason = module.missing()
    if reason is not None:
        pytest.skip(reason)
    return module


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
        process.communicate(timeout=10)
