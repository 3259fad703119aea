"""Readers who outlive the head: each asks on and on, and every token and every end is checked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import zmq
import zmq.asyncio

from cascadia_p2p.asking import RETURN_S
from cascadia_p2p.client import AsyncClient
from cascadia_p2p.discovery.lookup import find_head
from cascadia_p2p.errors import CascadiaError, ErrorCode, RequestError, UnreachableError

from .crowd import Known

DEADLINE_S: Final = 120.0
"""Within which every request must have its end."""

SHARED: Final = 4
"""Readers that share one connection of the library."""

HABITS: Final = {"read": 0.5, "wait": 0.2, "leave": 0.15, "hang up": 0.15}
"""Reads to the end; waits for the whole answer; stops reading, which cancels; closes its connection."""

ENDS: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""What ends a connection, or an attempt at one: a frozen head's system still accepts."""

GIVEN_UP: Final = {
    "a node was lost twice while it computed this request": "given up by the head",
    "2 heads were lost while they had this request": "given up by the library",
}
"""How the errors of a request begin that may be what kills the nodes: chance can look like that."""


@dataclass(slots=True)
class Readings:
    """What became of all requests.

    Args:
        ended: how many ended in which way.
        faults: what was wrong, in words.
        tokens: that were compared.
        longest_s: the longest that a request took to its end.
    """

    ended: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    tokens: int = 0
    longest_s: float = 0.0

    def fault(self, sentence: str) -> None:
        """Note what was wrong."""
        self.faults.append(sentence[:400])

    def compare(self, ids: Sequence[int], known: Known, *, whole: int | None = None) -> None:
        """Count the ids of an answer, or of its beginning; another one than the known is a fault."""
        self.tokens += len(ids)
        if tuple(ids) != known.answer[: len(ids)]:
            self.fault(f"wrong tokens: {list(ids)} where {known.answer[: len(ids)]} were due")
        elif whole is not None and len(ids) != whole:
            self.fault(f"{len(ids)} tokens where {whole} were due")


class Readers:
    """So many readers at once, until they are told that it is over.

    Args:
        fleet: whose head they look for by mDNS, or its address.
        known: what may be asked.
        seed: of what each reader does.
        over: whether nothing new is to be asked.
    """

    def __init__(self, fleet: str, known: Sequence[Known], seed: int, over: Callable[[], bool]) -> None:
        self._fleet = fleet
        self._known = known
        self._seed = seed
        self._over = over
        self.outcome = Readings()

    async def read(self, count: int) -> None:
        """Let `count` readers ask; every fifth of them without the library."""
        clients = [AsyncClient(fleet=self._fleet, timeout_s=None) for _ in range(-(-count // SHARED))]
        context = zmq.asyncio.Context()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(count):
                    draw = random.Random(self._seed * 1000 + number)
                    if number % 5 == 4:
                        group.create_task(self._bare_reader(context, draw))
                    else:
                        group.create_task(self._reader(clients[number // SHARED], draw))
        finally:
            for client in clients:
                await client.close()
            context.destroy(linger=0)

    async def _reader(self, client: AsyncClient, draw: random.Random) -> None:
        while not self._over():
            await asyncio.sleep(draw.uniform(0.0, 0.3))
            known = draw.choice(self._known)
            habit = draw.choices(list(HABITS), list(HABITS.values()))[0]
            tokens = draw.randint(1, len(known.answer))
            async with self._ends(known):
                match habit:
                    case "read":
                        await self._read(client, known, tokens, tokens)
                    case "wait":
                        reply = await client.generate(known.ids, max_tokens=tokens, ignore_eos=True)
                        self.outcome.compare(reply.token_ids, known, whole=tokens)
                    case "leave":
                        await self._read(client, known, tokens, draw.randint(0, tokens))
                    case "hang up":
                        own = AsyncClient(fleet=self._fleet, timeout_s=None)
                        async with own:
                            await self._read(own, known, tokens, draw.randint(0, tokens), close=True)
                self.outcome.ended[habit] += 1

    async def _read(
        self, client: AsyncClient, known: Known, tokens: int, stop: int, *, close: bool = False
    ) -> None:
        """Read an answer, and go once `stop` ids have come."""
        ids: list[int] = []
        answer = client.stream(known.ids, max_tokens=tokens, ignore_eos=True)
        number = 0
        async with contextlib.aclosing(answer):
            async for piece in answer:
                number += 1
                if piece.seq != number:
                    self.outcome.fault(f"piece {piece.seq} came where {number} was due")
                ids += piece.token_ids
                if len(ids) >= stop < tokens:
                    if close:
                        await client.close()
                    self.outcome.compare(ids, known)
                    return
        self.outcome.compare(ids, known, whole=tokens)
        if tuple(ids) != answer.reply.token_ids:
            self.outcome.fault(f"pieces do not add up: {ids} and {answer.reply.token_ids}")

    @contextlib.asynccontextmanager
    async def _ends(self, known: Known) -> AsyncIterator[None]:
        """Judge how a request ends, and when."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield
        except TimeoutError:
            self.outcome.ended["hung"] += 1
            self.outcome.fault(f"no end within {DEADLINE_S:g} s of the request for {known.ids[:8]}...")
        except RequestError as error:
            self._failed(error.code, error.message)
        except CascadiaError as error:
            # Who lost a head looks for it that long; who gives up earlier has not found one to begin with.
            begun = loop.time() - started >= RETURN_S or not isinstance(error, UnreachableError)
            self.outcome.ended["lost" if begun else "found no head"] += 1
            if begun:
                self.outcome.fault(f"{type(error).__name__}: {error}")
        self.outcome.longest_s = max(self.outcome.longest_s, loop.time() - started)

    def _failed(self, code: str, message: str) -> None:
        """A request that ended with an error: only one that chance made look guilty may."""
        for beginning, end in GIVEN_UP.items():
            if code == ErrorCode.INTERNAL and message.startswith(beginning):
                self.outcome.ended[end] += 1
                return
        self.outcome.ended[str(code)] += 1
        self.outcome.fault(f"an error: {code}: {message}")

    # --- without the library ------------------------------------------------------------------------------

    async def _bare_reader(self, context: zmq.asyncio.Context, draw: random.Random) -> None:
        """Asks over sockets of its own, as docs/clients.md says; counts the last messages of each request."""
        while not self._over():
            await asyncio.sleep(draw.uniform(0.0, 0.3))
            known = draw.choice(self._known)
            asked = _Bare(known, draw.randint(1, len(known.answer)), draw.random() < 0.3)
            async with self._ends(known):
                end = asyncio.get_running_loop().time() + RETURN_S
                while asked.last is None:
                    try:
                        endpoint = await find_head(self._fleet)
                        await asked.ask(context, endpoint.tcp)
                    except UnreachableError:
                        if asyncio.get_running_loop().time() > end:
                            raise
                        await asyncio.sleep(0.2)
                self._judge(asked)

    def _judge(self, asked: _Bare) -> None:
        self.outcome.faults += asked.faults
        self.outcome.compare(asked.ids, asked.known)
        last = asked.last or {}
        if "error" in last:
            code, message = last["error"]["code"], last["error"]["message"]
            if code == ErrorCode.CANCELLED and asked.cancels:
                self.outcome.ended["bare, cancelled"] += 1
            else:
                self._failed(code, message)
            return
        self.outcome.ended["bare"] += 1
        self.outcome.compare(last["token_ids"], asked.known, whole=asked.tokens)


@dataclass(slots=True)
class _Bare:
    """One request over plain sockets; asked again behind what has come whenever its connection ends.

    Args:
        known: what is asked.
        tokens: how many are wanted.
        cancels: whether it is cancelled once half of them have come.
    """

    known: Known
    tokens: int
    cancels: bool
    ids: list[int] = field(default_factory=list)
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    last: dict[str, Any] | None = None
    faults: list[str] = field(default_factory=list)

    async def ask(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        """Ask once; returns when the last message has come, or the connection has ended."""
        socket = context.socket(zmq.DEALER)
        monitor = None
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.HEARTBEAT_IVL, 500)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
            socket.setsockopt(zmq.HANDSHAKE_IVL, 3000)
            monitor = socket.get_monitor_socket(ENDS)
            socket.connect(endpoint)
            body = {"token_ids": self.known.ids, "max_tokens": self.tokens, "ignore_eos": True, "id": "a"}
            body |= {"stream": True, "key": self.key, "held": self.ids}
            await socket.send_multipart([b"", json.dumps(body).encode()])
            await self._hear(socket, monitor)
        finally:
            if monitor is not None:
                socket.disable_monitor()
                monitor.close(0)
            socket.close(0)

    async def _hear(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        number, cancelled = 0, False
        while True:
            # Behind the last message nothing may come; a little time shows it.
            ready = dict(await _poll(socket, monitor, 20 if self.last is not None else 1000))
            if socket in ready:
                reply = json.loads((await socket.recv_multipart())[-1])
                if "queued" in reply or "cancelled" in reply:
                    continue
                if self.last is not None:
                    self.faults.append(f"a message behind the last: {self.last}, then {reply}"[:400])
                elif "error" in reply and reply["error"].get("retry_after_s") is not None:
                    await asyncio.sleep(float(reply["error"]["retry_after_s"]))
                    return
                elif "error" in reply or "finish_reason" in reply:
                    self.last = reply
                else:
                    number += 1
                    if reply["seq"] != number:
                        self.faults.append(f"piece {reply['seq']} came where {number} was due")
                    self.ids += reply["token_ids"]
                    if self.cancels and not cancelled and len(self.ids) * 2 > self.tokens:
                        cancelled = True
                        await socket.send_multipart([b"", b'{"op": "cancel", "id": "a"}'])
            elif self.last is not None or monitor in ready:
                return


async def _poll(
    socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket, timeout_ms: int
) -> list[tuple[Any, int]]:
    poller = zmq.asyncio.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    return list(await poller.poll(timeout_ms))
