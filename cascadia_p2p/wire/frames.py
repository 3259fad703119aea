"""The data frame: a fixed little-endian header, packed tables, and FP32 rows in a part of their own.

A frame is a ZeroMQ message of one part (header) or two (header, payload). The header part is:

    offset  size  field
         0     4  magic, b"CP2P"
         4     2  protocol version
         6     2  kind (FrameKind)
         8     8  epoch: counter
        16     8  epoch: instance of the head
        24     8  frame number (for a probe: the probe's id)
        32     4  rows
        36     4  hidden, values a row; 0 where the kind has no rows
        40     4  segments
        44     4  operations
        48     4  records
        52     2  dtype of the payload (1 = float32); 0 where the kind has no rows
        54     2  reserved, 0
        56        segments x 32 bytes, operations x 48 bytes, records x 32 bytes,
                  alternatives x 8 bytes, as many as the records count together

The payload part exists exactly when rows > 0 and holds rows x hidden float32 in C order.
Any change of these bytes needs a new PROTOCOL.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag, StrEnum
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cascadia_p2p.errors import WireError
from cascadia_p2p.types import MAX_TEMPERATURE, Epoch, Instance

PROTOCOL: Final = 2
"""Version of every byte that crosses the network: data frames, control messages and client messages."""

MAGIC: Final = b"CP2P"

MAX_ALTERNATIVES: Final = 20
"""Likeliest tokens that a record can name beside its own, at most."""

Table: TypeAlias = npt.NDArray[np.void]
"""A structured array of dtype SEGMENT, OPERATION, RECORD or ALTERNATIVE."""

Rows: TypeAlias = npt.NDArray[np.float32]
"""C-contiguous float32 [rows, hidden]."""

Buffer: TypeAlias = bytes | bytearray | memoryview


class FrameKind(IntEnum):
    """What a frame is for."""

    ACTIVATIONS = 1
    TOKENS = 2
    PROBE = 3


class SegmentFlag(IntFlag):
    """What a segment asks for."""

    WANT_TOKEN = 1
    """The segment's last row asks the tail for the next token."""


class SegmentError(IntEnum):
    """Why a stage could not compute a segment; such a segment still goes on round the ring."""

    NONE = 0
    UNKNOWN_STREAM = 1
    POSITION = 2
    CONTEXT = 3
    NON_FINITE = 4
    INTERNAL = 5
    ROOM = 6
    """No block is free for the stream's next position."""
    PREFIX = 7
    """The stream was to take over a prefix that is not kept here."""


class OperationKind(IntEnum):
    """What happens to a slot, or to a kept prefix, before a frame's segments are computed."""

    START = 1
    """A stream takes the slot, with its sampling options; it holds no position."""
    REWIND = 2
    """The stream goes back to `position`."""
    RELEASE = 3
    """The slot is free."""
    ATTACH = 4
    """A stream that holds nothing takes over the first `position` positions that `entry` keeps."""
    KEEP = 5
    """The stream's first `position` positions, all that it holds, are kept as `entry`, whatever that was."""
    EVICT = 6
    """`entry` keeps nothing any more; streams that took it over are not touched."""


class FrameFault(StrEnum):
    """Why bytes are not a frame for us; the name under which they are counted."""

    FOREIGN = "foreign"
    VERSION = "version"
    KIND = "kind"
    LENGTH = "length"
    LIMIT = "limit"
    HIDDEN = "hidden"
    FORM = "form"
    TABLE = "table"


class FrameError(WireError):
    """Bytes that are not a valid frame within the limits.

    Args:
        fault: the kind of fault, for counting.
        message: the sentence that names what was found and what was expected.
    """

    def __init__(self, fault: FrameFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


SEGMENT: Final = np.dtype(
    {
        "names": ["stream", "slot", "start", "rows", "flags", "error", "stage"],
        "formats": ["<u8", "<u4", "<u4", "<u4", "<u2", "<u2", "<u2"],
        "offsets": [0, 8, 12, 16, 20, 22, 24],
        "itemsize": 32,
    }
)
"""Consecutive rows of one stream: positions start to start + rows - 1. `stage` is where `error` arose."""

OPERATION: Final = np.dtype(
    {
        "names": [
            "stream",
            "seed",
            "position",
            "slot",
            "entry",
            "top_k",
            "temperature",
            "top_p",
            "kind",
            "logprobs",
        ],
        "formats": ["<u8", "<u8", "<u4", "<u4", "<u4", "<u4", "<f4", "<f4", "<u2", "<u2"],
        "offsets": [0, 8, 16, 20, 24, 28, 32, 36, 40, 42],
        "itemsize": 48,
    }
)
"""A change of a slot or of a kept prefix, applied in order before the segments; what a kind lacks is 0.

`position` is for rewind, attach and keep, `entry` for attach, keep and evict. Seed, top_k, temperature, top_p
(see `types.Sampling`) and `logprobs`, alternatives that each record of the stream shall name, are for start.
"""

RECORD: Final = np.dtype(
    {
        "names": ["stream", "slot", "position", "token", "logprob", "status", "stage", "alternatives"],
        "formats": ["<u8", "<u4", "<u4", "<i4", "<f4", "<u2", "<u2", "<u2"],
        "offsets": [0, 8, 12, 16, 20, 24, 26, 28],
        "itemsize": 32,
    }
)
"""A new token and the position it takes, or why there is none (`status`, a SegmentError, at `stage`).

`logprob` is the natural logarithm of the token's probability at temperature 1, before any cut. The record's
`alternatives` stand in the table of that name behind those of the records before it.
"""

ALTERNATIVE: Final = np.dtype(
    {"names": ["token", "logprob"], "formats": ["<i4", "<f4"], "offsets": [0, 4], "itemsize": 8}
)
"""One of the likeliest tokens at a record's position, the likeliest first."""

HEADER: Final = struct.Struct("<4sHHQQQIIIIIHH")
FLOAT32: Final = 1

_SEGMENT = struct.Struct("<QIIIHHH6x")
_OPERATION = struct.Struct("<QQIIIIffHH4x")
_RECORD = struct.Struct("<QIIifHHH2x")
_KNOWN_FLAGS: Final = int(SegmentFlag.WANT_TOKEN)
_LAST_ERROR: Final = int(max(SegmentError))
# Reading a member off its class is a function call in Python 3.11; every frame needs these.
_ACTIVATIONS: Final = FrameKind.ACTIVATIONS
_PROBE: Final = FrameKind.PROBE
_LAST_KIND: Final = int(max(OperationKind))
_START: Final = int(OperationKind.START)
_WITH_POSITION: Final = frozenset(map(int, (OperationKind.REWIND, OperationKind.ATTACH, OperationKind.KEEP)))
_WITH_ENTRY: Final = frozenset(map(int, (OperationKind.ATTACH, OperationKind.KEEP, OperationKind.EVICT)))


def segment_table(count: int = 0) -> Table:
    """A zeroed table of `count` segments."""
    return np.zeros(count, SEGMENT)


def operation_table(count: int = 0) -> Table:
    """A zeroed table of `count` operations."""
    return np.zeros(count, OPERATION)


def record_table(count: int = 0) -> Table:
    """A zeroed table of `count` records."""
    return np.zeros(count, RECORD)


def alternative_table(count: int = 0) -> Table:
    """A zeroed table of `count` alternatives."""
    return np.zeros(count, ALTERNATIVE)


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What a receiver takes: exactly `hidden` values a row, and at most so many of everything else."""

    hidden: int
    rows: int
    segments: int
    operations: int
    records: int

    @property
    def payload_bytes(self) -> int:
        """Size of the largest payload part."""
        return self.rows * self.hidden * 4


@dataclass(slots=True, eq=False)
class Frame:
    """One message of the data plane.

    Args:
        kind: decides which of the tables may hold anything.
        epoch: the formation of the ring that it belongs to.
        number: counts a head's ACTIVATIONS frames within the epoch; a TOKENS frame repeats the number
            that it answers; a PROBE carries its id.
        hidden: values a row; 0 for TOKENS and PROBE.
        segments: SEGMENT table; ACTIVATIONS only.
        operations: OPERATION table; ACTIVATIONS only.
        records: RECORD table; TOKENS only.
        payload: float32 [rows, hidden], or None while it is not received or there are no rows.
        alternatives: ALTERNATIVE table, those of all records one after the other; TOKENS only.
    """

    kind: FrameKind
    epoch: Epoch
    number: int
    hidden: int = 0
    segments: Table = field(default_factory=segment_table)
    operations: Table = field(default_factory=operation_table)
    records: Table = field(default_factory=record_table)
    payload: Rows | None = None
    checked_rows: int | None = None
    """The row count, when the decoder has compared it with the segments."""
    alternatives: Table = field(default_factory=alternative_table)

    @property
    def rows(self) -> int:
        """Rows that the segments speak of, which is the payload's row count."""
        if self.checked_rows is not None:
            return self.checked_rows
        return sum(self.segments["rows"].tolist())


def encode_header(frame: Frame) -> bytes:
    """The header part of a frame; the payload part is the array itself.

    Raises:
        ValueError: a field does not fit its width, or a table has another dtype (our own mistake).
    """
    segments, operations, records = frame.segments, frame.operations, frame.records
    tables = (segments, operations, records, frame.alternatives)
    if any(table.dtype != dtype for table, dtype in zip(tables, _DTYPES, strict=True)):
        raise ValueError("a frame's tables must have the dtypes SEGMENT, OPERATION, RECORD and ALTERNATIVE")
    activations = frame.kind is _ACTIVATIONS
    try:
        head = HEADER.pack(
            MAGIC,
            PROTOCOL,
            frame.kind,
            frame.epoch.counter,
            int(frame.epoch.head, 16),
            frame.number,
            frame.rows,
            frame.hidden if activations else 0,
            len(segments),
            len(operations),
            len(records),
            FLOAT32 if activations else 0,
            0,
        )
    except struct.error as error:
        raise ValueError(f"a frame's field does not fit the header: {error}") from error
    return head + b"".join([table.tobytes() for table in tables if len(table)])


def decode_header(buffer: Buffer, limits: FrameLimits) -> Frame:
    """Read a header part; the tables are views of `buffer`, writable when it is, and the payload is None.

    Nothing is allocated in proportion to a number that the bytes claim: the counts are checked against the
    limits and against the length of the buffer first.

    Raises:
        FrameError: the bytes are anything else than a valid header within the limits.
    """
    size = len(buffer)
    if size < HEADER.size:
        raise FrameError(
            FrameFault.LENGTH, f"a frame header has {size} bytes: expected {HEADER.size} or more"
        )
    fields = HEADER.unpack_from(buffer)
    _, _, code, counter, head, number, rows, hidden, n_segments, n_operations, n_records, dtype, _ = fields
    kind = _KINDS.get(code)
    if kind is None or fields[0] != MAGIC or fields[1] != PROTOCOL or fields[12]:
        raise _foreign(fields)
    if (
        rows > limits.rows
        or n_segments > limits.segments
        or n_operations > limits.operations
        or n_records > limits.records
    ):
        raise _beyond(limits, fields)
    operations_at = HEADER.size + n_segments * SEGMENT.itemsize
    records_at = operations_at + n_operations * OPERATION.itemsize
    alternatives_at = records_at + n_records * RECORD.itemsize
    if size < alternatives_at or (size > alternatives_at and not n_records):
        raise FrameError(FrameFault.LENGTH, f"the frame header has {size} bytes, which its counts contradict")
    if kind is not _ACTIVATIONS or hidden != limits.hidden or dtype != FLOAT32 or n_records:
        _check_form(kind, limits, fields)
    segments, operations, records = _NO_SEGMENTS, _NO_OPERATIONS, _NO_RECORDS
    alternatives = _NO_ALTERNATIVES
    if n_segments or rows:
        _check_segments(buffer, operations_at, rows)
        segments = np.frombuffer(buffer, SEGMENT, n_segments, HEADER.size)
    if n_operations:
        _check_operations(buffer, operations_at, records_at)
        operations = np.frombuffer(buffer, OPERATION, n_operations, operations_at)
    if n_records:
        n_alternatives = _check_records(buffer, records_at, alternatives_at, size)
        records = np.frombuffer(buffer, RECORD, n_records, records_at)
        if n_alternatives:
            alternatives = np.frombuffer(buffer, ALTERNATIVE, n_alternatives, alternatives_at)
    epoch = _epoch(counter, head)
    return Frame(kind, epoch, number, hidden, segments, operations, records, None, rows, alternatives)


_KINDS: Final = {int(kind): kind for kind in FrameKind}
_NO_SEGMENTS: Final = segment_table()
_NO_OPERATIONS: Final = operation_table()
_NO_RECORDS: Final = record_table()
_NO_ALTERNATIVES: Final = alternative_table()
_DTYPES: Final = (SEGMENT, OPERATION, RECORD, ALTERNATIVE)

_Fields: TypeAlias = tuple[bytes, int, int, int, int, int, int, int, int, int, int, int, int]


@lru_cache(maxsize=64)
def _epoch(counter: int, head: int) -> Epoch:
    return Epoch(counter, Instance(f"{head:016x}"))


def _foreign(fields: _Fields) -> FrameError:
    """Why the first fields are not those of a frame of this protocol."""
    magic, version, code, reserved = fields[0], fields[1], fields[2], fields[12]
    if magic != MAGIC:
        return FrameError(FrameFault.FOREIGN, "the bytes are not a data frame: the first four are not 'CP2P'")
    if version != PROTOCOL:
        return FrameError(
            FrameFault.VERSION,
            f"the frame speaks protocol {version}, this node {PROTOCOL}: update the older node",
        )
    return FrameError(
        FrameFault.KIND, f"the frame has kind {code} (reserved {reserved}), unknown to protocol {version}"
    )


def _beyond(limits: FrameLimits, fields: _Fields) -> FrameError:
    """Which counts are beyond the limits."""
    rows, segments, operations, records = fields[6], *fields[8:11]
    return FrameError(
        FrameFault.LIMIT,
        f"the frame claims {rows} rows, {segments} segments, {operations} operations, {records} records: "
        f"at most {limits.rows}, {limits.segments}, {limits.operations}, {limits.records} are taken here",
    )


def _check_form(kind: FrameKind, limits: FrameLimits, fields: _Fields) -> None:
    """Refuse a header whose fields do not suit its kind."""
    rows, hidden, segments, operations, records, dtype = fields[6:12]
    if kind is _ACTIVATIONS:
        if hidden != limits.hidden:
            raise FrameError(
                FrameFault.HIDDEN, f"the frame has rows of {hidden} values: expected {limits.hidden}"
            )
        if dtype != FLOAT32:
            raise FrameError(
                FrameFault.FORM, f"the frame's payload has dtype code {dtype}: expected {FLOAT32} (float32)"
            )
        if records:
            raise FrameError(FrameFault.FORM, "an activation frame carries token records")
    elif rows or hidden or dtype or segments or operations or (records and kind is _PROBE):
        raise FrameError(FrameFault.FORM, f"a {kind.name.lower()} frame carries what its kind does not have")


def _check_segments(buffer: Buffer, end: int, rows: int) -> None:
    """Refuse segments with unknown codes, or that contradict the row count."""
    total = 0
    for at in range(HEADER.size, end, SEGMENT.itemsize):
        _, _, start, count, flags, error, _ = _SEGMENT.unpack_from(buffer, at)
        if not count or start + count > 0xFFFFFFFF or flags & ~_KNOWN_FLAGS or error > _LAST_ERROR:
            raise FrameError(
                FrameFault.TABLE,
                f"a segment has start {start}, rows {count}, flags {flags}, error {error}: not valid",
            )
        total += count
    if total != rows:
        raise FrameError(FrameFault.TABLE, f"the frame claims {rows} rows, its segments {total}")


def _check_operations(buffer: Buffer, at: int, end: int) -> None:
    """Refuse operations of unknown kinds, and with values that their kind does not have or can not mean."""
    for offset in range(at, end, OPERATION.itemsize):
        fields = _OPERATION.unpack_from(buffer, offset)
        _, seed, position, _, entry, top_k, temperature, top_p, kind, logprobs = fields
        if kind == _START:
            # Comparisons with numbers that are none are false.
            right = 0.0 <= temperature <= MAX_TEMPERATURE and 0.0 <= top_p <= 1.0
            right = right and logprobs <= MAX_ALTERNATIVES
        else:
            right = 1 <= kind <= _LAST_KIND and not (seed or top_k or temperature or top_p or logprobs)
        if (position and kind not in _WITH_POSITION) or (entry and kind not in _WITH_ENTRY) or not right:
            raise FrameError(
                FrameFault.TABLE,
                f"an operation has kind {kind}, position {position}, entry {entry}, temperature "
                f"{temperature}, top_p {top_p}, {logprobs} alternatives: not valid",
            )


def _check_records(buffer: Buffer, at: int, end: int, size: int) -> int:
    """How many alternatives follow; refuses unknown statuses and a length that the records contradict."""
    total = 0
    for offset in range(at, end, RECORD.itemsize):
        *_, status, _, alternatives = _RECORD.unpack_from(buffer, offset)
        if status > _LAST_ERROR or alternatives > MAX_ALTERNATIVES:
            raise FrameError(
                FrameFault.TABLE, f"a token record has status {status} and {alternatives} alternatives"
            )
        total += alternatives
    if size != end + total * ALTERNATIVE.itemsize:
        raise FrameError(
            FrameFault.LENGTH, f"the frame header has {size} bytes, which its records contradict"
        )
    return total
