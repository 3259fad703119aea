"""The doctor between hosts: network namespaces on one switch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.lab

DOCTOR = (sys.executable, "-m", "cascadia_p2p", "doctor", "--json", "--only", "network")


class Hosts:
    """A lab in which doctors and nodes can be started."""

    def __init__(self, lab) -> None:  # type: ignore[no-untyped-def]
        self.lab = lab

    def findings(self, *hosts: int, flags: tuple[str, ...] = ()) -> list[list[dict[str, object]]]:
        """What doctors on these hosts find, at the same time."""
        started = [self.lab.start(host, [*DOCTOR, *flags], subprocess.DEVNULL) for host in hosts]
        said = [process.communicate(timeout=120)[0] for process in started]
        return [json.loads(text)["findings"] for text in said]

    def examine(self, *hosts: int, flags: tuple[str, ...] = ()) -> list[dict[str, dict[str, object]]]:
        """The same by check."""
        return [{str(each["check"]): each for each in found} for found in self.findings(*hosts, flags=flags)]


@pytest.fixture
def hosts(netlab: ModuleType) -> Iterator[Hosts]:
    with netlab.Lab(2, f"d{os.getpid()}") as lab:
        yield Hosts(lab)


def test_exo_01_two_doctors_hear_each_other_unless_multicast_is_blocked(hosts: Hosts) -> None:
    # They listen for seconds, and a busy machine may start one behind the other.
    for _ in range(5):
        both = hosts.examine(0, 1)
        if all(found["multicast"]["level"] == "ok" for found in both):
            break
    for found, other in zip(both, (1, 0), strict=True):
        assert found["multicast"]["level"] == "ok"
        assert found["multicast"]["facts"]["hosts"] == [hosts.lab.ip(other)]  # type: ignore[index]
        assert found["interface"]["level"] == "ok"
        assert "eth0" in str(found["interface"]["message"])
    hosts.lab.multicast(0, False)
    hosts.lab.multicast(1, False)
    for found in hosts.examine(0, 1):
        multicast = found["multicast"]
        assert multicast["level"] == "warn"
        # The own packets come back inside the host: it is the network that lets none through.
        assert multicast["facts"]["echoed"] > 0  # type: ignore[index]
        assert multicast["facts"]["hosts"] == []  # type: ignore[index]
        assert "--peer HOST:PORT" in str(multicast["advice"])


def test_a_node_on_another_host_is_found_measured_and_its_link_judged(
    hosts: Hosts, exported: Path, tmp_path: Path
) -> None:
    node = hosts.lab.cascadia(
        1,
        *("join", "--model", str(exported), "--fleet", "lab", "--insecure"),
        *("--state-dir", str(tmp_path), "--threads", "1"),
    )
    peer = f"{hosts.lab.ip(1)}:7600"
    flags = ("--fleet", "lab", "--peer", peer)
    deadline = time.monotonic() + 150
    while True:
        found = hosts.examine(0, flags=flags)[0]
        if "1 of 1 shards" in str(found.get("fleet", {}).get("message")):
            break
        assert time.monotonic() < deadline, found
    assert node.poll() is None
    assert found["multicast"]["facts"]["hosts"] == [hosts.lab.ip(1)]  # type: ignore[index]
    assert found["peer_data"]["level"] == "ok"
    # A machine that is busy answers late or slowly, and is told so.
    facts: Any = found["peer"]["facts"]
    slow = facts["rtt_s"] > 5e-3 or facts["bytes_s"] < 50e6
    assert found["peer"]["level"] == ("warn" if slow else "ok")
    narrow = "tc qdisc add dev eth0 root tbf rate 50mbit burst 16kb latency 400ms"
    hosts.lab.run(0, narrow.split())
    deadline = time.monotonic() + 40
    while True:
        throttled: Any = hosts.examine(0, flags=flags)[0]["peer"]
        assert throttled["level"] == "warn"
        # Of a machine that is busy the delay is said first.
        told = ("slower than a gigabit", "a hop costs every token")
        assert any(words in str(throttled["advice"]) for words in told)
        assert throttled["facts"]["bytes_s"] < 1.3 * 50e6 / 8
        if throttled["facts"]["bytes_s"] > 0.7 * 50e6 / 8:
            break
        assert time.monotonic() < deadline, throttled


def test_dll_14_no_route_and_a_silent_host_are_told(hosts: Hosts) -> None:
    hosts.lab.cut(1, silent=True)
    peers = ("--peer", "203.0.113.9:7600", "--peer", f"{hosts.lab.ip(1)}:7600")
    (found,) = hosts.findings(0, flags=("--no-mdns", *peers))
    away, silent = (each for each in found if each["check"] == "peer")
    assert (away["level"], silent["level"]) == ("fail", "fail")
    assert "This machine has no route to it" in str(away["message"]) + str(away["advice"])
    assert f"from {hosts.lab.ip(0)} (eth0): no answer" in str(silent["message"])
    assert "firewall" in str(silent["advice"])
