from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cascadia_p2p.types import Epoch, Instance
from cascadia_p2p.wire.frames import (
    HEADER,
    OPERATION,
    PROTOCOL,
    RECORD,
    SEGMENT,
    Frame,
    FrameError,
    FrameFault,
    FrameKind,
    FrameLimits,
    OperationKind,
    SegmentError,
    SegmentFlag,
    decode_header,
    encode_header,
    operation_table,
    record_table,
    segment_table,
)

LIMITS = FrameLimits(hidden=8, rows=64, segments=16, operations=16, records=16)
EPOCH = Epoch(5, Instance("0123456789abcdef"))


def activations() -> Frame:
    segments = segment_table(2)
    segments[0] = (0x1122334455667788, 3, 40, 1, SegmentFlag.WANT_TOKEN, SegmentError.NONE, 0)
    segments[1] = (9, 1, 0, 4, 0, SegmentError.NON_FINITE, 7)
    operations = operation_table(2)
    operations[0] = (9, 0, 1, OperationKind.START)
    operations[1] = (0x1122334455667788, 40, 3, OperationKind.REWIND)
    return Frame(FrameKind.ACTIVATIONS, EPOCH, 77, 8, segments, operations)


def tokens() -> Frame:
    records = record_table(1)
    records[0] = (9, 1, 41, -2, -0.5, SegmentError.NONE, 0)
    return Frame(FrameKind.TOKENS, EPOCH, 77, records=records)


GOLDEN = {
    "activations": (
        activations(),
        "43503250 0100 0100 0500000000000000 efcdab8967452301 4d00000000000000"
        "05000000 08000000 02000000 02000000 00000000 0100 0000"
        "8877665544332211 03000000 28000000 01000000 0100 0000 0000 000000000000"
        "0900000000000000 01000000 00000000 04000000 0000 0400 0700 000000000000"
        "0900000000000000 00000000 01000000 0100 000000000000"
        "8877665544332211 28000000 03000000 0200 000000000000",
    ),
    "tokens": (
        tokens(),
        "43503250 0100 0200 0500000000000000 efcdab8967452301 4d00000000000000"
        "00000000 00000000 00000000 00000000 01000000 0000 0000"
        "0900000000000000 01000000 29000000 feffffff 000000bf 0000 0000 00000000",
    ),
    "probe": (
        Frame(FrameKind.PROBE, EPOCH, 3),
        "43503250 0100 0300 0500000000000000 efcdab8967452301 0300000000000000"
        "00000000 00000000 00000000 00000000 00000000 0000 0000",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_rpc_05_golden_bytes(name: str) -> None:
    """Bytes of protocol 1. A failure here means: raise PROTOCOL, then write the new bytes down."""
    frame, golden = GOLDEN[name]
    assert PROTOCOL == 1
    assert encode_header(frame).hex() == golden.replace(" ", "")


def same(one: Frame, other: Frame) -> bool:
    return (
        (one.kind, one.epoch, one.number, one.hidden) == (other.kind, other.epoch, other.number, other.hidden)
        and bool((one.segments == other.segments).all())
        and bool((one.operations == other.operations).all())
        and one.records.tobytes() == other.records.tobytes()
    )


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frames_come_back(name: str) -> None:
    frame, _ = GOLDEN[name]
    assert same(decode_header(encode_header(frame), LIMITS), frame)


u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
errors = st.sampled_from([int(error) for error in SegmentError])
segment = st.tuples(u64, u32, st.integers(0, 2**31), st.integers(1, 4), st.sampled_from([0, 1]), errors, u16)
operation = st.tuples(u64, st.just(0), u32, st.sampled_from([1, 3])) | st.tuples(u64, u32, u32, st.just(2))
record = st.tuples(u64, u32, u32, st.integers(-(2**31), 2**31 - 1), st.floats(width=32), errors, u16)
epochs = st.builds(Epoch, u64, u64.map(lambda value: Instance(f"{value:016x}")))


@given(epochs, u64, st.lists(segment, max_size=16), st.lists(operation, max_size=16))
def test_activation_headers_survive_the_wire(
    epoch: Epoch, number: int, segments: list[tuple[int, ...]], operations: list[tuple[int, ...]]
) -> None:
    frame = Frame(
        FrameKind.ACTIVATIONS,
        epoch,
        number,
        8,
        np.array(segments, SEGMENT),
        np.array(operations, OPERATION),
    )
    again = decode_header(encode_header(frame), LIMITS)
    assert same(again, frame)
    assert again.rows == sum(entry[3] for entry in segments)


@given(epochs, u64, st.lists(record, max_size=16))
def test_token_headers_survive_the_wire(epoch: Epoch, number: int, records: list[tuple[int, ...]]) -> None:
    frame = Frame(FrameKind.TOKENS, epoch, number, records=np.array(records, RECORD))
    again = decode_header(encode_header(frame), LIMITS)
    for name in RECORD.names or ():
        assert np.array_equal(again.records[name], frame.records[name], equal_nan=name == "logprob")
    assert (again.epoch, again.number) == (epoch, number)


def test_tables_are_writable_where_the_buffer_is() -> None:
    raw = bytearray(encode_header(activations()))
    frame = decode_header(raw, LIMITS)
    frame.segments["error"][0] = SegmentError.INTERNAL
    assert decode_header(raw, LIMITS).segments["error"][0] == SegmentError.INTERNAL
    assert not decode_header(bytes(raw), LIMITS).segments.flags.writeable


def test_a_table_of_another_dtype_is_our_own_mistake() -> None:
    frame = Frame(FrameKind.ACTIVATIONS, EPOCH, 1, 8, operation_table(1))
    with pytest.raises(ValueError, match="dtype"):
        encode_header(frame)
    with pytest.raises(ValueError, match="fit"):
        encode_header(Frame(FrameKind.PROBE, EPOCH, -1))


def patched(frame: Frame, offset: int, value: bytes) -> bytes:
    raw = bytearray(encode_header(frame))
    raw[offset : offset + len(value)] = value
    return bytes(raw)


BIG = b"\xff\xff\xff\xff"
WRONG = [
    (b"", FrameFault.LENGTH),
    (b"CP2P", FrameFault.LENGTH),
    (b"GET / HTTP/1.1\r\nHost: somewhere\r\nUser-Agent: someone\r\n\r\n....", FrameFault.FOREIGN),
    (patched(activations(), 4, b"\x02\x00"), FrameFault.VERSION),
    (patched(activations(), 6, b"\x09\x00"), FrameFault.KIND),
    (patched(activations(), 54, b"\x01\x00"), FrameFault.KIND),
    (patched(activations(), 32, BIG), FrameFault.LIMIT),
    (patched(activations(), 40, BIG), FrameFault.LIMIT),
    (patched(activations(), 44, BIG), FrameFault.LIMIT),
    (patched(activations(), 48, BIG), FrameFault.LIMIT),
    (patched(activations(), 40, b"\x03"), FrameFault.LENGTH),
    (encode_header(activations()) + b"x", FrameFault.LENGTH),
    (encode_header(activations())[:-1], FrameFault.LENGTH),
    (patched(activations(), 36, b"\x09"), FrameFault.HIDDEN),
    (patched(activations(), 52, b"\x02"), FrameFault.FORM),
    (patched(activations(), 32, b"\x06"), FrameFault.TABLE),
    (patched(activations(), 56 + 16, b"\x00"), FrameFault.TABLE),
    (patched(activations(), 56 + 12, BIG), FrameFault.TABLE),
    (patched(activations(), 56 + 20, b"\x02"), FrameFault.TABLE),
    (patched(activations(), 56 + 22, b"\x06"), FrameFault.TABLE),
    (patched(activations(), 120 + 16, b"\x00"), FrameFault.TABLE),
    (patched(activations(), 120 + 16, b"\x04"), FrameFault.TABLE),
    (patched(activations(), 120 + 8, b"\x01"), FrameFault.TABLE),
    (patched(tokens(), 56 + 24, b"\x06"), FrameFault.TABLE),
    (patched(tokens(), 6, b"\x01\x00"), FrameFault.HIDDEN),
    (patched(tokens(), 6, b"\x03\x00"), FrameFault.FORM),
    (patched(activations(), 6, b"\x02\x00"), FrameFault.FORM),
    (patched(tokens(), 36, b"\x08"), FrameFault.FORM),
]


@pytest.mark.parametrize(("data", "fault"), WRONG)
def test_rpc_14_malformed_headers_are_refused_by_kind(data: bytes, fault: FrameFault) -> None:
    with pytest.raises(FrameError) as caught:
        decode_header(data, LIMITS)
    assert caught.value.fault is fault
    assert len(str(caught.value)) < 300


@given(st.binary(max_size=400))
@example(b"CP2P" + b"\xff" * 52)
def test_rpc_14_any_bytes_give_a_frame_or_a_frame_error(data: bytes) -> None:
    try:
        frame = decode_header(data, LIMITS)
    except FrameError:
        return
    assert encode_header(frame)[: HEADER.size] == data[: HEADER.size]


@given(st.sampled_from(sorted(GOLDEN)), st.data())
def test_rpc_14_any_damage_gives_a_frame_or_a_frame_error(name: str, data: st.DataObject) -> None:
    raw = bytearray(encode_header(GOLDEN[name][0]))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    del raw[len(raw) - data.draw(st.integers(0, 2)) :]
    try:
        frame = decode_header(bytes(raw), LIMITS)
    except FrameError:
        return
    assert frame.rows <= LIMITS.rows
    assert len(frame.segments) <= LIMITS.segments


def test_rpc_14_claimed_sizes_allocate_nothing() -> None:
    wide = FrameLimits(hidden=8, rows=2**32 - 1, segments=2**32 - 1, operations=2**32 - 1, records=2**32 - 1)
    hostile = [patched(activations(), offset, BIG) for offset in (32, 40, 44, 48)]
    tracemalloc.start()
    try:
        for data in hostile:
            with pytest.raises(FrameError):
                decode_header(data, wide)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
