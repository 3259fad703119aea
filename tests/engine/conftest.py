from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cascadia_p2p.compiled import compiling
from cascadia_p2p.engine.kernels import (
    attention,
    convolution,
    norms,
    residual,
    rotary,
    rotary_attention,
    router,
    sampling,
    vocabulary,
)


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    """All kernels that tests of one thread need, compiled or loaded before any clock runs."""
    assert all(
        (attention, convolution, norms, residual, rotary, rotary_attention, router, sampling, vocabulary)
    )
    compiling.set_threads(1)
    compiling.warm_up()
