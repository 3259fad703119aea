"""Commands as real processes: Ctrl-C, sudden deaths, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster.conftest import Shards

from cascadia_p2p.client import Client
from cascadia_p2p.local import free_ports

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")

PATIENCE_S = 90.0

Start = Callable[..., subprocess.Popen[str]]


def free(ports: Iterable[int]) -> bool:
    """Whether all these ports can be bound again."""
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


def until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def lines(process: subprocess.Popen[str], words: str) -> list[str]:
    """What a process says on stderr, up to the line with `words`."""
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if words in line:
            return said
    raise AssertionError(f"ended without '{words}':\n{''.join(said)}")


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The node processes of a command; for a moment such a one is still a copy of its parent."""
    found = []
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "--model" in each.cmdline():
                found.append(each)
    return found


def gone(processes: Iterable[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


def join(
    process: Start, model: Path, state: Path, port: int, *flags: object, client_port: int | None = None
) -> subprocess.Popen[str]:
    given = ("--model", model, "--fleet", "process-tests", "--bind", "127.0.0.1", "--no-mdns")
    places = ("--port", port, "--client-port", client_port or free_ports(), "--state-dir", state)
    return process("join", *given, *places, "--threads", 1, "--log-format", "json", *flags)


def events(said: Iterable[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said if line.startswith("{")]


def test_ctrl_c_says_goodbye_frees_the_ports_and_ends_with_130(
    process: Start, shards: Shards, tmp_path: Path
) -> None:
    model = shards("tiny12", (5, 7))
    port = free_ports()
    client_port = free_ports()
    head = join(process, model, tmp_path, port, "--shard", 0, client_port=client_port)
    other_port = free_ports()
    other = join(process, model, tmp_path, other_port, "--shard", 1, "--peer", f"127.0.0.1:{port}")
    lines(head, '"ring_open"')
    lines(other, '"ring_open"')
    other.send_signal(signal.SIGINT)
    out, err = other.communicate(timeout=PATIENCE_S)
    assert other.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert any(
        each["event"] == "leaving" and "Ctrl-C" in each["message"] for each in events(err.splitlines())
    )
    # The head was told, and needed no silence to notice.
    said = events(lines(head, '"peer_gone"'))
    assert any(each["event"] == "peer_gone" and "left" in each["message"] for each in said)
    assert head.poll() is None
    head.send_signal(signal.SIGTERM)
    assert head.wait(PATIENCE_S) == 130
    until(lambda: free((port, port + 1, client_port, other_port, other_port + 1)), "all ports are free")


def test_ctrl_c_while_modules_are_read_ends_quietly() -> None:
    program = (
        "import runpy, sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'cascadia_p2p.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "runpy.run_module('cascadia_p2p', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_while_loading_or_alone_ends_at_once(process: Start, shards: Shards, tmp_path: Path) -> None:
    model = shards("tiny66", (22,) * 3)
    port = free_ports()
    loading = join(process, model, tmp_path, port, "--shard", 1)
    lines(loading, '"shard_loading"')
    loading.send_signal(signal.SIGINT)
    # Less than a node which is asked to end goes on with what runs.
    assert loading.wait(50) == 130
    assert "Traceback" not in loading.communicate()[1]
    until(lambda: free((port, port + 1)), "the ports are free")


def test_a_longer_context_than_the_models_own_is_said_once(
    process: Start, shards: Shards, tmp_path: Path
) -> None:
    model, port = shards("tiny12", (12,)), free_ports()
    longest = json.loads((model / "manifest.json").read_text())["config"]["max_position_embeddings"]

    def warnings(*flags: object) -> list[str]:
        node = join(process, model, tmp_path, port, "--slots", 1, *flags)
        said = events(lines(node, '"ring_open"'))
        node.send_signal(signal.SIGINT)
        said += events(node.communicate(timeout=PATIENCE_S)[1].splitlines())
        assert node.returncode == 130
        return [each["message"] for each in said if each["event"] == "context_cut"]

    assert warnings("--context", longest + 1) == [
        f"the model was made for {longest} positions, fewer than the {longest + 1} of flag --context: a "
        f"stream has room for {longest} and longer requests are refused; use --context {longest}"
    ]
    assert warnings("--context", longest) == []


def test_ctrl_c_in_generate_ends_with_130_and_the_head_stops_working_for_it(
    process: Start, shards: Shards, tmp_path: Path
) -> None:
    model = shards("tiny12", (12,))
    port = free_ports()
    client_port = free_ports()
    head = join(process, model, tmp_path, port, "--shard", 0, "--context", 4096, client_port=client_port)
    lines(head, '"ring_open"')
    endpoint = f"127.0.0.1:{client_port}"
    asked = process("generate", "hello", "--ignore-eos", "--max-tokens", 4000, "--endpoint", endpoint)

    with Client(endpoint) as client:

        def counts() -> dict[str, Any]:
            counted = client.status()["requests"]
            assert isinstance(counted, dict)
            return counted

        until(lambda: counts()["pending"] == 1, "the prompt is with the head")
        asked.send_signal(signal.SIGINT)
        out, err = asked.communicate(timeout=PATIENCE_S)
        assert (asked.returncode, out, err) == (130, "", "")
        until(lambda: counts()["cancelled"] == 1, "the head has noticed")
        assert counts()["pending"] == 0


def test_a_demo_that_loses_a_node_says_so_at_once(process: Start) -> None:
    demo = process("demo", "--sample", "--nodes", 2)
    lines(demo, "starting 2 nodes")
    until(lambda: len(children(demo)) == 2, "two nodes are started")
    children(demo)[1].kill()
    _, err = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 1
    assert "ended with exit code" in err
    assert "Run the demo again" in err


def test_a_politely_killed_demo_leaves_no_model_behind(process: Start) -> None:
    demo = process("demo", "--sample", "--nodes", 1)
    lines(demo, "starting 1 nodes")
    until(lambda: len(children(demo)) == 1, "the node is started")
    command = children(demo)[0].cmdline()
    model = Path(command[command.index("--model") + 1])
    assert model.is_dir()
    demo.terminate()
    demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 143
    assert not model.parent.exists()


def test_the_demo_answers_and_leaves_nothing(process: Start, tmp_path: Path) -> None:
    demo = process("demo", "--sample", "--nodes", 3, "--max-tokens", 5)
    said = lines(demo, "starting 3 nodes")
    until(lambda: len(children(demo)) == 3, "three nodes are started")
    nodes = children(demo)
    commands = [node.cmdline() for node in nodes]
    controls = [int(command[command.index("--port") + 1]) for command in commands]
    # What is behind the line that was read last may be in the file's buffer.
    assert demo.stderr is not None
    err = demo.stderr.read()
    served = re.search(r"clients are served at tcp://127\.0\.0\.1:(\d+)", err)
    assert served is not None
    ports = {*controls, *(port + 1 for port in controls), int(served[1])}
    assert len(ports) == 7
    out, _ = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 0
    # Data on stdout: the answer alone.
    assert len(out.rstrip("\n").splitlines()) <= 1
    assert "5 new ones; 3 nodes" in err
    assert "Traceback" not in "".join(said) + err
    until(lambda: gone(nodes), "the nodes are gone")
    until(lambda: free(ports), "their ports are free")


def test_ctrl_c_in_the_demo_ends_all_its_nodes(process: Start) -> None:
    demo = process("demo", "--sample", "--nodes", 2, "--max-tokens", 2000)
    lines(demo, "asking")
    until(lambda: len(children(demo)) == 2, "two nodes are started")
    nodes = children(demo)
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert gone(nodes)


def test_the_nodes_of_a_demo_that_was_killed_end_by_themselves(process: Start) -> None:
    demo = process("demo", "--sample", "--nodes", 2, "--max-tokens", 2000)
    lines(demo, "clients are served")
    until(lambda: len(children(demo)) == 2, "two nodes are started")
    nodes = children(demo)
    demo.kill()
    demo.wait()
    until(lambda: gone(nodes), "the nodes are gone")
