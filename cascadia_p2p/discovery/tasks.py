"""What runs in the background of discovery: that it failed is said, and nothing else ends by it."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

__all__ = ["note_failure"]

_log = structlog.get_logger()


def note_failure(task: asyncio.Future[Any]) -> None:
    """Say why a task has failed that nobody waits for; to be called when it is done."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    name = task.get_name() if isinstance(task, asyncio.Task) else "discovery"
    _log.error("task_failed", message=f"the task '{name}' failed ({error})", exc_info=error)
