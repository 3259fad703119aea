"""Node processes attacked at every port and by a member of the ring: right answers, and nothing grows."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from cluster.conftest import Shards
from cluster.sockets import plain
from cluster.test_scrapes import scrape
from fixtures.reference import load_case
from fixtures.zmtp import GREETING, ready

from cascadia_p2p.client import Client
from cascadia_p2p.errors import CascadiaError, ErrorCode, RequestError, UnreachableError
from cascadia_p2p.local import LocalNode, LocalRing
from cascadia_p2p.node.query import ask_node
from cascadia_p2p.transport.curve import Knock
from cascadia_p2p.transport.network import allow_many_descriptors
from cascadia_p2p.types import Endpoint

CASE = load_case("tiny12")
PROMPT = CASE.prompts[1]
START_S = 180.0
PATIENCE_S = 120.0
CROWD = 1000
MORE_MB = 300.0
MORE_LINES = 60
ZMQ_PORTS = ("control", "data", "client")
# A node that a stalled machine keeps silent for a while is not lost: formations are counted here.
LIMITS = "[limits]\ngone_s = 15.0\nstuck_s = 5.0\n"


@dataclass
class Besieged:
    """A ring of processes, of which two can be told to lie."""

    ring: LocalRing
    endpoint: Endpoint
    metrics: list[Endpoint]
    lies: list[Path]

    def answer(self) -> tuple[int, ...]:
        with Client(self.endpoint, timeout_s=PATIENCE_S) as client, self.told():
            return client.generate(PROMPT.ids, max_tokens=24).token_ids

    def status(self, node: LocalNode) -> dict[str, Any]:
        with self.told():
            return dict(asyncio.run(ask_node(node.control, PATIENCE_S)))

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Where nothing answers, what the nodes said last."""
        try:
            yield
        except UnreachableError as error:
            raise AssertionError(f"{error}; ended: {self.ring.ended()}; {self.ring.tail()}") from error

    def count(self, *path: str) -> int:
        """A counter of `status`, over all nodes."""
        total = 0
        for node in self.ring.nodes:
            value: Any = self.status(node)
            for key in path:
                value = value.get(key, {}) if isinstance(value, dict) else {}
            total += value if isinstance(value, int) else 0
        return total

    def strangers(self, port: str) -> int:
        """Handshakes at this kind of port that came to nothing, for whatever reason."""
        return sum(self.count("ports", port, f"handshake_{knock.value}") for knock in Knock)

    def ports(self) -> dict[str, Endpoint]:
        """One port of each kind."""
        control = self.ring.nodes[1].control
        return {
            "control": control,
            "data": Endpoint(control.host, control.port + 1),
            "client": self.endpoint,
            "metrics": self.metrics[1],
        }

    def memory_mb(self) -> list[float]:
        return [psutil.Process(node.process.pid).memory_info().rss / 1e6 for node in self.ring.nodes]

    def descriptors(self) -> int:
        return sum(psutil.Process(node.process.pid).num_fds() for node in self.ring.nodes)

    def lines(self) -> int:
        return sum(len(node.lines) for node in self.ring.nodes)


def opened(ring: LocalRing, lies: list[Path]) -> Besieged:
    endpoint, metrics, open_ones = "", {}, set()
    for event in ring.events(START_S, until_one_ends=True):
        if event.event == "clients_served":
            endpoint = str(event.fields["endpoint"])
        elif event.event == "metrics_served":
            metrics[event.node] = Endpoint.parse(str(event.fields["endpoint"]))
        elif event.event == "ring_open":
            open_ones.add(event.node)
        if endpoint and len(open_ones) == 3:
            return Besieged(ring, Endpoint.parse(endpoint), [metrics[node] for node in range(3)], lies)
    raise AssertionError(ring.tail())


@pytest.fixture(scope="module")
def besieged(shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    allow_many_descriptors()
    root = tmp_path_factory.mktemp("siege")
    config = root / "limits.toml"
    config.write_text(LIMITS)
    lies = [root / "lie-1", root / "lie-2"]
    flags = ("--no-mdns", "--threads", "1", "--slots", "4", "--context", "512", "--metrics-port", "0")
    liar = Path(__file__).with_name("liar.py")
    with LocalRing(shards(CASE, (4, 4, 4)), root / "state", flags=(*flags, "--config", str(config))) as ring:
        ring.start_node("--shard", "0")
        for shard, lie in enumerate(lies, 1):
            ring.start_node("--shard", str(shard), program=(sys.executable, str(liar), str(lie)))
        yield opened(ring, lies)


@pytest.fixture
def ring(besieged: Besieged) -> Iterator[Besieged]:
    """The ring; behind the test it answers rightly, and has grown neither in memory nor in its logs."""
    assert besieged.answer() == PROMPT.generated
    memory, lines = besieged.memory_mb(), besieged.lines()
    yield besieged
    assert besieged.answer() == PROMPT.generated
    assert besieged.ring.ended() is None
    for before, now in zip(memory, besieged.memory_mb(), strict=True):
        assert now < before + MORE_MB
    assert besieged.lines() - lines < MORE_LINES, "a stranger must not fill the log"


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


# --- strangers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("port", "kind"), [("control", b"DEALER"), ("data", b"PUSH"), ("client", b"DEALER")])
def test_a_message_of_parts_without_end_is_cut_off(ring: Besieged, port: str, kind: bytes) -> None:
    """ZeroMQ has no bound for these: without one of our own they fill the memory."""
    if sys.platform != "linux":
        pytest.skip("the system does not say what has arrived")
    part = b"\x03" + struct.pack(">Q", 1 << 17) + bytes(1 << 17)
    cut, memory = ring.count("ports", port, "overfull"), max(ring.memory_mb())
    at = ring.ports()[port]
    sent = 0
    with socket.create_connection((at.host, at.port), timeout=PATIENCE_S) as stranger:
        stranger.sendall(GREETING + ready(kind))
        with contextlib.suppress(ConnectionError):
            for _ in range(32_000):
                stranger.sendall(part)
                sent += len(part)
                # A LAN is slower than this.
                time.sleep(0.0005)
    assert sent < 2 << 30, "nobody ended it"
    until(lambda: ring.count("ports", port, "overfull") > cut, "counted")
    until(lambda: max(ring.memory_mb()) < memory + MORE_MB, "the memory is free again")


def test_a_thousand_idle_connections_and_slow_senders_at_each_port(ring: Besieged) -> None:
    """All are served meanwhile, and nobody who says nothing, or a byte a second, keeps a descriptor."""
    before = ring.descriptors()
    failed = {kind: ring.strangers(kind) for kind in ZMQ_PORTS}
    with contextlib.ExitStack() as held:
        slow = []
        for port in ring.ports().values():
            made = [socket.create_connection((port.host, port.port), PATIENCE_S) for _ in range(CROWD + 1)]
            slow.append([held.enter_context(each) for each in made][-1])
        assert ring.answer() == PROMPT.generated
        assert ring.status(ring.ring.nodes[1])["state"] == "open"
        drip(slow)
        until(lambda: ring.descriptors() < before + 60, "the descriptors are back while they hold on")
        assert ring.answer() == PROMPT.generated
    for kind, count in failed.items():
        until(lambda kind=kind, count=count: ring.strangers(kind) >= count + CROWD, kind)  # type: ignore[misc]
    assert scrape(str(ring.metrics[1]))["cascadia_scrapes_refused_total|surplus"] > CROWD / 2


def drip(slow: list[socket.socket]) -> None:
    """Send the start of what each port expects, a byte a second, until all of them have hung up."""
    words = (GREETING, GREETING, GREETING, b"GET /metrics HTTP/1.1\r\nA: " + b"b" * 60)
    deadline, at, left = time.monotonic() + PATIENCE_S, 0, dict(zip(slow, words, strict=True))
    while left:
        assert time.monotonic() < deadline, "a slow sender is kept for ever"
        for made, text in list(left.items()):
            with contextlib.suppress(ConnectionError):
                made.setblocking(True)
                made.send(text[at : at + 1])
        at += 1
        time.sleep(1.0)
        for made in list(left):
            made.setblocking(False)
            try:
                gone = not made.recv(4096)
            except BlockingIOError:
                continue
            except ConnectionError:
                gone = True
            if gone:
                del left[made]


def test_a_client_that_never_reads_holds_nobody_up(ring: Besieged) -> None:
    with plain(zmq.DEALER, ring.endpoint, RCVHWM=1, RCVBUF=4096) as deaf:
        for number in range(1000):
            deaf.send_multipart([b"", b'{"op": "status", "id": "%d"}' % number])
        assert ring.answer() == PROMPT.generated


def test_noise_and_broken_frames_are_counted_at_every_port(ring: Besieged) -> None:
    draw = random.Random(11)
    before = {name: ring.count(*path) for name, path in COUNTED.items()}
    knocked = {kind: ring.strangers(kind) for kind in ZMQ_PORTS}
    ports = ring.ports()
    kinds = {"control": zmq.DEALER, "data": zmq.PUSH, "client": zmq.DEALER}
    for _ in range(50):
        for port in ports.values():
            with socket.create_connection((port.host, port.port), timeout=PATIENCE_S) as stray:
                stray.sendall(draw.randbytes(draw.randrange(1, 400)))
    with contextlib.ExitStack() as held:
        for name, kind in kinds.items():
            made = held.enter_context(plain(kind, ports[name]))
            for _ in range(2000):
                made.send(draw.randbytes(draw.randrange(1, 200)))
            made.send_multipart([b"x"] * 300)
        for name, path in COUNTED.items():
            until(lambda path=path, name=name: ring.count(*path) > before[name], name)  # type: ignore[misc]
        for kind, count in knocked.items():
            until(lambda kind=kind, count=count: ring.strangers(kind) > count, kind)  # type: ignore[misc]


COUNTED = {
    "undecodable messages": ("dropped", "undecodable_messages"),
    "misshapen messages": ("ports", "control", "malformed"),
    "misshapen requests": ("ports", "client", "malformed"),
    "no frames": ("data_thread", "dropped", "foreign"),
    "no HTTP": ("ports", "metrics", "unfinished"),
}


# --- a member that lies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lie", "liar", "words", "counter"),
    [
        ("position", 1, r"stage 2 could not compute this stream \(position\)", "position"),
        ("slot", 1, r"stage 2 could not compute this stream \(unknown_stream\)", "unknown_stream"),
        ("nan", 1, "stage 2 computed a value that is not finite", "non_finite"),
        ("quiet", 2, "came back without its token", ""),
        ("negative", 2, "which is no token", ""),
        ("ahead", 2, "answered position", ""),
        ("beyond", 2, "stage 0 could not compute this stream", "internal"),
    ],
)
def test_what_a_lying_member_sends_is_refused_and_named(
    ring: Besieged, lie: str, liar: int, words: str, counter: str
) -> None:
    before = ring.count("data_thread", "failed", counter)
    ring.lies[liar - 1].write_text(lie)
    try:
        with pytest.raises(RequestError, match=words) as refused:
            ring.answer()
        assert refused.value.code is ErrorCode.INTERNAL
    finally:
        ring.lies[liar - 1].unlink()
    deadline = time.monotonic() + PATIENCE_S
    while counter and ring.count("data_thread", "failed", counter) <= before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("lie", "counter"), [("rows", "payload"), ("future", "gap")])
def test_a_frame_that_can_not_be_costs_one_formation(ring: Besieged, lie: str, counter: str) -> None:
    before, epoch = ring.count("data_thread", "dropped", counter), ring.status(ring.ring.nodes[0])["epoch"]
    ring.lies[0].write_text(f"{lie} once")
    assert ring.answer() == PROMPT.generated
    assert ring.count("data_thread", "dropped", counter) > before
    assert ring.status(ring.ring.nodes[0])["epoch"]["counter"] == epoch["counter"] + 1


def test_a_greeting_that_lies_about_everything_changes_nothing(ring: Besieged) -> None:
    """It claims every shard, another promise, and addresses of others; mended by its silence."""
    status = ring.status(ring.ring.nodes[0])
    member = next(node for node in status["nodes"] if node["node"] == status["node"])
    endpoint = {"host": "127.0.0.1", "port": 9}
    for shard in range(3):
        told = {name: status[name] for name in ("protocol", "software", "fleet", "model", "fingerprint")}
        body = told | {
            "type": "hello", "node": f"{shard + 1:016x}", "instance": "1" * 16, "host": "liar", "shards": 3,
            "layers": 12, "hidden": 9999, "holds": [0, 1, 2], "control": endpoint, "data": endpoint,
            "claim": {"shard": shard, "state": "serving", "age_s": 1e9}, "client": endpoint, "device": "CPU",
            "promise": {"slots": 1, "context": 1, "rows": 1}, "pid": 1, "epoch": 2**62,
        }  # fmt: skip
        with plain(zmq.DEALER, ring.ring.nodes[0].control) as dealer:
            dealer.send_json(body)
            assert dealer.recv_json()["type"] in ("welcome", "refusal")  # type: ignore[index, call-overload]
        assert ring.answer() == PROMPT.generated
    now = ring.status(ring.ring.nodes[0])
    assert (now["state"], now["epoch"], now["promise"]) == ("open", status["epoch"], member["promise"])


def test_a_port_scan_of_the_metrics_port_is_answered_in_http(ring: Besieged) -> None:
    with contextlib.suppress(CascadiaError), plain(zmq.REQ, ring.metrics[1], RCVTIMEO=500) as lost:
        lost.send(b"hello")
        with contextlib.suppress(zmq.Again):
            lost.recv()
    assert scrape(str(ring.metrics[1]))["cascadia_node_state|open"] == 1.0
