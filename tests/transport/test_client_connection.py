"""The client's end of a connection to the head."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transport.scenarios import DEADLINE_S, run, taken, until

from cascadia_p2p.errors import ErrorCode, HeadLostError, RequestError, UnreachableError
from cascadia_p2p.local import free_ports
from cascadia_p2p.transport import client_connection, looping
from cascadia_p2p.transport.client_connection import AsyncClientConnection, ClientConnection
from cascadia_p2p.transport.client_server import (
    ClientCall,
    ClientGone,
    ClientServer,
)
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.client import MAX_REQUEST_BYTES


class Head:
    """A head in a thread: answers each request as `answer` says, None for not at all."""

    def __init__(self, answer: Callable[[bytes], bytes | None], port: int = 0) -> None:
        self.answer = answer
        self.gone = 0
        self.started = threading.Event()
        self.stopping = threading.Event()
        # Of the ports that nothing else takes before another head is bound there.
        self._port = port or free_ports()
        self.endpoint = Endpoint("127.0.0.1", self._port)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self.started.wait(DEADLINE_S)

    async def _run(self) -> None:
        with Network() as network:
            server = ClientServer(network)
            self.endpoint = server.bind("127.0.0.1", self._port)
            self.started.set()
            serving = asyncio.create_task(self._serve(server))
            await until(self.stopping.is_set)
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            server.close(0)

    async def _serve(self, server: ClientServer) -> None:
        late: list[tuple[Any, bytes]] = []
        while True:
            event = await server.receive()
            if isinstance(event, ClientGone):
                self.gone += 1
            elif isinstance(event, ClientCall):
                reply = self.answer(event.data)
                if reply is None:
                    late.append((event.route, b"late " + event.data))
                    continue
                for route, data in late:
                    server.reply(route, data)
                late.clear()
                await taken(server, event.route, reply)

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head(lambda data: None if data.startswith(b"slow") else b"re: " + data)
    yield made
    made.stop()


def test_the_blocking_client_asks_and_asks_again(head: Head) -> None:
    with ClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:
        for number in range(50):
            assert connection.request(b"%d" % number, DEADLINE_S) == b"re: %d" % number


def test_cas_01_a_late_reply_is_never_the_next_requests(head: Head) -> None:
    with ClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:
        with pytest.raises(UnreachableError, match="no reply within"):
            connection.request(b"slow one", 0.1)
        assert connection.request(b"next", DEADLINE_S) == b"re: next"


def test_cas_01_nor_on_a_shared_connection(head: Head) -> None:
    async def scenario() -> None:
        async with AsyncClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:
            patient = asyncio.create_task(connection.request(b"slow but awaited", DEADLINE_S))
            with pytest.raises(UnreachableError, match="no reply within"):
                await connection.request(b"slow one", 0.1)
            assert await connection.request(b"next", DEADLINE_S) == b"re: next"
            assert await patient == b"late slow but awaited"
            assert connection.late <= 1
            assert await connection.request(b"last", DEADLINE_S) == b"re: last"

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_many_requests_share_one_asyncio_connection(head: Head) -> None:
    async def scenario() -> None:
        async with AsyncClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:
            replies = await asyncio.gather(*(connection.request(b"%d" % at, DEADLINE_S) for at in range(100)))
            assert replies == [b"re: %d" % at for at in range(100)]

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_cas_02_clients_cancelled_at_random_lose_nothing_of_others(head: Head) -> None:
    async def scenario() -> None:
        async with AsyncClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:

            async def one(number: int) -> None:
                assert await connection.request(b"%d" % number, DEADLINE_S) == b"re: %d" % number

            tasks = [asyncio.create_task(one(number)) for number in range(200)]
            for at, task in enumerate(tasks):
                if at % 3 == 0:
                    await asyncio.sleep(0)
                    task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            others = [result for at, result in enumerate(results) if at % 3]
            assert others == [None] * len(others)
            assert await connection.request(b"after", DEADLINE_S) == b"re: after"

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


@pytest.mark.parametrize("timeout", [None, DEADLINE_S])
def test_stk_04_a_dead_head_ends_the_wait_and_a_new_one_is_found(timeout: float | None) -> None:
    asked = threading.Event()
    head = Head(lambda data: asked.set())
    port = head.endpoint.port
    connection = ClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S)

    def stop() -> None:
        asked.wait(DEADLINE_S)
        head.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    started = time.monotonic()
    with pytest.raises(UnreachableError, match="lost"):
        connection.request(b"question", timeout)
    assert time.monotonic() - started < DEADLINE_S / 2
    stopper.join()
    head = Head(lambda data: b"re: " + data, port)
    assert connection.request(b"again", DEADLINE_S) == b"re: again"
    head.stop()
    connection.close()


def test_stk_04_a_dead_head_ends_every_asyncio_wait() -> None:
    heard: list[bytes] = []
    head = Head(heard.append)
    port = head.endpoint.port

    async def scenario() -> None:
        async with AsyncClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:
            waits = [asyncio.create_task(connection.request(b"%d" % at)) for at in range(5)]
            await until(lambda: len(heard) == 5)
            await asyncio.to_thread(head.stop)
            results = await asyncio.gather(*waits, return_exceptions=True)
            assert len(results) == 5
            assert all(isinstance(result, HeadLostError) and not result.hung_up for result in results)
            again = await asyncio.to_thread(Head, lambda data: b"re: " + data, port)
            assert await connection.request(b"again", DEADLINE_S) == b"re: again"
            await asyncio.to_thread(again.stop)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


class Counting(Head):
    """Answers a number with that many replies."""

    def __init__(self) -> None:
        super().__init__(lambda data: None)

    async def _serve(self, server: ClientServer) -> None:
        while True:
            event = await server.receive()
            if isinstance(event, ClientGone):
                self.gone += 1
            elif isinstance(event, ClientCall):
                for number in range(int(event.data)):
                    await taken(server, event.route, b"%d of %s" % (number, event.data))


@pytest.fixture
def counting() -> Iterator[Head]:
    made = Counting()
    yield made
    made.stop()


def test_several_replies_come_in_order(counting: Head) -> None:
    with ClientConnection(counting.endpoint, connect_timeout_s=DEADLINE_S) as connection:
        tag = connection.send(b"200")
        assert [connection.receive(tag, DEADLINE_S) for _ in range(200)] == [
            b"%d of 200" % at for at in range(200)
        ]
        # What nobody took is never taken for another request's.
        tag = connection.send(b"3")
        assert connection.receive(tag, DEADLINE_S) == b"0 of 3"
        assert connection.request(b"1", DEADLINE_S) == b"0 of 1"
        with pytest.raises(UnreachableError, match="no reply within"):
            connection.receive(connection.send(b"0"), 0.05)


def test_hanging_up_is_seen_and_the_next_request_is_served(counting: Head) -> None:
    with ClientConnection(counting.endpoint, connect_timeout_s=DEADLINE_S) as connection:
        tag = connection.send(b"2")
        assert connection.receive(tag, DEADLINE_S) == b"0 of 2"
        connection.hang_up()
        with pytest.raises(UnreachableError, match="lost"):
            connection.receive(tag, DEADLINE_S)
        assert connection.request(b"1", DEADLINE_S) == b"0 of 1"
        deadline = time.monotonic() + DEADLINE_S
        while counting.gone < 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_exchanges_share_a_connection(counting: Head) -> None:
    async def scenario() -> None:
        async with AsyncClientConnection(counting.endpoint, connect_timeout_s=DEADLINE_S) as connection:
            exchanges = [await connection.exchange(b"%d" % count) for count in range(1, 40)]
            for count, exchange in enumerate(exchanges, 1):
                replies = [await exchange.receive(DEADLINE_S) for _ in range(count)]
                assert replies == [b"%d of %d" % (number, count) for number in range(count)]
                exchange.end()
            given_up = await connection.exchange(b"500")
            await given_up.receive(DEADLINE_S)
            # As a head understands it, this asks for one reply that nobody waits for.
            given_up.end(b"1")
            assert await connection.request(b"1", DEADLINE_S) == b"0 of 1"
            last = await connection.exchange(b"1")
            assert await last.receive(DEADLINE_S) == b"0 of 1"
            await asyncio.to_thread(counting.stop)
            for _ in range(2):
                with pytest.raises(UnreachableError, match="lost"):
                    await last.receive(DEADLINE_S)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_client_that_gives_up_is_seen_by_the_head(head: Head) -> None:
    connection = ClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S)
    with pytest.raises(UnreachableError):
        connection.request(b"slow", 0.05)
    deadline = time.monotonic() + DEADLINE_S
    while head.gone < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    connection.close()


def absent() -> Endpoint:
    return Endpoint("127.0.0.1", free_ports())


def test_nobody_there_is_said_with_the_reason() -> None:
    with (
        ClientConnection(absent(), connect_timeout_s=2.0) as connection,
        pytest.raises(UnreachableError, match="nothing listens"),
    ):
        connection.request(b"x", DEADLINE_S)


def test_nobody_there_is_said_with_the_reason_in_asyncio() -> None:
    async def scenario() -> None:
        async with AsyncClientConnection(absent(), connect_timeout_s=2.0) as connection:
            with pytest.raises(UnreachableError, match="nothing listens"):
                await connection.request(b"x", DEADLINE_S)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_the_reason_that_came_while_the_caller_was_held_up_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = client_connection._Line.wait

    def late(line: client_connection._Line, deadline: float | None) -> bool:
        assert deadline is not None
        assert line.monitor.poll(1000 * int(DEADLINE_S))
        time.sleep(max(0.0, deadline - time.monotonic()))
        return wait(line, deadline)

    monkeypatch.setattr(client_connection._Line, "wait", late)
    with (
        ClientConnection(absent(), connect_timeout_s=0.3) as connection,
        pytest.raises(UnreachableError, match="nothing listens"),
    ):
        connection.request(b"x", DEADLINE_S)

    async def never(_: looping.Signal) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with AsyncClientConnection(absent(), connect_timeout_s=2.0) as connection:
            with pytest.raises(UnreachableError, match="nothing listens"):
                await connection.request(b"x", DEADLINE_S)

    monkeypatch.setattr(looping.Signal, "wait", never)
    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_connection_that_is_closed_ends_the_calls_that_wait_for_it_to_open() -> None:
    """One of many callers finds the head lost and hangs up: the others come back as it does."""

    async def scenario(_: Network) -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            endpoint = Endpoint("127.0.0.1", mute.getsockname()[1])
            connection = AsyncClientConnection(endpoint, connect_timeout_s=DEADLINE_S)
            calls = [asyncio.create_task(connection.request(b"{}")) for _ in range(3)]
            await asyncio.sleep(0.05)
            assert not any(call.done() for call in calls)
            await connection.close()
            ends = await asyncio.gather(*calls, connection.request(b"{}"), return_exceptions=True)
            assert [type(end) for end in ends] == [HeadLostError] * 4
            assert all(end.hung_up for end in ends if isinstance(end, HeadLostError))

    run(scenario)


def test_a_stranger_there_is_said() -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()

        def talk() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = stranger.accept()
                    caller.sendall(b"220 mail.example.org ESMTP\r\n" * 4)
                    caller.close()

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        endpoint = Endpoint("127.0.0.1", stranger.getsockname()[1])
        with (
            ClientConnection(endpoint, connect_timeout_s=2.0) as connection,
            pytest.raises(UnreachableError, match="does not speak"),
        ):
            connection.request(b"x", DEADLINE_S)
        stranger.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def test_a_request_that_no_head_takes_is_refused_before_it_is_sent(head: Head) -> None:
    large = b"x" * (MAX_REQUEST_BYTES + 1)

    async def scenario() -> None:
        async with AsyncClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:
            with pytest.raises(RequestError, match="8,388,609 bytes, and a head takes 8,388,608") as refused:
                await connection.request(large, DEADLINE_S)
            assert refused.value.code is ErrorCode.BAD_REQUEST
            assert await connection.request(large[1:4], DEADLINE_S) == b"re: xxx"

    asyncio.run(scenario())
    with ClientConnection(head.endpoint, connect_timeout_s=DEADLINE_S) as connection:
        with pytest.raises(RequestError, match="shorten it"):
            connection.request(large, DEADLINE_S)
        assert connection.request(large[1:4], DEADLINE_S) == b"re: xxx"
