"""Targets behind the decoders: what a peer that speaks correctly and lies can do to a node's state."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cascadia_p2p.engine.slots import Slots
from cascadia_p2p.errors import WireError
from cascadia_p2p.node.answers import AnswerDesk, ModelFacts
from cascadia_p2p.node.conductor import HeadConductor
from cascadia_p2p.node.data_thread import DataThread
from cascadia_p2p.node.journal_copy import JournalCopy
from cascadia_p2p.node.seat import Seat
from cascadia_p2p.ring import events
from cascadia_p2p.ring.machine import RingMachine
from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.profile import NodeProfile
from cascadia_p2p.ring.scheduler import Scheduler, Stream, Update
from cascadia_p2p.sample.tokenizer import special_tokens
from cascadia_p2p.text.chat import Chat
from cascadia_p2p.transport.memory import MemoryTransport
from cascadia_p2p.types import Endpoint, Epoch, Instance, NodeId, Promise, StreamId
from cascadia_p2p.wire.frames import (
    Frame,
    FrameError,
    FrameKind,
    Rows,
    SegmentError,
    Table,
    alternative_table,
    encode_header,
    record_table,
    segment_table,
)
from cascadia_p2p.wire.messages import (
    Begun,
    ChatMessage,
    Claim,
    ClaimState,
    FinishReason,
    GenerateRequest,
    Greeting,
    Journal,
    decode_control,
    encode,
)
from fuzzing.file_targets import VOCAB, plain_tokenizer
from fuzzing.messages import control_messages, introduction
from fuzzing.target import LONGEST, Target, promise
from fuzzing.wire_targets import EPOCH, LIMITS, read_frame, sample_frames

PROMISE: Final = Promise(slots=4, context=256, rows=64, kept=2)
HEADER_AT: Final = struct.Struct("<H")
MOST_IDS: Final = 64
"""Of a copy of the journal: small, so that few messages fill it."""


class _Copies:
    """A stage that only keeps its slots' books."""

    number = 0

    def __init__(self) -> None:
        self.slots = Slots(PROMISE, 16)

    def apply(
        self, segments: Table, operations: Table, inputs: npt.NDArray[Any], on_layer: Callable[[], None]
    ) -> Rows:
        self.slots.operate(operations)
        right = self.slots.admit(segments, self.number)
        chosen = segments[right]
        self.slots.begin(chosen)
        on_layer()
        self.slots.commit(chosen)
        for slot in range(PROMISE.slots):
            promise(0 <= self.slots.held(slot) <= PROMISE.context, "a slot holds more than the context")
        promise(
            (segments["error"][~right] != SegmentError.NONE).all(), "a segment was left out without an error"
        )
        return np.array(inputs, np.float32)

    def tokens(self, segments: Table, hidden: Rows) -> tuple[Table, Table]:
        return record_table(len(segments)), alternative_table()

    def reset(self) -> None:
        self.slots.reset()


class _Silent:
    """Takes what a data thread reports."""

    def switched(self, epoch: Epoch) -> None:
        """Entered."""

    def switch_failed(self, epoch: Epoch, sentence: str) -> None:
        """Not entered."""

    def probe_returned(self, epoch: Epoch, number: int) -> None:
        """Came round."""

    def hop_broken(self, epoch: Epoch, sentence: str) -> None:
        """Lost."""

    def died(self, sentence: str) -> None:
        """Ended."""


def _split(data: bytes) -> list[bytes]:
    """Parts, each behind two bytes with its length."""
    parts, at = [], 0
    while at + 2 <= len(data) and len(parts) < 64:
        (size,) = HEADER_AT.unpack_from(data, at)
        parts.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return parts


def _joined(parts: list[bytes]) -> bytes:
    return b"".join(HEADER_AT.pack(len(part)) + part for part in parts)


def _slots(data: bytes) -> None:
    """Frames of a predecessor, one after the other, into the books of one stage."""
    stage = _Copies()
    for part in _split(data):
        try:
            frame = read_frame(part)
        except FrameError:
            continue
        stage.apply(frame.segments.copy(), frame.operations, np.zeros((frame.rows, 8)), lambda: None)


def _thread(data: bytes) -> None:
    """Messages of a predecessor into the data thread of a middle stage, in a network of memory."""
    transport = MemoryTransport()
    receiver = transport.bind("a", 1, max_part=LONGEST)
    behind = transport.bind("b", 2, max_part=LONGEST)
    thread = DataThread(receiver, transport, _Silent())
    seat = Seat(EPOCH, 1, 3, _Copies(), LIMITS, behind.endpoint)
    thread.form(seat)
    thread.turn()
    counted, parts = thread.counters, _split(data)
    for header, payload in zip(parts[::2], parts[1::2], strict=False):
        before = (counted.frames_in, counted.progress, sum(counted.dropped.values()))
        receiver.put(header, payload or None)
        thread.turn()
        after = (counted.frames_in, counted.progress, sum(counted.dropped.values()))
        promise(before != after, "a message was neither taken nor counted")
    promise(not counted.errors, "the stage failed at what was taken")


@cache
def _desk() -> AnswerDesk:
    tokenizer = plain_tokenizer()
    return AnswerDesk(ModelFacts(VOCAB, frozenset({256})), tokenizer, Chat(tokenizer))


def _answers(data: bytes) -> None:
    """Answers of a tail into a head that has two streams in flight, and on to the clients."""
    updates: list[Update] = []
    conductor = HeadConductor(Scheduler(Policy()), updates.extend)
    conductor.open(2, PROMISE)
    answers = {}
    for number, asked in enumerate(
        (
            GenerateRequest(prompt="a", max_tokens=9, logprobs=2),
            GenerateRequest(prompt="c", stream=True, id="a"),
        ),
        1,
    ):
        accepted, answers[number] = _desk().accept(asked, StreamId(number))
        conductor.submit(accepted, lambda *_: None)
    for part in _split(data):
        conductor.schedule()
        try:
            frame = read_frame(part)
        except FrameError:
            continue
        try:
            conductor.on_tokens(frame.number, frame.records, frame.alternatives)
        except ValueError:
            break
    for update in updates:
        answer = answers[int(update.stream.id)]
        answer.take(update.tokens, update.scores)
        if update.finish is not None:
            encode(answer.reply(update.stream, update.finish))


def _said(data: bytes) -> None:
    """What a model says to a conversation in its framing: any tokens at all must give a reply."""
    ids = [256 + each - 0xE0 if each >= 0xE0 else each for each in data]
    asked = GenerateRequest(
        messages=(ChatMessage(role="user", content="hi"),), max_tokens=9, stream=True, id="a"
    )
    accepted, answer = _desk().accept(asked, StreamId(1))
    for token in ids:
        answer.take((token,))
    encode(answer.reply(Stream(accepted, list(ids), 0.0), FinishReason.STOP))


def _said_seed() -> list[bytes]:
    names = {name.strip("<|>"): id_ - 256 + 0xE0 for name, id_ in special_tokens(VOCAB).items()}
    call = bytes([names["content_invoke_tool_json"]])
    end = bytes([names["end_message"]])
    said = [
        b'{"name": "f", "args": {"a": [1, 2.5]}}',
        b"NaN",
        b"[[[[[[[[",
        b'"\\ud800"',
        b"9999999999999999999999",
    ]
    thought = bytes([names["content_thinking"]]) + b"hm" + end + bytes([names["content_text"]]) + b"yes" + end
    return [thought, *(b"f" + call + each + end for each in said)]


def _answer_seed() -> list[bytes]:
    frames = []
    for number in (1, 2, 3):
        records = record_table(2)
        records[0] = (1, 3, number, 65 + number, -0.5, 0, 0, 2)
        records[1] = (2, 2, number, 70, -0.25, 0, 0, 0)
        named = alternative_table(2)
        named[0], named[1] = (65, -0.5), (66, -1.5)
        frames.append(
            encode_header(Frame(FrameKind.TOKENS, EPOCH, number, records=records, alternatives=named))
        )
    return [_joined(frames), _joined(frames[:1])]


def _thread_seed() -> list[bytes]:
    rows = np.zeros((5, LIMITS.hidden), np.float32).tobytes()
    frames = sample_frames()
    start = frames[0].operations[:1].copy()
    parts = []
    for number in (1, 2):
        segments = segment_table(1)
        segments[0] = (9, 1, 5 * (number - 1), 5, 1, 0, 0)
        table = start if number == 1 else start[:0]
        parts += [
            encode_header(Frame(FrameKind.ACTIVATIONS, EPOCH, number, LIMITS.hidden, segments, table)),
            rows,
        ]
    probe = [encode_header(frames[2]), b""]
    return [_joined(parts), _joined(probe + parts), _joined([encode_header(frames[0]), rows])]


def _machine(data: bytes) -> None:
    """Messages of one peer, as they come over a link, into a node that waits for a ring."""
    profile = NodeProfile(
        node=NodeId("f" * 16), instance=Instance("e" * 16), host="pc", software="0.1.0", fleet="office",
        model="tiny", fingerprint="ab" * 32, shards=3, layers=6, hidden=64, holds=(0, 1, 2), promise=PROMISE,
        control=Endpoint("127.0.0.1", 7600), data=Endpoint("127.0.0.1", 7601), client=None, device="CPU",
        pid=1,
    )  # fmt: skip
    machine = RingMachine(profile, 0.0)
    now = 0.0
    for part in _split(data):
        now += 0.1
        try:
            event: events.Event = events.Heard(decode_control(part), 1, "somewhere")
        except WireError as error:
            event = events.Undecodable(1, "somewhere", str(error))
        machine.handle(event, now)
        machine.handle(events.Tick(), now)
    machine.snapshot(now)
    promise(machine.peers <= 64, "more peers than messages")


def _machine_seed() -> list[bytes]:
    said = [encode(each) for each in control_messages()]
    head = encode(
        Greeting(
            **introduction(node="0" * 16, instance="1" * 16, claim=Claim(shard=0, state=ClaimState.LOADED))
        )
    )
    return [_joined(said), _joined([head, *said[3:12]]), _joined(said[:4])]


def _journal(data: bytes) -> None:
    """What a head tells a standby, message after message, which then goes on with the answers."""
    copy, now = JournalCopy(NodeId("f" * 16), Instance("e" * 16), MOST_IDS), 0.0
    for part in _split(data):
        now += 0.1
        try:
            message = decode_control(part)
        except WireError:
            continue
        if isinstance(message, Journal):
            copy.hear(message, now)
        copy.due(now)
        held = copy.report()["ids"]
        promise(
            isinstance(held, int) and 0 <= held <= MOST_IDS, "more is kept than the bound, or less than none"
        )
    for record in copy.take_over():
        promise(len(record.asked.prompt) > 0, "an answer without a prompt is gone on with")
        scored = record.asked.logprobs is not None
        promise(
            not scored or len(record.scores) >= len(record.ids), "ids without their scores are gone on with"
        )
    promise(len(copy) == 0 and copy.report()["ids"] == 0, "something is left of what was taken over")


def _journal_seed() -> list[bytes]:
    def told(session: int, number: int, **fields: Any) -> bytes:
        return encode(
            Journal(
                node=NodeId("0" * 16), instance=Instance("1" * 16), session=session, number=number, **fields
            )
        )

    def begun(number: int, prompt: int = 2, **fields: Any) -> Begun:
        return Begun(number=number, key=f"{number:032x}", prompt=prompt, max_tokens=9, **fields)

    scored = ((-0.5, ((8, -0.5),)),)
    first = told(
        1, 1, begun=(begun(1, logprobs=1), begun(2)), grown=((1, (5, 6, 8), scored), (2, (5, 6), ()))
    )
    more = told(1, 2, grown=((1, (9,), scored), (2, (7,), ())), ended=((2, FinishReason.STOP, 0, 1.5),))
    last = told(1, 3, gone=(1,), begun=(begun(3, 40),), grown=((3, tuple(range(60)), ()),))
    anew = told(2, 1, begun=(begun(1),), grown=((1, (5, 6), ()),), whole=True)
    return [_joined([first, more, last, anew]), _joined([first, anew]), _joined([more, first, more])]


TARGETS: Final = (
    Target("slots", _slots, lambda: [_joined([encode_header(each) for each in sample_frames()])], ()),
    Target("data_thread", _thread, _thread_seed, (), memory_base=4 << 20),
    Target("answers", _answers, _answer_seed, (), memory_base=4 << 20),
    Target("said", _said, _said_seed, (), memory_base=4 << 20),
    Target("machine", _machine, _machine_seed, (), memory_base=4 << 20),
    Target("journal", _journal, _journal_seed, ()),
)
