"""A head's service before a ring of nothing: what its tests share."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import tokenizers

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.node.answers import AnswerDesk, ModelFacts
from cascadia_p2p.node.conductor import HeadConductor
from cascadia_p2p.node.head import HeadService
from cascadia_p2p.node.journal import JournalWriter
from cascadia_p2p.node.kept import Record
from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.scheduler import Scheduler, Stream, StreamRequest, Update
from cascadia_p2p.sample.tokenizer import tokenizer_json
from cascadia_p2p.text.chat import Chat
from cascadia_p2p.text.tokenizer import Tokenizer
from cascadia_p2p.transport.client_server import ClientServer
from cascadia_p2p.transport.curve import Keys
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint, Instance, NodeId, StreamId
from cascadia_p2p.wire.client import FinishReason

DEADLINE_S = 30.0
TOKENIZER = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(280))))
END = TOKENIZER.special_id("<|content_model_end_sampling|>")
TURNS = [
    "Grüße! Wie heißt „schön“ auf Chinesisch?",
    "漂亮 (piàoliang) 🎉👩‍👩‍👧 e\u0301",
    "```python\ndef f(x: int) -> str:\n\treturn f'{x:>3}' + \"\\n\"\n```",
]


def words(text: str) -> list[int]:
    return TOKENIZER.encode(text, specials=False)


def mark(name: str) -> int:
    return TOKENIZER.special_id(f"<|{name}|>")


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.002)


class Ring:
    """Stands in for scheduler and data thread: answers as the test says."""

    def __init__(self) -> None:
        self.streams: dict[StreamId, Stream] = {}
        self.ended: list[StreamId] = []
        self.queue: list[StreamId] = []
        self.overload: Callable[[int], RequestError | None] = lambda _: None
        self.number_stream = HeadConductor(Scheduler(Policy()), lambda _: None).number_stream
        self.service: HeadService

    def call(self, function: Callable[[], None]) -> None:
        function()

    def submit(self, request: StreamRequest, refused: Callable[[StreamId, RequestError], None]) -> None:
        if len(request.prompt) > 9000:
            refused(request.stream, RequestError(ErrorCode.CONTEXT_OVERFLOW, "too long"))
            return
        ids = [*request.prompt, *request.held]
        stream = Stream(request, ids, submitted_at=0.0, started_at=0.0)
        self.streams[request.stream] = stream

    def drop(self, stream: StreamId, error: RequestError) -> None:
        found = self.streams.pop(stream, None)
        if found is not None:
            self.ended.append(stream)
            self._tell(Update(found, error=error))

    def drop_waiting(self, error: RequestError) -> None:
        pass

    def tell_places(self, hear: Callable[[list[StreamId]], None]) -> None:
        hear(self.queue)

    def expire(self, *_: object) -> None:
        pass

    def _tell(self, update: Update) -> None:
        asyncio.get_running_loop().call_soon(self.service.deliver, [update])

    def give(self, stream: StreamId, tokens: Sequence[int], finish: FinishReason | None = None) -> None:
        """Tokens of one stream, each in an update of its own."""
        for place, token in enumerate(tokens, 1):
            found = self.streams.get(stream)
            if found is None:
                return
            found.ids.append(token)
            found.last_token_at = float(len(found.ids))
            found.first_token_at = found.first_token_at or found.last_token_at
            last = token in found.request.stop_ids
            ended = FinishReason.STOP if last else finish if place == len(tokens) else None
            if ended is not None:
                del self.streams[stream]
            self._tell(Update(found, (token,), ended))
            if ended is not None:
                return

    async def stream(self) -> StreamId:
        """The only stream, once it is there."""
        await until(lambda: bool(self.streams))
        (stream,) = self.streams
        return stream


@asynccontextmanager
async def door(
    tokenizer: Tokenizer = TOKENIZER,
    chat: Chat | None = None,
    *,
    ring: Ring | None = None,
    host: str = "127.0.0.1",
    keys: Keys | None = None,
    post: Callable[[NodeId, bytes], bool] = lambda *_: False,
    kept: Iterable[Record] = (),
) -> AsyncIterator[tuple[Ring, Endpoint]]:
    with Network(keys) as network:
        ring, server = ring or Ring(), ClientServer(network)
        endpoint = server.bind(host, 0, guarded=keys is not None)
        facts = ModelFacts(280, frozenset({END}))
        ring.service = HeadService(
            server,
            AnswerDesk(facts, tokenizer, chat or Chat(tokenizer)),
            ring,  # type: ignore[arg-type]
            ring,
            status=dict,
            missing=list,
            queue_wait_s=60.0,
            recovery_s=60.0,
            watch=lambda task: None,
            journal=JournalWriter(NodeId("aa" * 8), Instance("bb" * 8), post, itertools.count(1)),
            kept=kept,
        )
        ring.service.start()
        yield ring, endpoint
        await ring.service.close("the test is over")


def run(scenario: Callable[[Ring, Endpoint], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S), door() as (ring, endpoint):
            await scenario(ring, endpoint)

    asyncio.run(bounded())


async def answered(ring: Ring, tokens: Sequence[int], rest: float = 0.0) -> None:
    """Answer the next request with these tokens."""
    stream = await ring.stream()
    for token in tokens:
        ring.give(stream, [token])
        if rest:
            await asyncio.sleep(rest)
    ring.give(stream, [END])
