"""Kernels compiled for one thread."""

from __future__ import annotations

import pytest

from cascadia_p2p.compiled import compiling


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    compiling.set_threads(1)
    compiling.warm_up()
