"""`doctor` on the command line, alone and beside a living node."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import structlog

from cascadia_p2p import __version__
from cascadia_p2p.cli import doctor, join, main
from cascadia_p2p.local import LocalRing, free_ports
from cascadia_p2p.node.query import ask_node
from cascadia_p2p.types import Endpoint

HERE = ("--bind", "127.0.0.1", "--fleet", "examined-here", "--threads", "1")
NETWORK = ("--only", "network")


@pytest.fixture(autouse=True)
def restore_logs() -> Iterator[None]:
    """The command sets logging up for its process, which here is everybody's."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["doctor", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def findings(out: str) -> dict[str, dict[str, object]]:
    """The findings by check; the last of each name."""
    body = json.loads(out)
    assert body["version"] == __version__
    worst = max((each["level"] for each in body["findings"]), key=("ok", "warn", "fail").index)
    assert body["level"] == worst
    for each in body["findings"]:
        assert set(each) == {"check", "level", "message", "advice", "facts"}
        assert each["message"]
    return {each["check"]: each for each in body["findings"]}


def free_flags() -> tuple[str, ...]:
    return "--port", str(free_ports()), "--client-port", str(free_ports())


def test_a_machine_alone_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *HERE, *free_flags(), "--json")
    found = findings(out)
    assert (code, err) == (0, "")
    assert {
        *("python", "packages", "installation", "openvino", "gpu", "processor", "memory", "bandwidth"),
        *("power", "clock", "interface", "ports", "multicast", "fleet"),
    } <= set(found)
    assert found["memory"]["facts"]["total"] == psutil.virtual_memory().total  # type: ignore[index]
    assert found["multicast"]["facts"]["echoed"] > 0  # type: ignore[index]
    assert found["interface"]["facts"]["address"] == "127.0.0.1"  # type: ignore[index]


def test_a_failing_check_gives_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    peer = f"127.0.0.1:{free_ports()}"
    code, out, _ = run(capsys, *HERE, *free_flags(), *NETWORK, "--no-mdns", "--peer", peer)
    assert code == 1
    line = next(line for line in out.splitlines() if line.startswith("fail "))
    assert line.startswith(f"fail peer         {peer} can not be reached from 127.0.0.1")
    assert "  -> the machine answers, but nothing listens on port" in out
    assert out.rstrip().endswith("1 fail: a node would not work as asked for")
    assert "ok   multicast    mDNS is off: nodes are found by --peer only" in out


def test_a_living_node_is_recognised_on_its_ports_and_measured(
    living_node: LocalRing, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = living_node.nodes[0]
    flags = (
        *(*NETWORK, "--only", "model"),
        *("--bind", "127.0.0.1", "--fleet", living_node.fleet, "--port", str(node.port), "--threads", "1"),
        *("--peer", str(node.control), "--model", str(exported), "--state-dir", str(tmp_path), "--json"),
    )
    # A node that a stalled machine keeps from answering in time is not seen.
    for _ in range(5):
        code, out, _ = run(capsys, *flags)
        found = findings(out)
        if code == 0 and str(found["fleet"]["message"]).startswith("1 node of fleet"):
            break
    assert code == 0, found
    assert f"control port {node.port} by a node of fleet '{living_node.fleet}'" in str(
        found["ports"]["message"]
    )
    assert found["peer"]["facts"]["rtt_s"] < 30  # type: ignore[index]
    # The ring that answers goes on: padded questions are answered like any other.
    assert found["peer"]["facts"]["bytes_s"] > 1e3  # type: ignore[index]
    assert "ring open" in str(found["peer"]["message"])
    assert found["peer_data"]["level"] == "ok"
    assert str(found["fleet"]["message"]).startswith(
        f"1 node of fleet '{living_node.fleet}' seen, 1 of 1 shards"
    )
    assert found["versions"]["level"] == "ok"
    assert "every file is as exported" in str(found["model"]["message"])
    assert found["room"]["level"] == "ok"
    assert found["room"]["facts"]["most_slots"] >= 16  # type: ignore[index]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a node on a busy machine takes to say who it is."""
    monkeypatch.setattr("cascadia_p2p.doctor.examine._ASK_S", 20.0)


def ports_of(
    capsys: pytest.CaptureFixture[str], port: int, client: int, fleet: str = "examined-here"
) -> tuple[object, str]:
    """Level and message of `ports` here, and the advice."""
    flags = ("--no-mdns", "--port", str(port), "--client-port", str(client), "--fleet", fleet)
    found = findings(run(capsys, *HERE, *NETWORK, *flags, "--json")[1])["ports"]
    return found["level"], f"{found['message']} -> {found['advice']}"


@pytest.mark.usefixtures("patient")
def test_a_head_is_recognised_on_its_client_port_whatever_its_control_port(
    living_node: LocalRing, capsys: pytest.CaptureFixture[str]
) -> None:
    (head,) = asyncio.run(ask_node(living_node.nodes[0].control))["nodes"]  # type: ignore[misc, union-attr]
    client = Endpoint.parse(str(head["client"])).port  # type: ignore[index, call-overload]
    for port in (0, free_ports()):
        level, words = ports_of(capsys, port, client, living_node.fleet)
        assert level == "ok", words
        assert (
            f"client port {client} by the head of fleet '{living_node.fleet}' (version {__version__})"
            in words
        )
        assert "end that program" not in words
    level, words = ports_of(capsys, 0, client)
    assert level == "fail", words
    assert f"by the head of fleet '{living_node.fleet}' (version {__version__}), and this PC" in words


def test_a_node_whose_pair_of_ports_overlaps_is_recognised(
    living_node: LocalRing, capsys: pytest.CaptureFixture[str]
) -> None:
    port = living_node.nodes[0].port
    for wanted, words in ((port - 1, f"data port {port}"), (port + 1, f"control port {port + 1}")):
        level, said = ports_of(capsys, wanted, free_ports(), living_node.fleet)
        assert level == "ok", said
        assert f"{words} by a node of fleet '{living_node.fleet}'" in said
        assert "a second node on this PC needs --port" in said


def test_what_is_no_node_of_ours_stays_in_the_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cascadia_p2p.doctor.examine._ASK_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = silent.getsockname()[1]
        level, words = ports_of(capsys, free_ports(), client)
        assert level == "fail"
        assert f"client port {client} on 127.0.0.1 is in use" in words
        assert "end that program" in words
        level, words = ports_of(capsys, client, free_ports())
        assert level == "fail"
        assert f"control port {client} on 127.0.0.1 is in use" in words


def test_a_damaged_model_and_one_that_does_not_fit_fail(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*HERE, "--only", "model", "--state-dir", str(tmp_path / "state"))
    with monkeypatch.context() as little:
        little.setattr("cascadia_p2p.doctor.model.available_memory", lambda: 300 * 2**20)
        code, out, _ = run(capsys, *flags, "--model", str(exported), "--slots", "1000", "--json")
    assert code == 1
    assert "shard 0: this shard needs" in str(findings(out)["room"]["message"])
    assert "it would fit with --slots" in str(findings(out)["room"]["message"])
    weights = next((exported / "shard-00").glob("layer-*.weights"))
    copy = tmp_path / "model"
    copy.mkdir()
    for path in (exported / "shard-00").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    raw = bytearray(weights.read_bytes())
    raw[100] ^= 1
    (copy / weights.name).write_bytes(raw)
    code, out, _ = run(capsys, *flags, "--model", str(copy), "--json")
    assert code == 1
    assert "is damaged or of another model" in str(findings(out)["model"]["message"])
    code, out, _ = run(capsys, *flags, "--model", str(copy), "--quick", "--json")
    assert code == 0
    assert "contents not read" in str(findings(out)["model"]["message"])


def test_no_model_there_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *HERE, "--only", "model", "--model", str(tmp_path), "--json")
    assert code == 1
    assert "holds no manifest.json" in str(findings(out)["model"]["message"])


def test_a_bind_that_is_not_here_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--bind", "203.0.113.7", *NETWORK, "--json")
    assert code == 1
    assert findings(out)["interface"]["level"] == "fail"


def test_rpc_15_doctor_takes_the_flags_of_join() -> None:
    commands = argparse.ArgumentParser(), argparse.ArgumentParser()
    for command, parser in zip((join, doctor), commands, strict=True):
        command.configure(parser)
    joins, doctors = (
        {flag for each in parser._actions for flag in each.option_strings} for parser in commands
    )
    assert joins - doctors <= {"--while-stdin-open"}


def test_every_line_is_explained_in_the_docs() -> None:
    root = Path(__file__).parents[2]
    names: set[str] = set()
    for path in (root / "cascadia_p2p" / "doctor").glob("*.py"):
        names |= set(re.findall(r'(?:Finding|_failed)\(\s*"([a-z_]+)"', path.read_text(encoding="utf-8")))
    table = (root / "docs" / "doctor.md").read_text(encoding="utf-8").partition("| line | what |")[2]
    explained = {
        name for row in table.splitlines() for name in row.split("|")[1:2] for name in name.split(", ")
    }
    assert len(names) > 20
    assert names <= {name.strip() for name in explained}
