"""Whole nodes on hosts of their own: what only shows across a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cluster.conftest import Shards
from fixtures.reference import load_case

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

PATIENCE_S = 90.0


class Host:
    """A node on one host, and what it logs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.lines.append({"event": "text", "message": line})

    def count(self, event: str) -> int:
        return sum(line["event"] == event for line in self.lines)

    def wait(self, event: str, times: int = 1) -> dict[str, Any]:
        """The line with which an event was said for so many times."""
        deadline = time.monotonic() + PATIENCE_S
        while self.count(event) < times:
            assert time.monotonic() < deadline, f"no {event} ({times}):\n{self.lines[-8:]}"
            time.sleep(0.05)
        return [line for line in self.lines if line["event"] == event][times - 1]


@pytest.fixture
def join(netlab: ModuleType, shards: Shards, tmp_path: Path) -> Iterator[tuple[Any, Callable[..., Host]]]:
    """A lab, and a way to start nodes in it."""
    model = shards("tiny12", (6, 6))
    with netlab.Lab(3, f"n{os.getpid()}") as lab:

        def start(host: int, *flags: str) -> Host:
            arguments = ["join", "--model", str(model), "--fleet", "lab", "--threads", "1"]
            arguments += ["--insecure", *flags]
            arguments += ["--state-dir", str(tmp_path / f"host-{host}"), "--log-format", "json"]
            command = [sys.executable, "-m", "cascadia_p2p", *arguments]
            # The log goes to standard error, which the lab would leave alone.
            return Host(lab.start(host, ["sh", "-c", 'exec "$@" 2>&1', "sh", *command]))

        yield lab, start


def generate(lab: Any, host: int) -> tuple[int, ...]:
    """Tokens of the first reference prompt, asked from a host that finds the head by mDNS."""
    case = load_case("tiny12")
    ids = ",".join(map(str, case.prompts[1].ids))
    arguments = [
        "generate",
        "--fleet",
        "lab",
        "--token-ids",
        ids,
        "--max-tokens",
        str(case.new_tokens),
        "--json",
    ]
    out = lab.run(host, [sys.executable, "-m", "cascadia_p2p", *arguments], timeout=90.0)
    return tuple(json.loads(out)["token_ids"])


def test_stk_13_a_node_that_gets_another_address_is_back_in_the_ring(
    join: tuple[Any, Callable[..., Host]],
) -> None:
    lab, start = join
    expected = load_case("tiny12").prompts[1].generated
    first, second = start(0), start(1)
    first.wait("ring_open")
    second.wait("ring_open")
    assert generate(lab, 2) == expected
    # Two nodes that hear each other late may both take shard 0 first.
    loads = second.count("shard_loading")
    old = lab.ip(1)
    new = old.rsplit(".", 1)[0] + ".77"
    lab.configure(1, f"addr del {old}/24 dev eth0", f"addr add {new}/24 brd + dev eth0")
    second.wait("ring_open", 2)
    first.wait("ring_open", 2)
    assert second.wait("node_started", 2)["control"].startswith(new)
    assert second.count("shard_loading") == loads, "the shard was loaded again"
    assert generate(lab, 2) == expected


def test_exo_01_two_nodes_that_multicast_does_not_reach_say_so_and_meet_by_peer(
    join: tuple[Any, Callable[..., Host]],
) -> None:
    lab, start = join
    for host in range(3):
        lab.multicast(host, False)
    lonely = start(0, "--shard", "0")
    sentence = lonely.wait("alone")["message"]
    assert "--peer" in sentence
    assert "5353" in sentence
    other = start(1, "--shard", "1", "--peer", f"{lab.ip(0)}:7600")
    lonely.wait("ring_open")
    other.wait("ring_open")
