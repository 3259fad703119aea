from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cascadia_p2p.types import Epoch, Instance
from cascadia_p2p.wire.frames import (
    HEADER,
    MAX_ALTERNATIVES,
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
    alternative_table,
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
    operations = operation_table(5)
    operations[0] = (9, 0x0102030405060708, 0, 1, 0, 40, 0.5, 0.75, OperationKind.START, 5)
    operations[1] = (9, 0, 64, 1, 6, 0, 0, 0, OperationKind.ATTACH, 0)
    operations[2] = (0x1122334455667788, 0, 40, 3, 0, 0, 0, 0, OperationKind.REWIND, 0)
    operations[3] = (0x1122334455667788, 0, 128, 3, 7, 0, 0, 0, OperationKind.KEEP, 0)
    operations[4] = (0, 0, 0, 0, 8, 0, 0, 0, OperationKind.EVICT, 0)
    return Frame(FrameKind.ACTIVATIONS, EPOCH, 77, 8, segments, operations)


def tokens() -> Frame:
    records = record_table(2)
    records[0] = (9, 1, 41, -2, -0.5, SegmentError.NONE, 0, 0)
    records[1] = (10, 2, 3, 17, -0.5, SegmentError.NONE, 0, 2)
    alternatives = alternative_table(2)
    alternatives[0], alternatives[1] = (17, -0.5), (4, -2.0)
    return Frame(FrameKind.TOKENS, EPOCH, 77, records=records, alternatives=alternatives)


GOLDEN = {
    "activations": (
        activations(),
        "43503250 0200 0100 0500000000000000 efcdab8967452301 4d00000000000000"
        "05000000 08000000 02000000 05000000 00000000 0100 0000"
        "8877665544332211 03000000 28000000 01000000 0100 0000 0000 000000000000"
        "0900000000000000 01000000 00000000 04000000 0000 0400 0700 000000000000"
        "0900000000000000 0807060504030201 00000000 01000000 00000000 28000000 0000003f 0000403f"
        " 0100 0500 00000000"
        "0900000000000000 0000000000000000 40000000 01000000 06000000 00000000 00000000 00000000"
        " 0400 0000 00000000"
        "8877665544332211 0000000000000000 28000000 03000000 00000000 00000000 00000000 00000000"
        " 0200 0000 00000000"
        "8877665544332211 0000000000000000 80000000 03000000 07000000 00000000 00000000 00000000"
        " 0500 0000 00000000"
        "0000000000000000 0000000000000000 00000000 00000000 08000000 00000000 00000000 00000000"
        " 0600 0000 00000000",
    ),
    "tokens": (
        tokens(),
        "43503250 0200 0200 0500000000000000 efcdab8967452301 4d00000000000000"
        "00000000 00000000 00000000 00000000 02000000 0000 0000"
        "0900000000000000 01000000 29000000 feffffff 000000bf 0000 0000 0000 0000"
        "0a00000000000000 02000000 03000000 11000000 000000bf 0000 0000 0200 0000"
        "11000000 000000bf 04000000 000000c0",
    ),
    "probe": (
        Frame(FrameKind.PROBE, EPOCH, 3),
        "43503250 0200 0300 0500000000000000 efcdab8967452301 0300000000000000"
        "00000000 00000000 00000000 00000000 00000000 0000 0000",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_rpc_05_golden_bytes(name: str) -> None:
    """Bytes of protocol 2. A failure here means: raise PROTOCOL, then write the new bytes down."""
    frame, golden = GOLDEN[name]
    assert PROTOCOL == 2
    assert encode_header(frame).hex() == golden.replace(" ", "")


def same(one: Frame, other: Frame) -> bool:
    return (
        (one.kind, one.epoch, one.number, one.hidden) == (other.kind, other.epoch, other.number, other.hidden)
        and bool((one.segments == other.segments).all())
        and bool((one.operations == other.operations).all())
        and one.records.tobytes() == other.records.tobytes()
        and one.alternatives.tobytes() == other.alternatives.tobytes()
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
none = st.just(0)
shares = st.floats(0, 1, width=32)
operation = (
    st.tuples(
        u64, u64, none, u32, none, u32, st.floats(0, 100, width=32), shares, st.just(1), st.integers(0, 20)
    )
    | st.tuples(u64, none, u32, u32, none, none, none, none, st.just(2), none)
    | st.tuples(u64, none, none, u32, none, none, none, none, st.just(3), none)
    | st.tuples(u64, none, u32, u32, u32, none, none, none, st.sampled_from([4, 5]), none)
    | st.tuples(u64, none, none, u32, u32, none, none, none, st.just(6), none)
)
counts = st.integers(0, MAX_ALTERNATIVES)
record = st.tuples(u64, u32, u32, st.integers(-(2**31), 2**31 - 1), st.floats(width=32), errors, u16, counts)
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
    table = np.array(records, RECORD)
    alternatives = alternative_table(int(table["alternatives"].sum()))
    alternatives["token"] = np.arange(len(alternatives))
    frame = Frame(FrameKind.TOKENS, epoch, number, records=table, alternatives=alternatives)
    again = decode_header(encode_header(frame), LIMITS)
    for name in RECORD.names or ():
        assert np.array_equal(again.records[name], frame.records[name], equal_nan=name == "logprob")
    assert (again.epoch, again.number) == (epoch, number)
    assert np.array_equal(again.alternatives, alternatives)


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
START = 56 + 2 * 32
NAN = np.float32(np.nan).tobytes()
WRONG = [
    (b"", FrameFault.LENGTH),
    (b"CP2P", FrameFault.LENGTH),
    (b"GET / HTTP/1.1\r\nHost: somewhere\r\nUser-Agent: someone\r\n\r\n....", FrameFault.FOREIGN),
    (patched(activations(), 4, b"\x01\x00"), FrameFault.VERSION),
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
    (patched(activations(), 56 + 22, b"\x08"), FrameFault.TABLE),
    (patched(activations(), START + 40, b"\x00"), FrameFault.TABLE),
    (patched(activations(), START + 40, b"\x07"), FrameFault.TABLE),
    (patched(activations(), START + 16, b"\x01"), FrameFault.TABLE),
    (patched(activations(), START + 24, b"\x01"), FrameFault.TABLE),
    (patched(activations(), START + 32, NAN), FrameFault.TABLE),
    (patched(activations(), START + 32, np.float32(101).tobytes()), FrameFault.TABLE),
    (patched(activations(), START + 36, NAN), FrameFault.TABLE),
    (patched(activations(), START + 36, np.float32(1.5).tobytes()), FrameFault.TABLE),
    (patched(activations(), START + 42, b"\x15"), FrameFault.TABLE),
    (patched(activations(), START + 48 + 8, b"\x01"), FrameFault.TABLE),
    (patched(activations(), START + 4 * 48 + 16, b"\x01"), FrameFault.TABLE),
    (patched(tokens(), 56 + 24, b"\x08"), FrameFault.TABLE),
    (patched(tokens(), 56 + 28, b"\x15"), FrameFault.TABLE),
    (patched(tokens(), 56 + 28, b"\x01"), FrameFault.LENGTH),
    (encode_header(tokens())[:-8], FrameFault.LENGTH),
    (encode_header(tokens()) + bytes(8), FrameFault.LENGTH),
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
