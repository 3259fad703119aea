"""Real mDNS on the loopback address."""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import psutil
import pytest
import structlog
from zeroconf import ServiceInfo
from zeroconf.asyncio import AsyncZeroconf

import cascadia_p2p.discovery.discovery as discovery_module
import cascadia_p2p.discovery.mdns as mdns_module
from cascadia_p2p.discovery import (
    Address,
    Announcement,
    Candidate,
    Discovery,
    Found,
    Mdns,
    find_head,
    find_nodes,
)
from cascadia_p2p.discovery.traffic import CountedZeroconf
from cascadia_p2p.discovery.txt import SERVICE_TYPE, encode_txt
from cascadia_p2p.errors import UnreachableError
from cascadia_p2p.identity import new_instance
from cascadia_p2p.types import Endpoint, Instance, NodeId
from cascadia_p2p.wire import PROTOCOL

HERE = Address("127.0.0.1", "lo")
LIMIT = 40.0


@pytest.fixture
def fleet() -> str:
    """A name that no other test on this machine uses at the same time."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def logs() -> Iterator[list[structlog.typing.EventDict]]:
    with structlog.testing.capture_logs() as entries:
        yield entries


def announcement(
    fleet: str, *, node: str = "", instance: str = "", shard: int | None = None, client: int | None = None
) -> Announcement:
    return Announcement(
        protocol=PROTOCOL,
        fleet=fleet,
        node_id=NodeId(node or secrets.token_hex(8)),
        instance=Instance(instance or new_instance()),
        model="0123abcd",
        shard=shard,
        shards=4,
        control=7600,
        data=7601,
        client=client,
    )


async def until(condition: Callable[[], bool], seconds: float = LIMIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def announcing(words: Announcement, **options: object) -> AsyncIterator[Discovery]:
    discovery = Discovery(words.fleet, HERE, instance=words.instance, **options)  # type: ignore[arg-type]
    await discovery.start(words)
    try:
        yield discovery
    finally:
        await discovery.stop()


@asynccontextmanager
async def listening(fleet: str, own: Instance | None = None) -> AsyncIterator[tuple[Mdns, list[Found]]]:
    found: list[Found] = []
    mdns = Mdns([HERE], fleet, own, found.append)
    mdns.start()
    try:
        yield mdns, found
    finally:
        await mdns.stop()


def stranger(name: str, properties: dict[str, str] | bytes) -> ServiceInfo:
    """A service of our type that says whatever it likes."""
    return ServiceInfo(
        SERVICE_TYPE,
        f"{name}.{SERVICE_TYPE}",
        port=7600,
        properties=properties,
        server=f"{name}.local.",
        parsed_addresses=["127.0.0.1"],
    )


@asynccontextmanager
async def strangers(*infos: ServiceInfo) -> AsyncIterator[None]:
    """Announces services without our code."""
    zeroconf = AsyncZeroconf(interfaces=["127.0.0.1"])
    try:
        sent = [await zeroconf.async_register_service(info, cooperating_responders=True) for info in infos]
        yield
        for each in sent:
            await each
    finally:
        await zeroconf.async_close()


def test_nodes_find_each_other_but_not_themselves(fleet: str) -> None:
    async def run() -> None:
        words = [announcement(fleet, shard=shard) for shard in range(3)]
        async with announcing(words[0]) as a, announcing(words[1]) as b, announcing(words[2]) as c:
            for own, discovery in zip(words, (a, b, c), strict=True):
                seen: set[str] = set()
                async with asyncio.timeout(LIMIT):
                    while len(seen) < 2:
                        candidate = await anext(discovery)
                        assert candidate.announcement is not None
                        assert candidate.endpoint == Endpoint("127.0.0.1", 7600)
                        seen.add(candidate.announcement.node_id)
                assert seen == {each.node_id for each in words if each is not own}

    asyncio.run(run())


def test_changed_announcement_and_goodbye_are_heard(fleet: str) -> None:
    async def run() -> None:
        words = announcement(fleet)
        gone: list[str] = []
        found: list[Found] = []
        mdns = Mdns([HERE], fleet, None, found.append, gone.append)
        mdns.start()
        async with announcing(words) as discovery:
            await until(lambda: bool(found))
            assert found[0].announcement == words
            serving = announcement(fleet, node=words.node_id, instance=words.instance, shard=0, client=7700)
            discovery.announce(serving)
            await until(lambda: found[-1].announcement == serving)
            assert found[-1].clients == (Endpoint("127.0.0.1", 7700),)
        await until(lambda: bool(gone))
        assert mdns.known == []
        await mdns.stop()

    asyncio.run(run())


def test_questions_are_repeated_often_while_nodes_are_missing_and_seldom_after(
    fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mdns_module, "_OFTEN", 0.2)
    words = announcement(fleet)

    async def run() -> None:
        infos = [stranger(words.node_id, encode_txt(words))]
        async with listening(fleet) as (mdns, found), strangers(*infos):
            await until(lambda: len(found) >= 4)
            assert {each.announcement for each in found} == {words}
            mdns.expect_more(False)
            await asyncio.sleep(0)
            before = len(found)
            with pytest.raises(AssertionError):
                await until(lambda: len(found) > before + 1, seconds=0.8)
            mdns.expect_more(True)
            await until(lambda: len(found) > before + 2)

    asyncio.run(run())


def test_exo_06_other_fleets_are_ignored_counted_and_mentioned_once(
    fleet: str, logs: list[structlog.typing.EventDict]
) -> None:
    other, own = f"{fleet}-other", announcement(fleet)

    async def run() -> None:
        async with listening(fleet) as (mdns, found):
            names = [announcement(other), announcement(other), own]
            async with strangers(*(stranger(each.node_id, encode_txt(each)) for each in names)):
                # Other tests' fleets are heard too.
                await until(lambda: bool(found) and other in mdns.sightings.fleets)
                await until(lambda: mdns.sightings.other_fleets >= 2)
            assert {each.announcement.fleet for each in found} == {fleet}

    asyncio.run(run())
    told = [entry["message"] for entry in logs if entry["event"] == "other_fleet_seen"]
    assert [message for message in told if f"'{other}'" in message] == [
        f"fleet '{other}' is on this network too; this node keeps to '{fleet}'"
    ]


def test_exo_19_other_versions_and_malformed_records_are_counted_never_raised(
    fleet: str, logs: list[structlog.typing.EventDict]
) -> None:
    good = announcement(fleet)
    pairs = encode_txt(good)

    async def run() -> None:
        async with listening(fleet) as (mdns, found):
            async with strangers(
                stranger(f"future-{fleet}", {**pairs, "v": str(PROTOCOL + 1)}),
                stranger(f"bytes-{fleet}", b"\xff\x00\x03v=1\x05fleet\x07node=\xff\xfe"),
                stranger(f"empty-{fleet}", {}),
                stranger(f"port-{fleet}", {**pairs, "control": "70000"}),
                stranger(f"good-{fleet}", pairs),
            ):
                await until(lambda: mdns.sightings.malformed >= 3)
                await until(lambda: str(PROTOCOL + 1) in mdns.sightings.versions)
                await until(lambda: any(each.announcement == good for each in found))
            assert mdns.sightings.other_versions >= 1
            assert {each.announcement.node_id for each in found} == {good.node_id}

    asyncio.run(run())
    told = [entry for entry in logs if entry["event"] == "other_version_seen"]
    assert told
    assert f"speaks protocol version {PROTOCOL + 1}, this one {PROTOCOL}" in told[0]["message"]


def test_exo_19_garbage_on_the_mdns_port_hurts_nobody(fleet: str) -> None:
    async def run() -> None:
        async with listening(fleet) as (mdns, found):
            await until(lambda: mdns.traffic.echoed > 0)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
                for size in (0, 1, 11, 12, 13, 40, 500, 9000):
                    for head in (b"", b"\x00\x00\x84\x00\x00\x00\x00\x09\x00\x00\x00\x00\xc0\x0c"):
                        sender.sendto((head + secrets.token_bytes(size))[:9000], ("224.0.0.251", 5353))
            async with announcing(announcement(fleet)):
                await until(lambda: bool(found))
            assert mdns.traffic.local > 0

    asyncio.run(run())


def test_flood_of_announcements_is_bounded(fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdns_module, "_MAX_NODES", 3)
    words = [announcement(fleet) for _ in range(8)]

    async def run() -> None:
        infos = [stranger(each.node_id, encode_txt(each)) for each in words]
        async with listening(fleet) as (mdns, found), strangers(*infos):
            await until(lambda: len({each.name for each in found}) == len(words))
            assert len(mdns.known) == 3
            assert mdns.sightings.forgotten >= 5

    asyncio.run(run())


def test_reached_candidates_stop_and_lost_ones_come_back(fleet: str) -> None:
    async def run() -> None:
        words = announcement(fleet)
        async with announcing(words), announcing(announcement(fleet)) as discovery:
            async with asyncio.timeout(LIMIT):
                candidate = await anext(discovery)
                discovery.reached(candidate)
                assert discovery.mdns is not None
                discovery.mdns.reopen()
                await until(lambda: discovery.mdns is not None and bool(discovery.mdns.known))
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await anext(discovery)
                discovery.lost(candidate)
                assert await anext(discovery) == candidate

    asyncio.run(run())


def test_what_was_reached_is_kept_once_an_address_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announcements are not verified: who forges them draws a new instance for each."""
    monkeypatch.setattr(discovery_module, "_MAX_REACHED", 8)

    async def run() -> None:
        discovery = Discovery("f", HERE, mdns=False)

        def heard(port: int, words: Announcement) -> Candidate:
            return Candidate(Endpoint("127.0.0.1", port), words)

        def offered(candidate: Candidate) -> bool:
            discovery._pending.clear()
            discovery._offer(candidate)
            return bool(discovery._pending)

        for _ in range(100):
            discovery.reached(last := heard(7600, announcement("f")))
        assert len(discovery._reached) == 1
        assert not offered(last)
        assert offered(heard(7600, announcement("f")))
        words = announcement("f")
        for port in range(7601, 7700):
            discovery.reached(heard(port, words))
        assert len(discovery._reached) == 8
        assert offered(heard(7601, words))
        assert not offered(heard(7699, words))
        discovery.lost(heard(7699, announcement("f")))
        assert not offered(heard(7699, words))
        discovery.lost(heard(7699, words))
        assert offered(heard(7699, words))

    asyncio.run(run())


def test_exo_03_failing_sockets_are_a_warning_and_are_tried_again(
    fleet: str, monkeypatch: pytest.MonkeyPatch, logs: list[structlog.typing.EventDict]
) -> None:
    monkeypatch.setattr(mdns_module, "_FIRST_RETRY", 0.05)
    failures = 3
    open_zeroconf = CountedZeroconf.__init__

    def refuse(self: CountedZeroconf, *args: object, **kwargs: object) -> None:
        nonlocal failures
        if failures > 0:
            failures -= 1
            raise PermissionError(1, "Operation not permitted")
        open_zeroconf(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(CountedZeroconf, "__init__", refuse)

    async def run() -> None:
        peer = Endpoint("127.0.0.1", 7999)
        async with announcing(announcement(fleet), peers=[peer]) as discovery:
            async with asyncio.timeout(LIMIT):
                # Static peers do not wait for mDNS.
                assert await anext(discovery) == Candidate(peer, peer=peer)
            assert discovery.mdns is not None
            mdns = discovery.mdns
            await until(lambda: failures == 0 and not mdns.problem and mdns.traffic.sent > 0)

    asyncio.run(run())
    events = [entry["event"] for entry in logs]
    assert events.count("mdns_unavailable") == 1
    assert events.count("mdns_available") == 1
    assert any("Operation not permitted" in str(entry.get("message")) for entry in logs)


def test_stop_at_any_moment_leaves_no_socket_and_no_task(fleet: str) -> None:
    def sockets() -> set[int]:
        return {each.fd for each in psutil.Process().net_connections(kind="udp")}

    async def run() -> None:
        before = sockets()
        for delay in (0, 0, 0.001, 0.002, 0.005, 0.02, 0.1, 0.3):
            async with announcing(announcement(fleet)):
                await asyncio.sleep(delay)
            await until(lambda: sockets() <= before)
            await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    asyncio.run(run())


def test_stk_18_address_that_is_gone_is_a_warning(fleet: str, logs: list[structlog.typing.EventDict]) -> None:
    async def run() -> None:
        mdns = Mdns([Address("192.0.2.77", "gone0")], fleet, None, lambda found: None)
        mdns.start()
        await until(lambda: bool(mdns.problem))
        await mdns.stop()

    asyncio.run(run())
    assert [entry["event"] for entry in logs if entry["event"] == "mdns_unavailable"] == ["mdns_unavailable"]


def test_exo_01_alone_is_said_once_with_counts_and_next_step(
    fleet: str, logs: list[structlog.typing.EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    def alone() -> list[str]:
        return [str(entry["message"]) for entry in logs if entry["event"] == "alone"]

    watch = Discovery._watch_loneliness

    async def with_open_sockets(self: Discovery) -> None:
        await until(lambda: self.mdns is not None and self.mdns.traffic.echoed > 0)
        self._started = time.monotonic()
        await watch(self)

    monkeypatch.setattr(Discovery, "_watch_loneliness", with_open_sockets)

    async def run() -> None:
        async with announcing(
            announcement(fleet), alone_s=1.0, peers=[Endpoint("127.0.0.1", 7998)]
        ) as discovery:
            await until(lambda: bool(alone()))
            assert discovery.mdns is not None
            assert discovery.mdns.traffic.sent > 0
            async with announcing(announcement(fleet)):
                await until(lambda: discovery.mdns is not None and bool(discovery.mdns.known))

    asyncio.run(run())
    assert len(alone()) == 1
    assert f"no other node of fleet '{fleet}' seen for " in alone()[0]
    assert " s. mDNS on lo (127.0.0.1): " in alone()[0]
    assert "packets sent" in alone()[0]
    assert "heard back, 0 received from other machines" in alone()[0]
    assert "--peer 127.0.0.1:7998 does not answer" in alone()[0]
    assert "--bind" in alone()[0]


def test_find_head_waits_for_the_one_that_serves(fleet: str) -> None:
    async def run() -> None:
        words = announcement(fleet, shard=1)
        async with announcing(words) as other, announcing(announcement(fleet, shard=0)) as head:
            search = asyncio.create_task(find_head(fleet, timeout=LIMIT, bind="127.0.0.1"))
            await until(lambda: head.mdns is not None and bool(head.mdns.known))
            assert not search.done()
            # What is announced and does not listen is passed over.
            with socket.socket() as silent:
                silent.bind(("127.0.0.1", 0))
                head.announce(announcement(fleet, shard=0, client=silent.getsockname()[1]))
                await until(lambda: any(each.clients for each in other.mdns.known))  # type: ignore[union-attr]
                assert not search.done()
            async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                head.announce(announcement(fleet, shard=0, client=port))
                assert await search == Endpoint("127.0.0.1", port)
            # Who answers long after the first one is not waited for.
            async with asyncio.timeout(LIMIT):
                while words not in [
                    each.announcement for each in await find_nodes(fleet, timeout=LIMIT, bind="127.0.0.1")
                ]:
                    pass

    asyncio.run(run())


def test_find_head_says_who_answered(fleet: str) -> None:
    async def run() -> None:
        with pytest.raises(UnreachableError, match=r"no node of fleet .* within 0\.3 s.*--endpoint"):
            await find_head(fleet, timeout=0.3, bind="127.0.0.1")
        assert await find_nodes(fleet, timeout=0.3, bind="127.0.0.1") == []
        words = announcement(fleet)
        async with strangers(stranger(words.node_id, encode_txt(words))):
            for timeout in (1.5, 6.0, 24.0):
                with pytest.raises(UnreachableError) as caught:
                    await find_head(fleet, timeout=timeout, bind="127.0.0.1")
                if "no node" not in str(caught.value):
                    break
            assert re.search(r"1 node of fleet .* none of them takes clients yet", str(caught.value))

    asyncio.run(run())


def test_exo_09_killed_process_is_replaced_by_its_next_start(
    fleet: str, start_speaker: Callable[..., object]
) -> None:
    node = secrets.token_hex(8)

    async def run() -> None:
        async with listening(fleet) as (mdns, found):
            for _ in range(2):
                speaker = start_speaker(fleet=fleet, node=node, bind="127.0.0.1")
                up = speaker.wait_for(lambda line: line["event"] == "up")  # type: ignore[attr-defined]
                await until(lambda up=up: any(each.announcement.instance == up["instance"] for each in found))  # type: ignore[misc]
                assert len(mdns.known) == 1
                speaker.process.kill()  # type: ignore[attr-defined]

    asyncio.run(run())
