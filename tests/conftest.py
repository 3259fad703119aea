"""What several packages' tests need."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cascadia_p2p.catalog import KNOWN, pull
from cascadia_p2p.errors import UnreachableError

ROOT = Path(__file__).resolve().parents[1]


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
