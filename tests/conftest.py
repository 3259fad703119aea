"""What several packages' tests need."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import structlog
from hypothesis import HealthCheck, settings

from cascadia_p2p import local
from cascadia_p2p.catalog import KNOWN, pull
from cascadia_p2p.errors import UnreachableError

ROOT = Path(__file__).resolve().parents[1]
PORTS = 10_000

# How long an example takes is a matter of how busy the machine is.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


_FIRST = ("engine/test_instruction_sets", "ring/", "planning/", "cluster/", "cli/", "bench/", "engine/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what compiles kernels and, beside it, what needs none; then the long files."""

    def place(item: pytest.Item) -> int:
        name = item.nodeid.removeprefix("tests/")
        return next((at for at, each in enumerate(_FIRST) if name.startswith(each)), len(_FIRST))

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """A shell lets what runs in the background ignore Ctrl-C, and the tests' processes would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def ports() -> None:
    """A range of ports for each worker: one is free until the process that it is for has started.

    They lie below those that commands choose from, which tests start as processes.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    width = (local.LOWEST_PORT - PORTS) // 4
    at = PORTS + worker % 4 * width
    for name, port in (("LOWEST_PORT", at), ("HIGHEST_PORT", at + width - 2)):
        setattr(local, name, port)


@pytest.fixture(scope="session", autouse=True)
def time_to_end() -> None:
    """As long as a busy machine takes: tests see by the exit code whether a node ended by itself."""
    local.END_S = 60.0  # type: ignore[misc]


@pytest.fixture(scope="session", autouse=True)
def bytecode() -> None:
    """Two hundred processes are started here: each would compile every module again."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session", autouse=True)
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A configuration directory of the tests' own: the user's keys are neither used nor added to."""
    directory = tmp_path_factory.mktemp("configuration")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(directory))
        patch.delenv("CASCADIA_KEY", raising=False)
        yield directory


@pytest.fixture(autouse=True)
def log_set_up() -> Iterator[None]:
    """What a test does to the set-up of logs ends with it."""
    before = structlog.get_config() if structlog.is_configured() else None
    yield
    if before is None:
        structlog.reset_defaults()
    else:
        structlog.configure(**before)


@pytest.fixture(scope="session")
def netlab() -> ModuleType:
    """The lab's module, or a skip with the reason why there can be none here."""
    spec = importlib.util.spec_from_file_location("netlab", ROOT / "scripts" / "netlab.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["netlab"] = module
    spec.loader.exec_module(module)
    reason = module.missing()
    if reason is not None:
        pytest.skip(reason)
    return module


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The SmolLM2 GGUF in the user's cache, or a skip with the reason why it can not be had."""
    try:
        return pull(KNOWN["smollm2-135m"])
    except UnreachableError as error:
        pytest.skip(f"the real model is not here: {error}")
