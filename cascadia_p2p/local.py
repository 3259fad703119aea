"""A whole ring on this machine: one `join` process a node, on 127.0.0.1, ended together.

For `demo`, benchmarks and tests. Each node's log lines come back as events.
"""

from __future__ import annotations

import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import orjson

from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.types import Endpoint

HOST: Final = "127.0.0.1"
LOWEST_PORT: Final = 20000
HIGHEST_PORT: Final = 32000
COMMAND: Final = (sys.executable, "-m", "cascadia_p2p")
"""What runs the command line."""

_given: Final[deque[int]] = deque(maxlen=100)

LAST_WORDS_S: Final = 5.0
"""Seconds that the lines of a process that has ended get to be read."""

END_S: Final = 10.0
"""Seconds that a node gets to end by itself."""


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """One line of a node's log.

    Args:
        node: index of the process.
        event: stable name.
        message: the sentence for people; may be empty.
        fields: everything else of the line.
    """

    node: int
    event: str
    message: str
    fields: dict[str, object]


@dataclass(slots=True)
class LocalNode:
    """One node process and what it said."""

    index: int
    process: subprocess.Popen[bytes]
    port: int
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None
    host: str = HOST

    def over(self) -> bool:
        """Whether the process has ended; what it said last is read by then."""
        if self.process.poll() is None:
            return False
        if self.reader is not None:
            self.reader.join(LAST_WORDS_S)
        return True

    @property
    def control(self) -> Endpoint:
        """Where its control socket is bound."""
        return Endpoint(self.host, self.port)


class LocalRing:
    """Starts and ends node processes of one fleet; use it as a context manager.

    A node ends when this process does, however that happens: it watches its standard input.

    Args:
        model: directory of the exported model.
        state: directory for the nodes' state.
        fleet: a name; by default one that no other ring has.
        flags: more flags for every node.
    """

    def __init__(
        self, model: Path, state: Path, *, fleet: str | None = None, flags: Sequence[str] = ()
    ) -> None:
        self.fleet = fleet or f"local-{secrets.token_hex(4)}"
        self.nodes: list[LocalNode] = []
        self._model = model
        self._state = state
        self._flags = tuple(flags)
        self._events: queue.Queue[NodeEvent] = queue.Queue()

    def start_node(
        self,
        *flags: str,
        port: int | None = None,
        host: str = HOST,
        program: Sequence[str] = COMMAND,
    ) -> LocalNode:
        """Start one more node; it knows the first one's address beside mDNS.

        Args:
            flags: for this node.
            port: its control port; a free one by default.
            host: its address.
            program: that takes the arguments of `cascadia-p2p`.
        """
        port = free_ports() if port is None else port
        command = [*program, "join", "--model", str(self._model)]
        command += ["--fleet", self.fleet, "--bind", host, "--port", str(port), "--client-port", "0"]
        command += ["--state-dir", str(self._state), "--log-format", "json", "--while-stdin-open"]
        if self.nodes:
            command += ["--peer", str(self.nodes[0].control)]
        process = subprocess.Popen(
            [*command, *self._flags, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        node = LocalNode(len(self.nodes), process, port, host=host)
        node.reader = threading.Thread(target=self._read, args=(node,), daemon=True)
        node.reader.start()
        self.nodes.append(node)
        return node

    def events(self, timeout_s: float, *, until_one_ends: bool = False) -> Iterator[NodeEvent]:
        """Events as they come, for at most so many seconds; events already taken do not come again.

        Args:
            timeout_s: seconds.
            until_one_ends: stop when any node has ended, not only when all have.
        """
        deadline = time.monotonic() + timeout_s
        enough = any if until_one_ends else all
        while (left := deadline - time.monotonic()) > 0:
            over = bool(self.nodes) and enough(node.over() for node in self.nodes)
            try:
                event = self._events.get(timeout=0.0 if over else min(left, 0.25))
            except queue.Empty:
                if over:
                    return
                continue
            yield event

    def wait_for(self, name: str, timeout_s: float, *, node: int | None = None) -> NodeEvent:
        """The next event of this name (of one node).

        Raises:
            CascadiaError: it did not come in time, or all nodes ended; holds the last lines of their logs.
        """
        for event in self.events(timeout_s):
            if event.event == name and (node is None or event.node == node):
                return event
        raise CascadiaError(f"no '{name}' from the local ring within {timeout_s:g} s\n{self.tail()}")

    def tail(self, lines: int = 4) -> str:
        """The last that every node said, those that have ended first."""
        said = []
        for node in sorted(self.nodes, key=lambda node: node.process.poll() is None):
            code = node.process.poll()
            state = "runs" if code is None else f"ended with exit code {code}"
            for line in node.lines[-lines:]:
                event = _event(node.index, line)
                said.append(f"node {node.index} ({state}): {event.message or event.event}")
        return "\n".join(said)

    def ended(self) -> str | None:
        """The last words of the first node that has ended by itself; None while all run."""
        for node in self.nodes:
            if node.over():
                code = node.process.returncode
                last = _event(node.index, node.lines[-1]) if node.lines else None
                words = last.message or last.event if last is not None else "it said nothing"
                return f"node {node.index} ended with exit code {code}: {words}"
        return None

    def stop(self) -> None:
        """Ask all nodes to end, wait, and end by force those that do not."""
        for node in self.nodes:
            if node.process.stdin is not None:
                node.process.stdin.close()
        deadline = time.monotonic() + END_S
        for node in self.nodes:
            try:
                node.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()
            if node.reader is not None:
                node.reader.join(END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _read(self, node: LocalNode) -> None:
        stream = node.process.stderr
        if stream is None:
            return
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                node.lines.append(line)
                self._events.put(_event(node.index, line))


def _event(node: int, line: str) -> NodeEvent:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        return NodeEvent(node, "text", line, {})
    name, message = str(fields.pop("event", "")), str(fields.pop("message", ""))
    return NodeEvent(node, name, message, fields)


def free_ports() -> int:
    """A port that is free together with the next one, and that this process did not give lately.

    It lies below those that systems give to outgoing connections: one of these could take it before the node
    that it is for has started.
    """
    for _ in range(1000):
        port = LOWEST_PORT + secrets.randbelow(HIGHEST_PORT - LOWEST_PORT)
        if any(abs(port - given) <= 1 for given in _given):
            continue
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind((HOST, port))
                second.bind((HOST, port + 1))
            except OSError:
                continue
        _given.append(port)
        return port
    raise CascadiaError("no two neighbouring free ports on 127.0.0.1: end some programs and try again")
