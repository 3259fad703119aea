"""Data threads in a ring of their own, around a stage that mixes numbers: what their tests share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cascadia_p2p.node.conductor import HeadConductor
from cascadia_p2p.node.data_thread import DataThread
from cascadia_p2p.node.seat import Seat
from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.scheduler import Scheduler, StreamRequest, Update
from cascadia_p2p.transport.interfaces import FrameTransport
from cascadia_p2p.types import Epoch, Instance, Promise, StreamId
from cascadia_p2p.wire.frames import (
    FrameLimits,
    OperationKind,
    SegmentError,
    SegmentFlag,
    Table,
    alternative_table,
    record_table,
)

HIDDEN = 8
PROMISE = Promise(slots=4, context=256, rows=16)
LIMITS = FrameLimits(hidden=HIDDEN, rows=16, segments=16, operations=64, records=16)
HEAD = Instance("00000000000000aa")
DEADLINE_S = 30.0


def until(true: Callable[[], object], what: str = "it") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, f"{what} did not happen in time"
        time.sleep(0.001)


def mixed(state: int, value: int) -> int:
    return (state * 31 + value + 7) % 9973


@dataclass
class Mixer:
    """A stage whose every row depends on all rows of its stream before it, in exact small integers."""

    number: int = 0
    layers: int = 2
    before_layer: Callable[[], None] = lambda: None
    states: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)

    def apply(
        self, segments: Table, operations: Table, inputs: np.ndarray, on_layer: Callable[[], None]
    ) -> np.ndarray:
        for operation in operations:
            slot = int(operation["slot"])
            if operation["kind"] == OperationKind.START:
                self.states[slot] = (int(operation["stream"]), 0, 0)
            elif operation["kind"] == OperationKind.RELEASE:
                self.states.pop(slot, None)
        for _ in range(self.layers):
            self.before_layer()
            on_layer()
        out = np.zeros((len(inputs), HIDDEN), np.float32)
        at = 0
        for segment in segments:
            rows = int(segment["rows"])
            self._segment(segment, inputs[at : at + rows], out[at : at + rows])
            at += rows
        return out

    def _segment(self, segment: np.void, inputs: np.ndarray, out: np.ndarray) -> None:
        if segment["error"]:
            return
        stream, held, state = self.states.get(int(segment["slot"]), (-1, 0, 0))
        if stream != segment["stream"] or held != segment["start"]:
            segment["error"], segment["stage"] = SegmentError.POSITION, self.number
            return
        for row in range(len(inputs)):
            value = int(inputs[row] if inputs.ndim == 1 else inputs[row, 0])
            state = mixed(state, value)
            out[row] = state
        self.states[int(segment["slot"])] = (stream, held + len(inputs), state)

    def tokens(self, segments: Table, hidden: np.ndarray) -> tuple[Table, Table]:
        records = record_table(len(segments))
        at = 0
        for record, segment in zip(records, segments, strict=True):
            at += int(segment["rows"])
            for name in ("stream", "slot", "stage"):
                record[name] = segment[name]
            record["position"] = segment["start"] + segment["rows"]
            record["status"] = segment["error"]
            record["token"] = int(hidden[at - 1, 0])
            record["alternatives"] = record["token"] % 3
        records = records[((segments["flags"] & SegmentFlag.WANT_TOKEN) != 0) | (segments["error"] != 0)]
        alternatives = alternative_table(int(records["alternatives"].sum()))
        alternatives["token"] = np.repeat(records["token"], records["alternatives"])
        return records, alternatives

    def reset(self) -> None:
        self.states.clear()


def reference(stages: int, prompt: Sequence[int], count: int) -> list[int]:
    states = [0] * stages
    ids = list(prompt)
    for position in range(len(prompt) + count - 1):
        value = ids[position]
        for stage in range(stages):
            states[stage] = value = mixed(states[stage], value)
        if position >= len(prompt) - 1:
            ids.append(value)
    return ids[len(prompt) :]


@dataclass
class Notes:
    """What a data thread reported."""

    switched_to: list[Epoch] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    probes: list[int] = field(default_factory=list)
    broken: list[tuple[Epoch, str]] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)

    def switched(self, epoch: Epoch) -> None:
        self.switched_to.append(epoch)

    def switch_failed(self, epoch: Epoch, sentence: str) -> None:
        self.failed.append(sentence)

    def probe_returned(self, epoch: Epoch, number: int) -> None:
        self.probes.append(number)

    def hop_broken(self, epoch: Epoch, sentence: str) -> None:
        self.broken.append((epoch, sentence))

    def died(self, sentence: str) -> None:
        self.deaths.append(sentence)


class Ring:
    """Data threads in one process, and the least that an owner must do for them."""

    def __init__(self, stages: int, transport: FrameTransport, stage: Callable[[], Mixer] = Mixer) -> None:
        self.transport = transport
        self.notes = [Notes() for _ in range(stages)]
        self.stages = [stage() for _ in range(stages)]
        self.receivers = [
            transport.bind("127.0.0.1", 0, max_part=LIMITS.payload_bytes) for _ in range(stages)
        ]
        self.endpoints = [receiver.endpoint for receiver in self.receivers]
        self.threads = [
            DataThread(receiver, transport, notes)
            for receiver, notes in zip(self.receivers, self.notes, strict=True)
        ]
        self.updates: dict[int, list[Update]] = {}
        self.conductor = HeadConductor(Scheduler(Policy()), self._deliver)
        self.counter = 0
        for thread in self.threads:
            thread.start()

    @property
    def epoch(self) -> Epoch:
        return Epoch(self.counter, HEAD)

    def seat(self, index: int) -> Seat:
        return Seat(
            self.epoch,
            index,
            len(self.threads),
            self.stages[index],
            LIMITS,
            self.endpoints[(index + 1) % len(self.threads)],
            None if index else self.conductor,
        )

    def form(self) -> None:
        self.counter += 1
        epoch = self.epoch
        for index, thread in enumerate(self.threads):
            thread.form(self.seat(index))
        for notes in self.notes:
            until(lambda notes=notes: epoch in notes.switched_to, "the switch")

    def open(self) -> None:
        """Form, probe until it comes round, open."""
        self.form()
        number = len(self.notes[0].probes)
        deadline = time.monotonic() + DEADLINE_S
        while len(self.notes[0].probes) == number:
            self.threads[0].probe(self.epoch, self.counter)
            assert time.monotonic() < deadline
            time.sleep(0.005)
        self.threads[0].call(lambda: self.conductor.open(len(self.threads), PROMISE))
        self.threads[0].open(self.epoch)

    def submit(self, stream: int, prompt: Sequence[int], count: int) -> None:
        self.updates[stream] = []
        request = StreamRequest(StreamId(stream), tuple(prompt), count)
        self.threads[0].call(lambda: self.conductor.submit(request, lambda *_: None))

    def finished(self, stream: int) -> bool:
        return any(update.terminal for update in self.updates[stream])

    def tokens(self, stream: int) -> list[int]:
        """The stream's tokens; each came with just the alternatives that the tail made for it."""
        for update in self.updates[stream]:
            for token, score in zip(update.tokens, update.scores, strict=True):
                assert score.alternatives == ((token, 0.0),) * (token % 3)
        return [token for update in self.updates[stream] for token in update.tokens]

    def dropped(self, reason: str) -> int:
        return sum(thread.counters.dropped[reason] for thread in self.threads)

    def stop(self) -> None:
        for thread in self.threads:
            thread.stop()
        for thread in self.threads:
            assert thread.join(10)
        assert [notes.deaths for notes in self.notes] == [[]] * len(self.notes)

    def _deliver(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self.updates[update.stream.request.stream].append(update)
