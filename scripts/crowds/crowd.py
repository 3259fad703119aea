"""Clients that come, ask, cancel and vanish at random; every word they get is checked."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import zmq
import zmq.asyncio

PATIENCE_S: Final = 120.0
ACK_PIECES: Final = 64


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt, and the tokens of its answer when nobody else is served."""

    ids: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(slots=True)
class Outcome:
    """What became of all requests: how many ended in which way, and what was wrong."""

    ended: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    tokens: int = 0

    @property
    def requests(self) -> int:
        """All of them."""
        return self.ended.total()


@dataclass(slots=True)
class _Asked:
    known: Known
    tokens: int
    streamed: bool
    ids: list[int] = field(default_factory=list)
    seq: int = 0
    ending: str | None = None


def prompts(count: int, longest: int, vocab: int, seed: int) -> list[tuple[int, ...]]:
    """Random prompts of random lengths."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(1, vocab) for _ in range(draw.randint(1, longest))) for _ in range(count)]


async def learn(endpoint: str, asked: Sequence[tuple[int, ...]], tokens: int) -> list[Known]:
    """The answers to prompts that are asked one after the other."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    socket.connect(endpoint)
    found = []
    try:
        for ids in asked:
            body = {"token_ids": ids, "max_tokens": tokens, "ignore_eos": True}
            await socket.send(json.dumps(body).encode())
            found.append(Known(ids, tuple(json.loads(await socket.recv())["token_ids"])))
    finally:
        context.destroy(linger=0)
    return found


class Crowd:
    """Visitors of a ring; each has a connection of its own and a few requests.

    Args:
        endpoint: the head's client address.
        known: what may be asked.
        seed: of all that is random.
        vanish: share of visitors that close their connection in the middle.
        cancel: share of requests that are cancelled by their id.
    """

    def __init__(
        self, endpoint: str, known: Sequence[Known], seed: int, *, vanish: float = 0.15, cancel: float = 0.2
    ) -> None:
        self._endpoint = endpoint
        self._known = known
        self._draw = random.Random(seed)
        self._vanish = vanish
        self._cancel = cancel
        self._numbers = 0
        self.outcome = Outcome()
        self.open = 0
        """Requests without their end now."""
        self.most = 0
        """The most that there ever were."""

    async def visit(self, requests: int, at_once: int) -> None:
        """So many requests, `at_once` or a few more at a time."""
        context = zmq.asyncio.Context()
        context.set(zmq.MAX_SOCKETS, 8192)
        visitors: set[asyncio.Task[None]] = set()
        try:
            left = requests
            while left or visitors:
                while left and self.open < at_once:
                    count = min(left, self._draw.randint(1, 4))
                    left -= count
                    self.open += count
                    self.most = max(self.most, self.open)
                    visitors.add(asyncio.create_task(self._visitor(context, count)))
                    await asyncio.sleep(self._draw.expovariate(1 / 0.004))
                done, visitors = await asyncio.wait(visitors, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in visitors:
                task.cancel()
            context.destroy(linger=0)

    async def _visitor(self, context: zmq.asyncio.Context, count: int) -> None:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        asked: dict[str, _Asked] = {}
        vanishes = self._draw.random() < self._vanish
        patience = self._draw.uniform(0.0, 1.5) if vanishes else PATIENCE_S
        talking = asyncio.create_task(self._talk(socket, asked, count))
        try:
            async with asyncio.timeout(patience):
                await talking
                while any(each.ending is None for each in asked.values()):
                    await self._hear(socket, asked)
                # Behind the last word only replies to cancels may come; the rest is counted as a fault.
                while await socket.poll(20):
                    await self._hear(socket, asked)
        except TimeoutError:
            if not vanishes:
                self._fault(f"no end within {patience} s: {[e for e in asked.values() if e.ending is None]}")
        finally:
            talking.cancel()
            self.open -= count
            socket.close()
            ends = [each.ending or ("vanished" if vanishes else "hung") for each in asked.values()]
            self.outcome.ended.update(ends + ["never asked"] * (count - len(asked)))

    async def _talk(self, socket: zmq.asyncio.Socket, asked: dict[str, _Asked], count: int) -> None:
        """Ask, and cancel some of it; what comes meanwhile waits in the socket."""
        draw = self._draw
        for _ in range(count):
            known = draw.choice(self._known)
            self._numbers += 1
            name, streamed = str(self._numbers), draw.random() < 0.6
            tokens = draw.randint(1, len(known.answer))
            asked[name] = _Asked(known, tokens, streamed)
            body: dict[str, Any] = {
                "token_ids": known.ids,
                "max_tokens": tokens,
                "ignore_eos": True,
                "id": name,
            }
            await self._send(socket, body | ({"stream": True, "acks": True} if streamed else {}))
            await asyncio.sleep(draw.choice((0.0, 0.01)))
        for name in list(asked):
            if draw.random() < self._cancel:
                await asyncio.sleep(draw.uniform(0.0, 0.3))
                await self._send(socket, {"op": "cancel", "id": name})

    async def _send(self, socket: zmq.asyncio.Socket, body: dict[str, Any]) -> None:
        await socket.send_multipart([b"", json.dumps(body).encode()])

    async def _hear(self, socket: zmq.asyncio.Socket, asked: dict[str, _Asked]) -> None:
        reply = json.loads((await socket.recv_multipart())[-1])
        each = asked.get(str(reply.get("id")))
        if each is None:
            self._fault(f"a word about nothing that was asked: {reply}")
        elif "cancelled" in reply or "queued" in reply:
            return
        elif each.ending is not None:
            self._fault(f"a second end: {each.ending}, then {reply}")
        elif "error" in reply:
            each.ending = str(reply["error"]["code"])
            if each.ending != "cancelled":
                self._fault(f"an error: {reply}")
        elif "finish_reason" in reply:
            each.ending = "finished"
            self._check(each, reply)
        else:
            each.seq += 1
            each.ids += reply["token_ids"]
            if reply["seq"] != each.seq or tuple(each.ids) != each.known.answer[: len(each.ids)]:
                self._fault(f"a wrong piece: {reply}")
            if each.seq % ACK_PIECES == 0:
                await self._send(socket, {"op": "ack", "id": reply["id"], "seq": each.seq})

    def _check(self, each: _Asked, reply: dict[str, Any]) -> None:
        self.outcome.tokens += len(reply["token_ids"])
        if tuple(reply["token_ids"]) != each.known.answer[: each.tokens]:
            self._fault(f"wrong tokens: {reply['token_ids']} for {each.known.answer[: each.tokens]}")
        if each.streamed and (each.ids != reply["token_ids"] or reply["seq"] != each.seq + 1):
            self._fault(f"pieces do not add up: {each.ids} and {reply}")

    def _fault(self, sentence: str) -> None:
        self.outcome.faults.append(sentence[:400])


async def ask_at_once(
    endpoint: str, known: Sequence[Known], clients: int, tokens: int, patience_s: float = PATIENCE_S
) -> tuple[Counter[str], list[float]]:
    """A REQ socket a client, all at once: how they were answered, and when, in seconds."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, clients + 64)
    loop = asyncio.get_running_loop()
    answers: Counter[str] = Counter()
    times: list[float] = []
    seen: defaultdict[str, int] = defaultdict(int)
    started = loop.time()

    async def one(number: int) -> None:
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        each = known[number % len(known)]
        body = {"token_ids": each.ids, "max_tokens": tokens, "ignore_eos": True, "id": str(number)}
        try:
            await socket.send(json.dumps(body).encode())
            async with asyncio.timeout(patience_s):
                reply = json.loads(await socket.recv())
            times.append(loop.time() - started)
            seen[reply["id"]] += 1
            if "error" in reply:
                answers[reply["error"]["code"]] += 1
            elif reply["id"] == str(number) and tuple(reply["token_ids"]) == each.answer[:tokens]:
                answers["right"] += 1
            else:
                answers["wrong"] += 1
            # A reply that nobody asked for would come now.
            answers["second reply"] += bool(await socket.poll(50))
        except TimeoutError:
            answers["none"] += 1
        finally:
            socket.close()

    try:
        await asyncio.gather(*map(one, range(clients)))
    finally:
        context.destroy(linger=0)
    answers["second reply"] += sum(count - 1 for count in seen.values())
    return +answers, times
