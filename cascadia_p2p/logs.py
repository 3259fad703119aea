"""Log set-up: short sentences on a terminal, one JSON object a line elsewhere, always to standard error.

Event names are stable snake_case for programs; `message=` holds the sentence that people read on a terminal.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TextIO

import orjson
import structlog
from structlog.typing import EventDict, WrappedLogger

__all__ = ["Gate", "configure_logs", "lines_left_out", "name_node"]

MOST_KEYS: Final = 512
"""Kinds of lines, and peers that they speak of, whose rates are known at a time."""

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_COLOURS = {"warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m", "debug": "\x1b[2m"}
_DIM, _RESET = "\x1b[2m", "\x1b[0m"
_LONGEST = 1000
_named: dict[str, str] = {}
"""What every line of JSON says of the process that it comes from."""


@dataclass(frozen=True, slots=True)
class Rate:
    """So many lines at once, and from then on one every so many seconds."""

    burst: int
    every_s: float


OF_A_KIND: Final = Rate(100, 2.0)
OF_A_PEER: Final = Rate(10, 30.0)
"""Warnings and errors of one kind that name one peer, or one library."""

_WHO: Final = ("peer", "source", "library")


@dataclass(slots=True)
class _Bucket:
    """What one key may still say."""

    tokens: float
    at: float
    left_out: int = 0


class Gate:
    """Keeps whoever sends garbage from filling a disk: every kind of line has a rate, and so has every peer.

    A processor of structlog; usable from any thread. What it leaves out is counted, and the next line of the
    kind says how many there were (`left_out`).

    Args:
        clock: seconds of a steady clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()
        self._lock = threading.Lock()
        self.left_out = 0
        """Lines left out so far."""

    def __len__(self) -> int:
        return len(self._buckets)

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> EventDict:
        """The line; raises DropEvent for one too many."""
        if event.get("level") == "debug":
            return event
        name = str(event.get("event"))
        who = next((str(event[each]) for each in _WHO if each in event), "")
        grave = event.get("level") in ("warning", "error", "critical")
        with self._lock:
            # The peer's bucket first: a loud one must not use up what others may say.
            if who and grave and not self._passes((name, who), OF_A_PEER):
                raise structlog.DropEvent
            if not self._passes((name, ""), OF_A_KIND):
                raise structlog.DropEvent
            left_out = self._told((name, "")) + (self._told((name, who)) if who and grave else 0)
        if left_out:
            event["left_out"] = left_out
        return event

    def _passes(self, key: tuple[str, str], rate: Rate) -> bool:
        now = self._clock()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(rate.burst, now)
            if len(self._buckets) > MOST_KEYS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        bucket.tokens = min(rate.burst, bucket.tokens + (now - bucket.at) / rate.every_s)
        bucket.at = now
        if bucket.tokens < 1.0:
            bucket.left_out += 1
            self.left_out += 1
            return False
        bucket.tokens -= 1.0
        return True

    def _told(self, key: tuple[str, str]) -> int:
        bucket = self._buckets.get(key)
        if bucket is None:
            return 0
        count, bucket.left_out = bucket.left_out, 0
        return count


_gate = Gate()


def lines_left_out() -> int:
    """Lines that this process has not written because there were too many of their kind."""
    return _gate.left_out


def configure_logs(
    log_format: Literal["console", "json"] | None = None,
    level: Literal["debug", "info", "warning", "error"] = "info",
    stream: TextIO | None = None,
) -> None:
    """Set up structlog, and lead the standard library's warnings into it.

    Args:
        log_format: None means console when `stream` is a terminal, JSON otherwise.
        level: the least severity shown.
        stream: where to write; standard error unless given.
    """
    stream = stream or sys.stderr
    terminal = stream.isatty()
    render: _Console | _Json
    if (log_format or ("console" if terminal else "json")) == "console":
        render, when = _Console(colour=terminal and sys.platform != "win32"), "%H:%M:%S"
    else:
        render, when = _Json(), "iso"
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _gate,
            structlog.processors.TimeStamper(fmt=when, utc=when == "iso"),
            _exceptions,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=_Factory(stream),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    if not any(isinstance(handler, _Forward) for handler in root.handlers):
        root.addHandler(_Forward(logging.WARNING))


def name_node(node: str) -> None:
    """Let every line of JSON from now on, of any thread, say that this process is node `node`."""
    # Variables of a context would not reach the threads, which are started in contexts of their own.
    _named["node"] = node


class _Writer:
    """The end of the chain: writes one line, and never raises for a stream that is closed or full."""

    def __init__(self, stream: TextIO, lock: threading.Lock) -> None:
        self._stream = stream
        self._lock = lock

    def msg(self, line: str) -> None:
        with self._lock:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                pass

    debug = info = warning = error = critical = msg


class _Factory:
    def __init__(self, stream: TextIO) -> None:
        self._writer = _Writer(stream, threading.Lock())

    def __call__(self, *names: str) -> _Writer:
        return self._writer


class _Forward(logging.Handler):
    """Leads records of libraries that use the standard library's logging into ours."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno, "library_message", message=record.getMessage(), library=record.name
        )


def _exceptions(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    given = event.pop("exc_info", None)
    error = sys.exc_info()[1] if given is True else given
    if isinstance(error, BaseException):
        event["error"] = f"{type(error).__name__}: {error}"
        event["trace"] = "".join(traceback.format_exception(error))
    return event


class _Json:
    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> str:
        ordered = {key: event.pop(key) for key in ("timestamp", "level", "event", "message") if key in event}
        ordered.update(_named)
        ordered.update(event)
        try:
            return orjson.dumps(ordered, default=str).decode()
        except TypeError:
            return orjson.dumps({key: str(value) for key, value in ordered.items()}).decode()


class _Console:
    def __init__(self, *, colour: bool) -> None:
        self._colour = colour

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> str:
        when, level = event.pop("timestamp"), event.pop("level")
        name, trace = str(event.pop("event")), event.pop("trace", None)
        sentence = _plain(event.pop("message", None) or name.replace("_", " "))
        if level != "info":
            sentence = f"{level}: {sentence}"
        line = f"{self._paint(when, _DIM)} {self._paint(sentence, _COLOURS.get(level, ''))}"
        if event:
            line += "  " + self._paint(_pairs(event), _DIM)
        if isinstance(trace, str):
            line = "\n".join([line, *map(_plain, trace.splitlines())])
        return line

    def _paint(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_RESET}" if self._colour and colour else text


def _pairs(event: Mapping[str, object]) -> str:
    return " ".join(f"{key}={_plain(value)}" for key, value in event.items())


def _plain(value: object) -> str:
    """Text without control characters: a name from the network must not steer the terminal."""
    text = str(value)
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + "..."
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
