from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import structlog

from cascadia_p2p.logs import (
    MOST_KEYS,
    OF_A_KIND,
    OF_A_PEER,
    Gate,
    configure_logs,
    lines_left_out,
    name_node,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers


def test_json_off_a_terminal() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    structlog.get_logger().info("ring_open", message="The ring is open.", epoch=3, where=object)
    line = orjson.loads(stream.getvalue())
    assert (line["event"], line["message"], line["epoch"], line["level"]) == (
        "ring_open",
        "The ring is open.",
        3,
        "info",
    )
    assert line["timestamp"].endswith("Z")
    assert line["where"] == "<class 'object'>"


def test_every_line_of_json_names_the_node_whatever_thread_it_is_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cascadia_p2p.logs._named", {})
    stream, terminal = io.StringIO(), Terminal()
    configure_logs(stream=stream)
    name_node("0123456789abcdef")
    structlog.get_logger().info("ring_open", epoch=3)
    thread = threading.Thread(target=lambda: structlog.get_logger().warning("hop_broken"))
    thread.start()
    thread.join()
    lines = [orjson.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line["node"]) for line in lines] == [
        ("ring_open", "0123456789abcdef"),
        ("hop_broken", "0123456789abcdef"),
    ]
    # There is one node at a terminal, and its sentences name it where that matters.
    configure_logs(stream=terminal)
    structlog.get_logger().info("ring_open", epoch=3)
    assert "0123456789abcdef" not in terminal.getvalue()


def test_terminal_shows_the_sentence_first() -> None:
    stream = Terminal()
    configure_logs(stream=stream)
    structlog.get_logger().warning("alone", message="Nobody is here.", heard=0)
    text = stream.getvalue()
    assert "warning: Nobody is here." in text
    assert "\x1b[33m" in text
    assert "alone" not in text
    assert "heard=0" in text


def test_forced_console_without_terminal_has_no_colour_and_level_filters() -> None:
    stream = io.StringIO()
    configure_logs("console", "warning", stream)
    log = structlog.get_logger()
    log.info("hidden")
    log.error("no_more_slots")
    assert "hidden" not in stream.getvalue()
    assert "error: no more slots" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_text_from_the_network_can_not_steer_the_terminal() -> None:
    stream = Terminal()
    configure_logs(stream=stream)
    structlog.get_logger().info("peer", name="a\x1b[2J\nb", long="x" * 5000)
    text = stream.getvalue()
    assert "\x1b[2J" not in text
    assert "a\\x1b[2J\\x0ab" in text
    assert text.count("\n") == 1
    assert len(text) < 1500


def test_exceptions_and_numbers_that_json_can_not_hold() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    try:
        raise ValueError("bad")
    except ValueError:
        structlog.get_logger().exception("failed", big=1 << 80)
    line = orjson.loads(stream.getvalue())
    assert line["error"] == "ValueError: bad"
    assert "Traceback" in line["trace"]
    assert line["big"] == str(1 << 80)


def test_closed_stream_is_no_error() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    stream.close()
    structlog.get_logger().info("anything")


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_rpc_03_a_log_that_finds_the_disk_full_ends_nothing() -> None:
    stream = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails, as all writing does
    configure_logs(stream=stream)
    for number in range(2000):
        structlog.get_logger().warning("ring_closed", message="x" * 100, number=number)
    with pytest.raises(OSError, match="No space left"):
        stream.close()


def test_library_warnings_come_through_once() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    configure_logs(stream=stream)
    logging.getLogger("zeroconf").warning("socket %s", "gone")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert orjson.loads(lines[0])["message"] == "socket gone"


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def passed(gate: Gate, count: int, **fields: str) -> list[dict[str, object]]:
    """Those of so many lines that pass."""
    found: list[dict[str, object]] = []
    for _ in range(count):
        with contextlib.suppress(structlog.DropEvent):
            found.append(dict(gate(None, "", {"level": "warning", "event": "refused", **fields})))
    return found


def test_a_peer_that_goes_on_and_on_is_told_of_now_and_then_with_a_count() -> None:
    clock = Clock()
    gate = Gate(clock)
    first = passed(gate, 1000, peer="a")
    assert len(first) == OF_A_PEER.burst
    assert not [line for line in first if "left_out" in line]
    clock.now += OF_A_PEER.every_s
    (again,) = passed(gate, 1000, peer="a")
    assert again["left_out"] == 990
    assert len(passed(gate, 5, peer="b")) == 5, "another one is not silenced by it"
    assert gate.left_out == 990 + 999


def test_no_number_of_peers_fills_the_log_or_the_memory() -> None:
    clock = Clock()
    gate = Gate(clock)
    lines = sum(len(passed(gate, 3, peer=str(number))) for number in range(3 * MOST_KEYS))
    assert lines == OF_A_KIND.burst
    assert len(gate) <= MOST_KEYS
    clock.now += 10 * OF_A_KIND.every_s
    more = passed(gate, 100)
    assert len(more) == 10
    assert more[0]["left_out"] > 3 * MOST_KEYS
    assert passed(gate, 1, event="ring_open") == [{"level": "warning", "event": "ring_open"}]


def test_the_gate_stands_before_every_line_and_what_was_left_out_is_counted() -> None:
    stream = io.StringIO()
    configure_logs("json", stream=stream)
    before = lines_left_out()
    for number in range(500):
        structlog.get_logger().warning("from_a_stranger", message=f"line {number}", peer="1.2.3.4")
        logging.getLogger("some.library").warning("packet %d", number)
    events = [orjson.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert events.count("from_a_stranger") == events.count("library_message") == OF_A_PEER.burst
    assert lines_left_out() - before == 2 * (500 - OF_A_PEER.burst)
