from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine, Iterator

import pytest
import structlog

import cascadia_p2p.discovery.discovery as discovery_module
import cascadia_p2p.discovery.peers as peers_module
from cascadia_p2p.discovery import Address, Candidate, Discovery
from cascadia_p2p.discovery.interfaces import Interface
from cascadia_p2p.discovery.peers import StaticPeers, resolve
from cascadia_p2p.errors import UsageError
from cascadia_p2p.types import Endpoint

Answer = list[tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]]
V4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 7600))
V4B = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.2", 7600))
V6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 7600, 0, 0))
SCOPED = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 7600, 0, 3))
NAME = Endpoint("pc-two", 7600)


def run(main: Callable[[], Coroutine[None, None, None]], names: dict[str, Answer | OSError | None]) -> None:
    """Run with name resolution replaced: an answer, an error, or None for no answer ever."""

    async def lookup(host: str, port: int, **_: object) -> Answer:
        answer = names[host]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, OSError):
            raise answer
        assert answer is not None
        return answer

    async def start() -> None:
        asyncio.get_running_loop().getaddrinfo = lookup  # type: ignore[assignment, method-assign]
        await main()

    asyncio.run(start())


@pytest.fixture
def logs() -> Iterator[list[structlog.typing.EventDict]]:
    with structlog.testing.capture_logs() as entries:
        yield entries


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("answer", "hosts"),
    [
        ([V6, V4], ["fd00::1", "192.0.2.1"]),
        ([V6, V6, V4, V4B], ["fd00::1", "192.0.2.1", "192.0.2.2"]),
        ([V4, V4B, V6], ["192.0.2.1", "fd00::1", "192.0.2.2"]),
    ],
)
def test_pet_05_families_take_turns(answer: Answer, hosts: list[str]) -> None:
    async def main() -> None:
        assert [each.host for each in await resolve(NAME)] == hosts

    run(main, {"pc-two": answer})


def test_stk_16_link_local_addresses_carry_their_scope() -> None:
    async def main() -> None:
        assert await resolve(NAME) == [Endpoint("fe80::1%3", 7600)]
        literal = Endpoint("fe80::1%eth0", 7600)
        assert await resolve(literal) == [literal]

    run(main, {"pc-two": [SCOPED]})


def test_pet_05_all_addresses_are_offered_at_once_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_FIRST_WAIT", 0.02)
    monkeypatch.setattr(peers_module, "_LONGEST_WAIT", 0.05)

    async def main() -> None:
        offered: list[str] = []
        peers = StaticPeers([NAME], lambda peer, endpoint: offered.append(endpoint.host))
        peers.start()
        await until(lambda: len(offered) >= 8)
        assert offered[:4] == ["fd00::1", "192.0.2.1"] * 2
        peers.reached(NAME)
        await asyncio.sleep(0)
        await until(lambda: all(task.get_stack() for task in peers._tasks))
        before = len(offered)
        with pytest.raises(AssertionError):
            await until(lambda: len(offered) > before + 2, seconds=0.3)
        peers.lost(NAME)
        await until(lambda: len(offered) > before + 2)
        await peers.stop()

    run(main, {"pc-two": [V6, V4]})


def test_waits_grow_to_five_seconds_and_start_anew_after_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    stretch = asyncio.timeout

    def timeout(seconds: float) -> asyncio.Timeout:
        waits.append(seconds)
        return stretch(0)

    monkeypatch.setattr("cascadia_p2p.discovery.peers.asyncio.timeout", timeout)
    monkeypatch.setattr("cascadia_p2p.discovery.peers.random.uniform", lambda low, high: high)

    async def main() -> None:
        peers = StaticPeers([Endpoint("192.0.2.1", 7600)], lambda peer, endpoint: None)
        peers.start()
        await until(lambda: len(waits) >= 9)
        await peers.stop()

    asyncio.run(main())
    assert waits[:9] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0])


def test_exo_03_unknown_and_silent_names_hold_nobody_up(
    monkeypatch: pytest.MonkeyPatch, logs: list[structlog.typing.EventDict]
) -> None:
    monkeypatch.setattr(peers_module, "_FIRST_WAIT", 0.02)
    silent, unknown = Endpoint("silent", 1), Endpoint("unknown", 1)
    names: dict[str, Answer | OSError | None] = {
        "silent": None,
        "unknown": socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        "pc-two": [V4],
    }

    async def main() -> None:
        address = Address("127.0.0.1", "lo")
        discovery = Discovery("f", address, peers=[silent, unknown, NAME], mdns=False)
        await discovery.start()
        expected = Candidate(Endpoint("192.0.2.1", 7600), peer=NAME)
        async with asyncio.timeout(30):
            assert await anext(discovery) == expected
            await until(lambda: any(entry["event"] == "peer_not_found" for entry in logs))
            assert (
                "--peer unknown:1 can not be looked up (Name or service not known)"
                in discovery.explain_alone()
            )
            assert "mDNS is off" in discovery.explain_alone()
            names["unknown"] = [V4B]
            while (await anext(discovery)).peer != unknown:
                pass
        await discovery.stop()
        await discovery.stop()

    run(main, names)
    assert len([entry for entry in logs if entry["event"] == "peer_not_found"]) == 1


def test_the_network_is_followed_on_after_its_addresses_could_not_be_listed(
    monkeypatch: pytest.MonkeyPatch, logs: list[structlog.typing.EventDict]
) -> None:
    monkeypatch.setattr(discovery_module, "_LOOK", 0.01)
    cable = Interface("eth0", ("192.0.2.7",))
    many = OSError(24, "Too many open files")
    answers: list[OSError | list[Interface]] = [many, many, many, [], many, many, [cable], [cable]]

    def listed() -> list[Interface]:
        answer = answers.pop(0) if answers else [cable]
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(discovery_module, "list_interfaces", listed)

    async def main() -> None:
        moved: list[Address] = []
        discovery = Discovery("f", Address("192.0.2.1", "eth0"), mdns=False, moved=moved.append)
        await discovery.start()
        await until(lambda: bool(moved), seconds=30.0)
        assert moved[0].ip == discovery.address.ip == "192.0.2.7"
        await discovery.stop()

    asyncio.run(main())
    unseen = [entry for entry in logs if entry["event"] == "network_unseen"]
    assert len(unseen) == 2, "once for each time that it began to fail"
    assert "Too many open files" in str(unseen[0]["message"])


@pytest.mark.parametrize("name", ["network", "loneliness", f"peer-{NAME}"])
def test_a_task_of_discovery_that_fails_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, logs: list[structlog.typing.EventDict]
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("nobody thought of this")

    work = {
        "network": (Discovery, "_watch_network"),
        "loneliness": (Discovery, "_watch_loneliness"),
        f"peer-{NAME}": (StaticPeers, "_try"),
    }
    monkeypatch.setattr(*work[name], fail)

    async def main() -> None:
        discovery = Discovery("f", Address("127.0.0.1", "lo"), peers=[NAME], mdns=False)
        await discovery.start()
        await until(lambda: any(entry["event"] == "task_failed" for entry in logs))
        await discovery.stop()

    run(main, {"pc-two": [V4]})
    (said,) = [entry for entry in logs if entry["event"] == "task_failed"]
    assert said["message"] == f"the task '{name}' failed (nobody thought of this)"


@pytest.mark.parametrize(
    "text", ["host", "host:", ":7600", "host:99999", "[fd00::1]", "fd00::1:7600", "a b:1", "h:1x"]
)
def test_peers_are_parsed_strictly(text: str) -> None:
    with pytest.raises(UsageError):
        Endpoint.parse(text)


def test_real_names_resolve() -> None:
    async def main() -> None:
        hosts = {each.host for each in await resolve(Endpoint("localhost", 1))}
        assert hosts <= {"127.0.0.1", "::1"}
        assert hosts

    asyncio.run(main())
