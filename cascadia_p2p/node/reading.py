"""Requests that take long to be read: beside the event loop, and only so many at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from cascadia_p2p.errors import ErrorCode, RequestError

T = TypeVar("T")

READERS: Final = 4
"""Threads that read."""

READING_BYTES: Final = 1 << 27
"""Memory of requests that are read, or wait for that, at a time."""

LARGE_BYTES: Final = 1 << 20
"""Of a request, above which they are read one at a time: a tokenizer takes fifty times as much meanwhile."""

RETRY_S: Final = 5.0
"""When who was refused for those may try again."""


class Reading:
    """Reads in threads of its own; used in the event loop alone.

    Args:
        overload: what a request is refused with when so many before it are still to be queued, or None.
    """

    def __init__(self, overload: Callable[[int], RequestError | None]) -> None:
        self._overload = overload
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        self._turns = asyncio.Semaphore(READERS)
        self._large = asyncio.Lock()
        self._tasks: dict[asyncio.Task[None], int] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def refusal(self, size: int) -> RequestError | None:
        """Why one more request, of so many bytes of memory, can not be read now; None when it can.

        A request that is read already is not before itself.
        """
        before = len(self._tasks) - (asyncio.current_task() in self._tasks)
        if before and sum(self._tasks.values()) + size > READING_BYTES:
            text = f"{before} requests are being read already, as much as this node reads: try again later"
            return RequestError(ErrorCode.OVERLOADED, text, retry_after_s=RETRY_S)
        return self._overload(before)

    def start(self, reading: Coroutine[None, None, None], size: int) -> None:
        """Run what reads a request of so many bytes of memory, by `read`, and goes on with it."""
        task = asyncio.create_task(reading, name="prompt")
        self._tasks[task] = size
        task.add_done_callback(self._tasks.pop)

    async def read(self, read: Callable[[], T], wanted: Callable[[], bool]) -> T | None:
        """What `read` gives, in a thread; None if that is not `wanted` any more when its turn comes."""
        task = asyncio.current_task()
        large = task is not None and self._tasks.get(task, 0) > LARGE_BYTES
        async with self._large if large else contextlib.nullcontext(), self._turns:
            if not wanted():
                return None
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    async def close(self) -> None:
        """Begin nothing more; what is in a thread ends there unheard."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False)
