"""Nodes that die while clients wait: real processes, real kills; who survives, and how answers go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from cluster.conftest import Shards
from cluster.sockets import plain
from fixtures.reference import load_case

from cascadia_p2p.client import AsyncClient, Client
from cascadia_p2p.errors import CascadiaError, UnreachableError
from cascadia_p2p.local import HOST, LocalNode, LocalRing, free_ports
from cascadia_p2p.node.query import ask_node
from cascadia_p2p.types import Endpoint

CASE = load_case("tiny12")
PROMPT = CASE.prompts[1]
SPLIT = (3, 3, 3, 3)
SHARDS = len(SPLIT)
PATIENCE_S = 90.0


@dataclass
class Local:
    """Four processes, one a shard; each can be killed and started again at its ports."""

    ring: LocalRing
    client: Endpoint
    current: dict[int, LocalNode]
    slow: Path

    def start(self, shard: int) -> None:
        port = self.current[shard].port if shard in self.current else None
        flags = ["--shard", str(shard)]
        if shard == 0:
            flags += ["--client-port", str(self.client.port)]
        program = (sys.executable, str(Path(__file__).with_name("slow.py")), str(self.slow))
        self.current[shard] = self.ring.start_node(*flags, port=port, program=program)

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """For the block: answers outlast what a test does meanwhile, on a machine that stalls too."""
        self.slow.write_text("0.02")
        try:
            yield
        finally:
            self.slow.unlink()

    def kill(self, shard: int) -> float:
        """When it was killed."""
        process = self.current[shard].process
        process.kill()
        killed = time.monotonic()
        process.wait()
        return killed

    def open(self) -> None:
        """Wait until all say that the ring is open."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            status = self.status()
            if status is not None and status["state"] == "open":
                claims = [node["claim"] for node in status["nodes"]]
                if claims == ["serving"] * SHARDS:
                    return
            assert time.monotonic() < deadline, self.ring.tail()
            time.sleep(0.05)

    def status(self) -> dict[str, Any] | None:
        try:
            with Client(self.client, timeout_s=5) as client:
                return dict(client.status())
        except CascadiaError:
            return None

    def right(self) -> None:
        with Client(self.client, timeout_s=30) as client:
            assert client.generate(PROMPT.ids, max_tokens=CASE.new_tokens).token_ids == PROMPT.generated

    def others_live(self, shard: int) -> None:
        assert all(node.process.poll() is None for at, node in self.current.items() if at != shard)


UNWRITABLE = Path("/proc")
"""A directory of Linux in which nobody can make a file, not even root."""


@pytest.fixture(scope="module")
def processes(shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    state = tmp_path_factory.mktemp("losses")
    flags = ("--threads", "1", "--slots", "4", "--context", "4096")
    with (
        LocalRing(shards(CASE, SPLIT), state, flags=flags) as ring,
        pytest.MonkeyPatch.context() as elsewhere,
    ):
        if UNWRITABLE.exists():
            elsewhere.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
            elsewhere.chdir(UNWRITABLE)
        made = Local(ring, Endpoint(HOST, free_ports()), {}, state / "slow")
        for shard in range(SHARDS):
            made.start(shard)
        yield made
    said = [line for node in ring.nodes for line in node.lines]
    assert not [line for line in said if '"trace"' in line or "Traceback" in line]
    assert not [line for line in said if '"level":"error"' in line]


@pytest.fixture
def local(processes: Local) -> Local:
    """The ring, open and right."""
    for shard, node in list(processes.current.items()):
        if node.process.poll() is not None:
            processes.start(shard)
    processes.open()
    processes.right()
    return processes


@pytest.mark.skipif(not UNWRITABLE.exists(), reason="a directory of Linux")
def test_pri_03_nodes_need_no_place_to_write_where_they_are_started(local: Local) -> None:
    """That they answer rightly is seen by all tests here."""
    assert {psutil.Process(node.process.pid).cwd() for node in local.current.values()} == {str(UNWRITABLE)}


STEADY = {"token_ids": list(PROMPT.ids), "max_tokens": 200, "ignore_eos": True}
LONG = {"token_ids": list(PROMPT.ids), "max_tokens": 4000, "ignore_eos": True}


def waits(socket: zmq.Socket[bytes], number: int, request: dict[str, Any] = LONG) -> None:
    socket.send(json.dumps(request | {"id": str(number)}).encode())


def busy(local: Local, count: int) -> None:
    """Wait until so many requests are with the head."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        status = local.status()
        if status is not None and status["requests"]["pending"] == count:
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed(processes: Local) -> list[int]:
    """The ids that answer `STEADY`."""
    processes.open()
    with plain(zmq.REQ, processes.client) as request:
        waits(request, 0, STEADY)
        return list(json.loads(request.recv())["token_ids"])


@pytest.mark.parametrize("shard", [1, 2])
def test_exo_13_every_waiting_client_gets_its_whole_answer_once_the_node_is_back(
    local: Local, undisturbed: list[int], shard: int
) -> None:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(plain(zmq.REQ, local.client, RCVTIMEO=90_000)) for _ in range(6)]
        with local.slowly():
            for number, socket in enumerate(sockets):
                waits(socket, number, STEADY)
            # Four run in the slots, two wait for one.
            busy(local, 6)
            local.kill(shard)
        local.others_live(shard)
        lost(local, shard)
        assert not any(socket.poll(50) for socket in sockets)
        late = stack.enter_context(plain(zmq.REQ, local.client, RCVTIMEO=90_000))
        waits(late, 6, STEADY)
        busy(local, 7)
        local.start(shard)
        for number, socket in enumerate([*sockets, late]):
            reply = json.loads(socket.recv())
            assert reply["id"] == str(number)
            assert reply["token_ids"] == undisturbed
        # One reply each, and no second one.
        assert not any(socket.poll(50) for socket in sockets)
    local.right()
    local.others_live(-1)


def lost(local: Local, shard: int) -> None:
    """Wait until the head misses a shard."""
    deadline = time.monotonic() + PATIENCE_S
    while (status := local.status()) is None or status["missing"] != [shard]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes can not be frozen here")
def test_cas_04_a_node_that_falls_silent_is_lost_and_found_again(
    local: Local, undisturbed: list[int]
) -> None:
    """Frozen, its ports stay open: only its silence tells."""
    frozen = local.current[1].process
    before = len(local.current[0].lines)
    with plain(zmq.REQ, local.client, RCVTIMEO=90_000) as request:
        with local.slowly():
            waits(request, 1, STEADY)
            busy(local, 1)
            frozen.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            lost(local, 1)
            noticed = time.monotonic() - stopped
        finally:
            frozen.send_signal(signal.SIGCONT)
        assert json.loads(request.recv())["token_ids"] == undisturbed
    # A busy machine may see to it late.
    assert noticed < 30
    assert any("has sent no heartbeat for" in line for line in local.current[0].lines[before:])
    local.right()
    local.others_live(-1)


def test_dll_01_when_the_head_dies_its_clients_know_at_once_and_the_others_live_on(local: Local) -> None:
    before = dict(local.current)
    failed: dict[str, float] = {}

    def blocking() -> None:
        with (
            Client(local.client, retry=False) as client,
            pytest.raises(UnreachableError, match="was lost before its reply"),
        ):
            client.generate(PROMPT.ids, max_tokens=4000, ignore_eos=True)
        failed["blocking"] = time.monotonic()

    async def concurrent() -> None:
        async with AsyncClient(local.client, retry=False) as client:
            asked = [client.generate(PROMPT.ids, max_tokens=4000, ignore_eos=True) for _ in range(3)]
            results = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(result, UnreachableError) for result in results)
        failed["asyncio"] = time.monotonic()

    with ThreadPoolExecutor(2) as pool:
        with local.slowly():
            waiting = [pool.submit(blocking), pool.submit(lambda: asyncio.run(concurrent()))]
            busy(local, 4)
            killed = local.kill(0)
        for each in waiting:
            each.result(60)
    # Not by a time limit: that of an answer is ten minutes.
    assert all(at - killed < 20 for at in failed.values()), failed
    local.others_live(0)
    local.start(0)
    local.open()
    local.right()
    assert all(local.current[shard] is before[shard] for shard in (1, 2))
    local.others_live(-1)


def test_stk_04_clients_ask_a_restarted_head_again_on_the_same_socket(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Client(local.client, timeout_s=60, retry=False)
    body = json.dumps({"token_ids": list(PROMPT.ids), "max_tokens": CASE.new_tokens}).encode()
    with ours, plain(zmq.REQ, local.client, REQ_RELAXED=1, REQ_CORRELATE=1, RCVTIMEO=500) as request:
        with local.slowly():
            waits(request, 1)
            busy(local, 1)
            local.kill(0)
        with pytest.raises(zmq.Again):
            request.recv()
        with monkeypatch.context() as patch:
            patch.setattr("cascadia_p2p.client.CONNECT_S", 0.5)
            with pytest.raises(UnreachableError, match="nothing listens there"):
                ours.generate(PROMPT.ids)
        local.start(0)
        local.open()
        request.setsockopt(zmq.RCVTIMEO, 30_000)
        # The reply to what was asked before never comes as the answer to this.
        request.send(body)
        assert json.loads(request.recv())["token_ids"] == list(PROMPT.generated)
        assert ours.generate(PROMPT.ids, max_tokens=CASE.new_tokens).token_ids == PROMPT.generated


def test_a_client_finds_the_head_again_where_it_comes_back(local: Local) -> None:
    """Retrying is all that a client must do."""
    answers: list[tuple[int, ...]] = []
    stopped = threading.Event()

    def patient() -> None:
        with Client(local.client, timeout_s=30) as client:
            while not stopped.is_set():
                try:
                    reply = client.generate(PROMPT.ids, max_tokens=CASE.new_tokens)
                except CascadiaError:
                    continue
                answers.append(reply.token_ids)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(patient)
        local.kill(0)
        seen = len(answers)
        local.start(0)
        deadline = time.monotonic() + PATIENCE_S
        while len(answers) < seen + 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        stopped.set()
        asking.result(30)
    assert set(answers) == {PROMPT.generated}


def test_two_nodes_lost_at_once_are_one_pause(local: Local, undisturbed: list[int]) -> None:
    with plain(zmq.REQ, local.client, RCVTIMEO=90_000) as request:
        with local.slowly():
            waits(request, 1, STEADY)
            busy(local, 1)
            for shard in (1, 2):
                local.kill(shard)
        for shard in (1, 2):
            local.start(shard)
        assert json.loads(request.recv())["token_ids"] == undisturbed
    local.others_live(-1)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes can not be frozen here")
def test_ring_08_a_frozen_node_that_was_replaced_does_nothing_when_it_wakes(
    local: Local, undisturbed: list[int]
) -> None:
    frozen = local.current[1]
    standby = local.ring.start_node("--shard", "1")
    try:
        loaded(local, standby)
        with plain(zmq.REQ, local.client, RCVTIMEO=90_000) as request:
            with local.slowly():
                waits(request, 1, STEADY)
                busy(local, 1)
                frozen.process.send_signal(signal.SIGSTOP)
            try:
                assert json.loads(request.recv())["token_ids"] == undisturbed
                status = local.status()
                assert status is not None
                with local.slowly():
                    waits(request, 2, STEADY)
                    busy(local, 1)
                    # Now its old frames leave, and its old words.
                    frozen.process.send_signal(signal.SIGCONT)
            finally:
                frozen.process.send_signal(signal.SIGCONT)
            assert json.loads(request.recv())["token_ids"] == undisturbed
        loaded(local, frozen)
        after = local.status()
        assert after is not None
        assert after["epoch"] == status["epoch"]
        assert after["stages"][1]["control"] == str(standby.control)
    finally:
        standby.process.kill()
        standby.process.wait()
    local.open()
    local.right()


def loaded(local: Local, node: LocalNode) -> None:
    """Wait until the head knows a node as one that waits."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        status = local.status()
        known = [] if status is None else status["nodes"]
        if any(each["control"] == str(node.control) and each["claim"] == "loaded" for each in known):
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def load(local: Local, undisturbed: list[int]) -> Iterator[list[list[int]]]:
    """Three readers that ask again and again while the block runs; all that they read must be right."""
    over = threading.Event()
    answers: list[list[int]] = []

    def ask() -> None:
        with Client(local.client, timeout_s=90) as client:
            while not over.is_set():
                ids: list[int] = []
                answer = client.stream(PROMPT.ids, max_tokens=STEADY["max_tokens"], ignore_eos=True)
                for piece in answer:
                    ids += piece.token_ids
                assert answer.reply.token_ids == tuple(ids)
                answers.append(ids)

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        try:
            busy(local, 3)
            yield answers
        finally:
            over.set()
        for each in asking:
            each.result(90)
    assert all(answer == undisturbed for answer in answers)


def interrupt(node: LocalNode) -> None:
    """Ctrl-C, until the process has ended."""
    node.process.send_signal(signal.SIGINT)
    assert node.process.wait(PATIENCE_S) == 130


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes are not asked to end by signals here")
def test_a_rolling_restart_under_load_loses_nothing(local: Local, undisturbed: list[int]) -> None:
    with load(local, undisturbed) as answers:
        for shard in reversed(range(SHARDS)):
            busy(local, 3)
            interrupt(local.current[shard])
            local.start(shard)
            local.open()
            seen, deadline = len(answers), time.monotonic() + PATIENCE_S
            while len(answers) < seen + 2:
                assert time.monotonic() < deadline, "answers go on"
                time.sleep(0.02)


def test_exo_09_killed_and_started_again_five_times_a_node_is_there_once(local: Local) -> None:
    """Some runs end before the ring has taken them in, some after."""
    instances = set()
    for wait in (False, False, True, False, False):
        local.kill(1)
        local.start(1)
        said(local.current[1], "node_started")
        if wait:
            local.open()
    for each in local.current.values():
        deadline = time.monotonic() + PATIENCE_S
        # Each hears of the last run by a message of its own.
        while True:
            status: Any = asyncio.run(ask_node(each.control, PATIENCE_S))
            found = [node for node in status["nodes"] if node["shard"] == 1]
            if [node["pid"] for node in found] == [local.current[1].process.pid] and status[
                "state"
            ] == "open":
                break
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        assert len(status["nodes"]) == len({node["node"] for node in status["nodes"]}) == SHARDS
        instances.add(found[0]["instance"])
    assert len(instances) == 1
    local.right()


CLOCK = """
import datetime, sys, time
print("this clock is a day off", file=sys.stderr)
now, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now() + 86400.0, lambda: now_ns() + 86_400_000_000_000
"""


def test_cas_22_a_node_whose_clock_is_a_day_off_serves_like_any_other(
    local: Local, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    local.kill(2)
    lost(local, 2)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
        local.start(2)
    local.open()
    assert "this clock is a day off" in local.current[2].lines
    local.right()
    status = local.status()
    assert status is not None
    ages = {node["shard"]: node["claim_age_s"] for node in status["nodes"]}
    assert max(ages.values()) < 3600


def said(node: LocalNode, event: str) -> None:
    """Wait until a node has logged an event."""
    deadline = time.monotonic() + PATIENCE_S
    while not any(f'"event":"{event}"' in line for line in list(node.lines)):
        assert time.monotonic() < deadline, node.lines
        time.sleep(0.02)


def test_exo_10_whoever_misses_a_node_waits_quietly(local: Local) -> None:
    """In CPU seconds, which do not depend on how busy the machine is, and in lines of the log."""
    local.kill(1)
    lost(local, 1)
    others = [node for shard, node in local.current.items() if shard != 1]
    watched = [psutil.Process(node.process.pid) for node in others]

    def spent() -> list[tuple[float, int]]:
        times = [each.cpu_times() for each in watched]
        said = [len(node.lines) for node in others]
        return [(time_.user + time_.system, lines) for time_, lines in zip(times, said, strict=True)]

    before = spent()
    time.sleep(6.0)
    for (cpu, lines), (cpu_before, lines_before) in zip(spent(), before, strict=True):
        assert cpu - cpu_before < 2.0
        assert lines - lines_before < 12
