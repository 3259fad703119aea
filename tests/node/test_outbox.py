"""Replies that a client does not take: their order, their bounds, and whose they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cascadia_p2p.node.outbox import MAX_WAITING, Outbox
from cascadia_p2p.transport.client_server import Route
from cascadia_p2p.transport.looping import Delivery
from cascadia_p2p.types import StreamId

DEADLINE_S = 30.0


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.002)


class Mouth:
    """A client socket that takes messages only when the test says so."""

    def __init__(self) -> None:
        self.delivery = Delivery.SENT
        self.got: list[bytes] = []
        self.ended: list[int] = []

    def reply(self, route: Route, data: bytes) -> Delivery:
        if self.delivery is Delivery.SENT:
            self.got.append(data)
        return self.delivery

    def hang_up(self, connection: int) -> None:
        self.ended.append(connection)


def test_the_outbox_keeps_order_and_bounds() -> None:
    async def scenario() -> None:
        mouth, gone = Mouth(), list[Route]()
        outbox = Outbox(mouth, gone.append)
        one, two = Route(b"1", (), 1), Route(b"2", (), 2)
        stream = StreamId(7)
        outbox.send(one, b"a")
        mouth.delivery = Delivery.FULL
        for data in (b"b", b"c"):
            outbox.send(one, data, stream)
        outbox.send(one, b"d")
        outbox.send(two, b"e", StreamId(8))
        assert (outbox.waiting(one, stream), outbox.waiting(two, stream)) == (2, 0)
        outbox.discard(one, stream)
        assert outbox.waiting(one, stream) == 0
        outbox.send(one, b"f")
        mouth.delivery = Delivery.SENT
        # Nothing overtakes what waits.
        outbox.send(one, b"g")
        assert mouth.got == [b"a"]
        await until(lambda: len(mouth.got) == 5)
        assert sorted(mouth.got) == [b"a", b"d", b"e", b"f", b"g"]
        assert [data for data in mouth.got if data != b"e"] == [b"a", b"d", b"f", b"g"]
        outbox.send(one, b"h")
        assert mouth.got[-1] == b"h"
        mouth.delivery = Delivery.FULL
        for number in range(MAX_WAITING):
            outbox.send(one, b"%d" % number)
        assert not mouth.ended
        # One that is left out would be waited for without end.
        outbox.send(one, b"i")
        assert mouth.ended == [1]
        mouth.delivery = Delivery.GONE
        await until(lambda: bool(gone))
        outbox.send(two, b"x")
        assert gone == [one, two]
        mouth.delivery = Delivery.SENT
        outbox.close()
        assert mouth.got[-1] == b"h"

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_of_two_that_were_taken_for_one_connection_each_waits_and_goes_on_its_own() -> None:
    async def scenario() -> None:
        mouth, gone = Mouth(), list[Route]()
        outbox = Outbox(mouth, gone.append)
        late, there = Route(b"x", (), 1), Route(b"y", (), 1)
        mouth.delivery = Delivery.GONE
        outbox.send(late, b"a")
        assert gone == [late]
        mouth.delivery = Delivery.FULL
        outbox.send(late, b"b", StreamId(1))
        outbox.send(there, b"c", StreamId(2))
        assert (outbox.waiting(late, StreamId(1)), outbox.waiting(there, StreamId(2))) == (1, 1)
        outbox.forget(1)
        assert not outbox.blocked(late)
        assert not outbox.blocked(there)
        outbox.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
