"""A client on a host of the lab: reads answers in pieces and tells when each piece came.

Run in the host as `lab_reader.py FLEET KEY`; commands come as JSON lines on standard input, what happens goes
out as JSON lines. It finds the head by mDNS, as a client of the library does. `Reader` is the
side that drives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from netlab import Lab, LabError

from cascadia_p2p.client import AsyncClient
from cascadia_p2p.errors import CascadiaError, NoHeadError
from cascadia_p2p.logs import configure_logs

TIMEOUT_S = 120.0
STATUS_S = 6.0
SEARCHES = 6
"""For a head, before a stream has begun: on a busy machine one may find none in its time."""

PROMPT = 12


def prompt(number: int) -> list[int]:
    """A prompt that no other stream has."""
    return [4 + (number * 31 + place * 7) % 200 for place in range(PROMPT)]


class Answers:
    """Streams that were asked for together.

    Args:
        ask: number of the command.
        numbers: of the streams.
    """

    def __init__(self, ask: int, numbers: Iterable[int]) -> None:
        self.ask, self.numbers = ask, list(numbers)
        self.arrivals: list[float] = []
        """When pieces of the first stream came (Unix)."""
        self.notices: list[str] = []
        self.done: dict[int, dict[str, Any]] = {}
        self._tokens = 0
        self._news = threading.Condition()

    def take(self, event: dict[str, Any]) -> None:
        """An event of these streams."""
        with self._news:
            if event["event"] == "piece" and event["stream"] == self.numbers[0]:
                self.arrivals.append(event["at"])
                self._tokens = event["tokens"]
            elif event["event"] == "notice":
                self.notices.append(event["notice"])
            elif event["event"] == "done":
                self.done[event["stream"]] = event
            self._news.notify_all()

    def begun(self, tokens: int, patience_s: float) -> None:
        """Wait until the first stream has so many tokens.

        Raises:
            LabError: it has not in time.
        """
        self._until(lambda: self._tokens >= tokens or bool(self.done), patience_s, f"{tokens} tokens")

    def wait(self, patience_s: float) -> list[dict[str, Any]]:
        """Every stream's end: `ids`, or `error`; one that hangs ends with an error here."""
        with contextlib.suppress(LabError):
            self._until(lambda: len(self.done) == len(self.numbers), patience_s, "all answers")
        hung = {"error": f"no end within {patience_s:g} s"}
        return [self.done.get(number, hung) for number in self.numbers]

    def _until(self, condition: Any, patience_s: float, what: str) -> None:
        with self._news:
            if not self._news.wait_for(condition, patience_s):
                raise LabError(f"no {what} within {patience_s:g} s: {self._tokens} tokens, {self.done}")


class Reader:
    """Drives a reader on a host.

    Args:
        lab: the lab.
        host: where it runs.
        fleet: whose head it asks.
        key: file that opens the head's door.
    """

    def __init__(self, lab: Lab, host: int, fleet: str, key: object) -> None:
        command = [sys.executable, __file__, fleet, str(key)]
        self.process = lab.start(host, command, subprocess.DEVNULL)
        self._asked: dict[int, Answers] = {}
        self._status: dict[int, dict[str, Any]] = {}
        self._news = threading.Condition()
        self._count = 0
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, numbers: Iterable[int], tokens: int) -> Answers:
        """Ask for these streams at once."""
        self._count += 1
        answers = self._asked[self._count] = Answers(self._count, numbers)
        self._say({"ask": self._count, "streams": answers.numbers, "tokens": tokens})
        return answers

    def status(self) -> dict[str, Any]:
        """The head's status; empty while no head is found."""
        self._count += 1
        asked = self._count
        self._say({"status": asked})
        with self._news:
            self._news.wait_for(lambda: asked in self._status, 2 * STATUS_S)
            return self._status.pop(asked, {})

    def cancel(self) -> None:
        """End all that runs in this reader."""
        self._say({"cancel": True})

    def _say(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "status":
                with self._news:
                    self._status[event["ask"]] = event["body"]
                    self._news.notify_all()
            else:
                self._asked[event["ask"]].take(event)


def _tell(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}, default=str), flush=True)


class _Program:
    """What runs in the host."""

    def __init__(self, fleet: str, key: str) -> None:
        self._fleet, self._key = fleet, key
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command = json.loads(line)
            if "ask" in command:
                task = asyncio.create_task(self._ask(**command))
            elif "status" in command:
                task = asyncio.create_task(self._tell_status(command["status"]))
            else:
                for each in self._tasks:
                    each.cancel()
                continue
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _tell_status(self, ask: int) -> None:
        body: object = {}
        with contextlib.suppress(CascadiaError):
            async with AsyncClient(fleet=self._fleet, key=self._key, timeout_s=STATUS_S) as client:
                body = await client.status()
        _tell("status", ask=ask, body=body)

    async def _ask(self, ask: int, streams: list[int], tokens: int) -> None:
        async with AsyncClient(fleet=self._fleet, key=self._key, timeout_s=TIMEOUT_S) as client:
            await asyncio.gather(*(self._stream(client, ask, number, tokens) for number in streams))

    async def _stream(
        self, client: AsyncClient, ask: int, number: int, tokens: int, searches: int = SEARCHES
    ) -> None:
        ids: list[int] = []
        where = {"ask": ask, "stream": number}
        try:
            answer = client.stream(prompt(number), max_tokens=tokens, ignore_eos=True)
            async for piece in answer:
                ids += piece.token_ids
                if piece.notice:
                    _tell("notice", **where, notice=piece.notice, at=time.time())
                if piece.token_ids:
                    _tell("piece", **where, tokens=len(ids), at=time.time())
            if tuple(ids) != answer.reply.token_ids:
                raise CascadiaError(f"pieces have {len(ids)} ids, the whole answer others")
            _tell("done", **where, ids=ids, at=time.time())
        except CascadiaError as error:
            if isinstance(error, NoHeadError) and not ids and searches > 1:
                await self._stream(client, ask, number, tokens, searches - 1)
                return
            _tell("done", **where, error=f"{type(error).__name__}: {error}", begun=len(ids), at=time.time())


if __name__ == "__main__":
    configure_logs("console", "error")
    asyncio.run(_Program(sys.argv[1], sys.argv[2]).run())
