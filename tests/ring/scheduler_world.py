"""A model ring that checks every frame of the scheduler as the stages do, blocks and prefixes included."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.scheduler import Plan, Scheduler, StreamRequest, Update
from cascadia_p2p.types import Promise, StreamId
from cascadia_p2p.wire.frames import RECORD, OperationKind, SegmentError, SegmentFlag

VOCAB = 97
BLOCK = 4
"""Positions of a block here: small, so that short prompts have many."""


def chain(value: int, position: int, token: int) -> int:
    return (value * 31 + token + position) % 1_000_003


def next_token(ids: list[int]) -> int:
    """A deterministic stand-in for a model: depends on every id and its position."""
    value = 7
    for i, token in enumerate(ids):
        value = chain(value, i, token)
    return value % VOCAB


@dataclass
class Held:
    """What a slot holds at the stages."""

    stream: int
    ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    value: int = 7
    error: SegmentError = SegmentError.NONE

    def add(self, tokens: list[int]) -> None:
        for token in tokens:
            self.value = chain(self.value, len(self.ids), token)
            self.ids.append(token)


class ModelRing:
    """Stages in one: holds ids by slot, refuses what a stage would refuse, answers in frame order.

    Args:
        promise: of all stages.
        block: positions of a block.
    """

    def __init__(self, promise: Promise, block: int = BLOCK) -> None:
        self.promise = promise
        self.block = block
        self.slots: dict[int, Held] = {}
        self.entries: dict[int, Held | None] = {}
        """Kept prefixes; None for an entry that the head believes in and that holds nothing."""
        self.frames: deque[tuple[int, np.ndarray]] = deque()
        self.number = 0
        self.poison: set[int] = set()
        """Streams whose next window no stage can compute."""
        self.references: Counter[int] = Counter()
        self.blocks = promise.slots * -(-promise.context // block)
        self.made = 0

    @property
    def used(self) -> int:
        """Blocks that anybody holds."""
        return len(self.references)

    def orphans(self) -> int:
        """Blocks that only entries hold."""
        live = {block for held in self.slots.values() for block in held.blocks}
        kept = {block for held in self.entries.values() if held for block in held.blocks}
        return len(kept - live)

    def run(self, plan: Plan) -> None:
        self.number += 1
        assert plan.number == self.number
        assert len(plan.operations) <= 4 * self.promise.slots + self.promise.kept
        for operation in plan.operations:
            self.operate(operation)
        assert len(plan.tokens) == plan.segments["rows"].sum() <= self.promise.rows
        assert len(set(plan.segments["stream"].tolist())) == len(plan.segments) <= self.promise.slots
        offset, records = 0, []
        for segment in plan.segments:
            rows = int(segment["rows"])
            record = self.compute(segment, plan.tokens[offset : offset + rows].tolist())
            offset += rows
            if record is not None:
                records.append(record)
        self.frames.append((plan.number, np.array(records, RECORD)))

    def operate(self, operation: np.void) -> None:
        kind, slot, stream = (int(operation[name]) for name in ("kind", "slot", "stream"))
        position, entry = int(operation["position"]), int(operation["entry"])
        assert 0 <= slot < self.promise.slots
        if kind == OperationKind.START:
            assert slot not in self.slots, "a slot is started before it was released"
            self.slots[slot] = Held(stream)
        elif kind == OperationKind.RELEASE:
            assert self.slots[slot].stream == stream
            self.let_go(self.slots.pop(slot))
        elif kind == OperationKind.EVICT:
            assert entry in self.entries, "an entry is evicted that nobody kept"
            self.forget(entry)
        elif kind == OperationKind.KEEP:
            self.keep(self.slots[slot], stream, position, entry)
        else:
            assert kind == OperationKind.ATTACH
            self.attach(self.slots[slot], stream, position, entry)

    def keep(self, held: Held, stream: int, position: int, entry: int) -> None:
        assert 0 <= entry < self.promise.kept
        assert held.stream == stream
        assert position % self.block == 0
        self.forget(entry)
        if held.error:
            self.entries[entry] = None
            return
        assert len(held.ids) == position > 0, "a stream does not hold what is to be kept"
        copy = Held(-1, list(held.ids), list(held.blocks), held.value)
        assert len(copy.blocks) * self.block == position
        self.references.update(copy.blocks)
        self.entries[entry] = copy

    def attach(self, held: Held, stream: int, position: int, entry: int) -> None:
        assert held.stream == stream
        assert not held.ids
        assert entry in self.entries, "an entry is attached that nobody kept"
        kept = self.entries[entry]
        if kept is None:
            held.error = SegmentError.PREFIX
            return
        assert len(kept.ids) == position, "an entry holds other positions than the head believes"
        held.ids, held.blocks, held.value = list(kept.ids), list(kept.blocks), kept.value
        self.references.update(held.blocks)

    def compute(self, segment: np.void, tokens: list[int]) -> np.ndarray | None:
        held = self.slots[int(segment["slot"])]
        assert tokens
        assert held.stream == segment["stream"]
        record = np.zeros((), RECORD)
        record["stream"], record["slot"] = held.stream, segment["slot"]
        record["position"] = int(segment["start"]) + len(tokens)
        if held.stream in self.poison and not held.error:
            held.error = SegmentError.NON_FINITE
        if held.error:
            record["status"], record["stage"], record["token"] = held.error, 1, -1
            return record
        assert len(held.ids) == segment["start"], "a window does not start where the slot ends"
        held.add(tokens)
        assert len(held.ids) <= self.promise.context
        while len(held.blocks) * self.block < len(held.ids):
            self.made += 1
            held.blocks.append(self.made)
            self.references[self.made] += 1
        assert self.used <= self.blocks, "the head has promised more blocks than there are"
        if not segment["flags"] & SegmentFlag.WANT_TOKEN:
            return None
        record["token"] = held.value % VOCAB
        return record

    def forget(self, entry: int) -> None:
        held = self.entries.pop(entry, None)
        if held is not None:
            self.let_go(held)

    def let_go(self, held: Held) -> None:
        for block in held.blocks:
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]

    def lose_entry(self, entry: int) -> None:
        """As at a stage that can not keep what it was told to keep."""
        if entry in self.entries:
            self.forget(entry)
            self.entries[entry] = None

    def answer(self, scheduler: Scheduler, now: float) -> list[Update]:
        number, records = self.frames.popleft()
        return scheduler.on_tokens(number, records, now)


def expected(request: StreamRequest, context: int) -> list[int]:
    held = Held(0)
    held.add(list(request.prompt))
    while True:
        token = held.value % VOCAB
        held.add([token])
        generated = len(held.ids) - len(request.prompt)
        if token in request.stop_ids or generated >= request.max_tokens or len(held.ids) > context:
            return held.ids[len(request.prompt) :]


def drain(scheduler: Scheduler, ring: ModelRing, now: float = 0.0) -> list[Update]:
    updates: list[Update] = []
    for _ in range(100_000):
        while (plan := scheduler.schedule(now)) is not None:
            ring.run(plan)
        if not ring.frames:
            return updates
        updates += ring.answer(scheduler, now)
    raise AssertionError("the scheduler does not come to rest")


def request(number: int, prompt: int, max_tokens: int, stops: frozenset[int] = frozenset()) -> StreamRequest:
    ids = tuple((number * 13 + 5 * i) % VOCAB for i in range(prompt))
    return StreamRequest(StreamId(number), ids, max_tokens, stops)


def opened(
    stages: int = 3,
    slots: int = 4,
    context: int = 64,
    rows: int = 16,
    policy: Policy | None = None,
    kept: int = 0,
) -> tuple[Scheduler, ModelRing]:
    promise = Promise(slots, context, rows, kept)
    scheduler = Scheduler(policy or Policy(), BLOCK)
    scheduler.open(stages, promise)
    return scheduler, ModelRing(promise)


def assert_at_rest(scheduler: Scheduler, ring: ModelRing) -> None:
    """Nothing is left of streams that ended, and both sides agree about what is kept."""
    assert (scheduler.running, scheduler.waiting, scheduler.in_flight) == (0, 0, 0)
    assert scheduler._turns.prompts == scheduler._turns.decoding == scheduler._turns.pending == 0
    assert not scheduler._turns._due
    assert not scheduler._operations
    assert not ring.slots, "a slot leaked"
    inside = scheduler._ring
    assert inside is not None
    assert sorted(inside.free) == list(range(ring.promise.slots))
    prefixes = inside.prefixes
    if prefixes is None:
        assert not ring.entries
        return
    assert set(prefixes._entries) == set(ring.entries)
    assert prefixes._promised == 0
    assert len(prefixes._free) + len(prefixes._entries) == ring.promise.kept
    assert prefixes.size <= sum(entry.position // ring.block for entry in prefixes._entries.values())
    lost = any(held is None for held in ring.entries.values())
    assert ring.orphans() == ring.used
    assert prefixes._orphans == ring.used if not lost else prefixes._orphans >= ring.used
    assert scheduler.prefix_counts.kept == len(prefixes._entries)
