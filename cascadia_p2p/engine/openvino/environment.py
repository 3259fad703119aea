"""What has to hold before OpenVINO is used: its version, and the environment that its GPU plugin reads."""

from __future__ import annotations

import os
from typing import Final

LEAST_OPENVINO: Final = (2026, 3)
"""Older ones want the routing of experts inside the GPU's graph."""

PLUGIN_ENVIRONMENT: Final = {"OV_GPU_MOE_BATCHED_GEMV_THRESHOLD": "0"}
"""Its decode kernels for experts refuse groups of 32, and only when they are called: two rows and more then
take its grouped products, which do not."""


def set_plugin_environment() -> None:
    """Set `PLUGIN_ENVIRONMENT`; other values of these names would break calls, so they are replaced."""
    # On Windows this reaches the C runtime that the plugin reads too, as long as it is not loaded yet.
    os.environ.update(PLUGIN_ENVIRONMENT)
