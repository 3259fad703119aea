"""Targets that read what comes over a socket: frames, messages, mDNS records, HTTP requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson

from cascadia_p2p.discovery.txt import Announcement, decode_txt, encode_txt
from cascadia_p2p.errors import RequestError, WireError
from cascadia_p2p.keys.clients import ClientList
from cascadia_p2p.node.scrapes import MAX_HEAD_BYTES, answer
from cascadia_p2p.transport.curve import KeyPair
from cascadia_p2p.types import Epoch, Instance, NodeId
from cascadia_p2p.wire.control import OtherVersion
from cascadia_p2p.wire.frames import (
    FLOAT32,
    HEADER,
    MAGIC,
    OPERATION,
    PROTOCOL,
    RECORD,
    SEGMENT,
    Frame,
    FrameError,
    FrameKind,
    FrameLimits,
    OperationKind,
    SegmentFlag,
    alternative_table,
    decode_header,
    encode_header,
    operation_table,
    record_table,
    segment_table,
)
from cascadia_p2p.wire.messages import decode_control, decode_reply, decode_request, encode
from cascadia_p2p.wire.work import WorkReport, read_work
from fuzzing.messages import control_messages, replies, requests
from fuzzing.target import Target, promise

LIMITS: Final = FrameLimits(hidden=8, rows=64, segments=16, operations=32, records=16)
EPOCH: Final = Epoch(5, Instance("0123456789abcdef"))
FLEET: Final = KeyPair.of(b"JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6")


def sample_frames() -> list[Frame]:
    """One frame of each kind, with something in each of its tables."""
    segments = segment_table(2)
    segments[0] = (7, 3, 40, 1, SegmentFlag.WANT_TOKEN, 0, 0)
    segments[1] = (9, 1, 0, 4, 0, 4, 7)
    operations = operation_table(6)
    operations[0] = (9, 77, 0, 1, 0, 40, 0.5, 0.75, OperationKind.START, 5)
    operations[1] = (9, 0, 64, 1, 6, 0, 0, 0, OperationKind.ATTACH, 0)
    operations[2] = (7, 0, 40, 3, 0, 0, 0, 0, OperationKind.REWIND, 0)
    operations[3] = (7, 0, 128, 3, 7, 0, 0, 0, OperationKind.KEEP, 0)
    operations[4] = (0, 0, 0, 0, 8, 0, 0, 0, OperationKind.EVICT, 0)
    operations[5] = (7, 0, 0, 3, 0, 0, 0, 0, OperationKind.RELEASE, 0)
    records = record_table(2)
    records[0] = (9, 1, 41, 7, -0.5, 0, 0, 0)
    records[1] = (10, 2, 3, 17, -0.5, 0, 0, 2)
    alternatives = alternative_table(2)
    alternatives[0], alternatives[1] = (17, -0.5), (4, -2.0)
    return [
        Frame(FrameKind.ACTIVATIONS, EPOCH, 77, LIMITS.hidden, segments, operations),
        Frame(FrameKind.TOKENS, EPOCH, 77, records=records, alternatives=alternatives),
        Frame(FrameKind.PROBE, EPOCH, 3),
    ]


def read_frame(data: bytes) -> Frame:
    """Decode a header part; what comes out must be no larger than what went in, and the same bytes again."""
    frame = decode_header(data, LIMITS)
    tables = (frame.segments, frame.operations, frame.records, frame.alternatives)
    promise(sum(table.nbytes for table in tables) <= len(data), "tables are larger than the message")
    promise(frame.rows <= LIMITS.rows, "more rows than the limit")
    promise(encode_header(frame) == data, "the frame is not the bytes that it came from")
    return frame


def _table(kind: FrameKind, itemsize: int, place: int) -> Callable[[bytes], Frame]:
    """A frame with this table's bytes and counts that fit them."""

    def run(data: bytes) -> Frame:
        count = min(len(data) // itemsize, 64)
        counts = [0, 0, 0]
        counts[place] = count
        table = data[: count * itemsize]
        rows = 0
        if place == 0:
            rows = sum(
                int.from_bytes(table[at + 16 : at + 20], "little") for at in range(0, len(table), itemsize)
            )
        elif place == 2:
            table = data
        shape = (LIMITS.hidden, FLOAT32) if kind is FrameKind.ACTIVATIONS else (0, 0)
        fields = (MAGIC, PROTOCOL, kind, 5, 6, 7, min(rows, 2**32 - 1), shape[0], *counts, shape[1], 0)
        return read_frame(HEADER.pack(*fields) + table)

    return run


def _tables(place: int) -> list[bytes]:
    frame = sample_frames()[1 if place == 2 else 0]
    table = (frame.segments, frame.operations, frame.records)[place].tobytes()
    return [table, table + frame.alternatives.tobytes(), table[:48]]


def _control(data: bytes) -> None:
    message = decode_control(data)
    if not isinstance(message, OtherVersion):
        promise(decode_control(encode(message)) == message, "a control message does not come back the same")


def _request(data: bytes) -> None:
    request = decode_request(data)
    promise(decode_request(encode(request)) == request, "a request does not come back the same")


def _reply(data: bytes) -> None:
    reply = decode_reply(data)
    promise(decode_reply(encode(reply)) == reply, "a reply does not come back the same")


def _clients(data: bytes) -> None:
    """A list as it is, and the same with a seal of the fleet's: its holder may be broken too."""
    try:
        ClientList.open(data, FLEET)
    except WireError:
        raw = orjson.loads(data) if data[:1] == b"{" and _is_json(data) else None
        if not isinstance(raw, dict):
            raise
        body = orjson.dumps({"clients": raw.get("clients"), "mac": "0" * 64})
        clients = ClientList.open(body, FLEET)
    else:
        clients = ClientList.open(data, FLEET)
    promise(ClientList.open(clients.seal(FLEET), FLEET) == clients, "a list does not come back the same")


def _is_json(data: bytes) -> bool:
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return True


def _sealed() -> list[bytes]:
    clients = ClientList().issue("alice", KeyPair.new().public).issue("bob", KeyPair.new().public)
    return [ClientList().seal(FLEET), clients.seal(FLEET), clients.revoke("bob").seal(FLEET)]


def _txt(data: bytes) -> None:
    """Pairs as a TXT record holds them, each behind its length."""
    properties: dict[bytes, bytes | None] = {}
    at = 0
    while at < len(data):
        pair = data[at + 1 : at + 1 + data[at]]
        at += 1 + data[at]
        key, equals, value = pair.partition(b"=")
        properties.setdefault(key, value if equals else None)
    announcement = decode_txt(properties, PROTOCOL)
    again = {key.encode(): value.encode() for key, value in encode_txt(announcement).items()}
    promise(decode_txt(again, PROTOCOL) == announcement, "an announcement does not come back the same")


def _announced() -> list[bytes]:
    first = Announcement(
        *(PROTOCOL, "office", NodeId("0" * 16), Instance("1" * 16), "ab" * 32, 3, 11, 7600, 7601, 7700, True)
    )
    pairs = [f"{key}={value}".encode() for key, value in encode_txt(first).items()]
    return [b"".join(bytes([len(pair)]) + pair for pair in pairs)]


class _Scrapes:
    """Reads requests as the metrics' server does, in an event loop of its own."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, data: bytes) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        reader = asyncio.StreamReader(MAX_HEAD_BYTES, self._loop)
        reader.feed_data(data)
        reader.feed_eof()
        said = self._loop.run_until_complete(answer(reader, lambda: b"text\n"))
        promise(said.startswith(b"HTTP/1.1 ") and len(said) < 1024, "an answer that is none")


def _work(data: bytes) -> None:
    report = read_work(orjson.loads(data) if _is_json(data) else None)
    if report is not None:
        promise(read_work(report.model_dump(mode="json")) == report, "a report does not come back the same")
        _ = (report.frame_ms(), report.row_ms(), report.shares())


def _encoded(messages: Callable[[], Sequence[Any]]) -> Callable[[], list[bytes]]:
    return lambda: [encode(message) for message in messages()]


TARGETS: Final = (
    Target("frame", read_frame, lambda: [encode_header(each) for each in sample_frames()], (FrameError,)),
    Target("segments", _table(FrameKind.ACTIVATIONS, SEGMENT.itemsize, 0), lambda: _tables(0), (FrameError,)),
    Target(
        "operations", _table(FrameKind.ACTIVATIONS, OPERATION.itemsize, 1), lambda: _tables(1), (FrameError,)
    ),
    Target("records", _table(FrameKind.TOKENS, RECORD.itemsize, 2), lambda: _tables(2), (FrameError,)),
    Target("control", _control, _encoded(control_messages), (WireError,)),
    Target("request", _request, _encoded(requests), (RequestError,)),
    Target("reply", _reply, _encoded(replies), (WireError,)),
    Target("clients", _clients, _sealed, (WireError,)),
    Target("txt", _txt, _announced, (WireError,)),
    Target(
        "scrape",
        _Scrapes(),
        lambda: [b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"HEAD /metrics?a=b HTTP/1.0\r\n\r\n"],
        (asyncio.IncompleteReadError,),
    ),
    Target(
        "work",
        _work,
        lambda: [
            WorkReport(seconds={"attention": 0.5, "dense": 1.0}, frames=3, rows=9).model_dump_json().encode()
        ],
        (),
    ),
)
