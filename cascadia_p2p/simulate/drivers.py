"""Who decides what goes into the ring: the product's scheduler, or the published fleet's fixed groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.scheduler import Plan, Scheduler, StreamRequest
from cascadia_p2p.simulate.fleet import Fleet
from cascadia_p2p.simulate.ring import Load
from cascadia_p2p.types import StreamId
from cascadia_p2p.wire.frames import SegmentFlag, record_table

TOKENS: Final = 1000
"""Ids that simulated tokens are of."""

_QUEUE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Came:
    """A token that came.

    Args:
        stream: whose.
        last: it is the stream's last one.
    """

    stream: StreamId
    last: bool


class Driver(Protocol):
    """The head's decisions; frames come back in the order in which they were given out."""

    def submit(self, request: StreamRequest, now: float) -> None:
        """Take a request."""

    def next_frame(self, now: float) -> Load | None:
        """The frame to start at `now`, or None when there is none."""

    def on_answer(self, now: float) -> Sequence[Came]:
        """The oldest frame is back: the tokens that came with it."""


def token_of(stream: int, position: int) -> int:
    """The id that a stream has at a position: the same whatever else runs."""
    return (stream * 7919 + position * 104_729) % TOKENS


class SchedulerDriver:
    """The product's scheduler, called as the head's data thread does.

    Args:
        fleet: whose ring it serves.
        policy: of the scheduler; by default it knows the times of all stages.
    """

    def __init__(self, fleet: Fleet, policy: Policy | None = None) -> None:
        if policy is None:
            pace = fleet.pace()
            policy = Policy(stage_time=pace.slowest, trip_time=pace.trip, queue_limit=_QUEUE)
        self._scheduler = Scheduler(policy)
        self._scheduler.open(len(fleet.stages), fleet.promise)
        self._plans: deque[Plan] = deque()

    def submit(self, request: StreamRequest, now: float) -> None:
        """Take a request.

        Raises:
            RequestError: the ring can not hold it, or too many wait.
        """
        self._scheduler.submit(request, now)

    def next_frame(self, now: float) -> Load | None:
        """What the scheduler composes."""
        plan = self._scheduler.schedule(now)
        if plan is None:
            return None
        self._plans.append(plan)
        segments = plan.segments
        asking = (segments["flags"] & SegmentFlag.WANT_TOKEN) != 0
        decoding = asking & (segments["rows"] == 1)
        rows = int(segments["rows"].sum())
        return Load(rows, int(asking.sum()), rows - int(decoding.sum()))

    def on_answer(self, now: float) -> Sequence[Came]:
        """Answer the oldest frame as the tail would.

        Raises:
            RequestError: the scheduler ended a stream with an error.
        """
        plan = self._plans.popleft()
        segments = plan.segments[(plan.segments["flags"] & SegmentFlag.WANT_TOKEN) != 0]
        records = record_table(len(segments))
        for name in ("stream", "slot"):
            records[name] = segments[name]
        records["position"] = segments["start"] + segments["rows"]
        records["token"] = [token_of(int(r["stream"]), int(r["position"])) for r in records]
        came: list[Came] = []
        for update in self._scheduler.on_tokens(plan.number, records, now):
            if update.error is not None:
                raise update.error
            stream = update.stream.request.stream
            count = len(update.tokens)
            came += [Came(stream, update.terminal and n == count - 1) for n in range(count)]
        return came


@dataclass(slots=True)
class _Member:
    """A stream of a group."""

    request: StreamRequest
    sent: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Group:
    members: list[_Member] = field(default_factory=list)
    away: bool = False

    def ready(self) -> list[_Member]:
        return [member for member in self.members if member.tokens]


@dataclass(frozen=True, slots=True)
class _Away:
    """A frame in the ring: of a group, or a window of one prompt (group is None)."""

    members: tuple[_Member, ...]
    group: _Group | None
    asking: bool


class FixedGroups:
    """The published fleet's policy: a stream stays in its group, and a group has one frame in the ring.

    A stream joins the smallest group. Each group's frame carries a row of each of its streams that decodes,
    and starts again when it is back. Prompts are read first come first served, in windows of one prompt each;
    windows and groups' frames take turns at the head when both wait.

    Args:
        groups: at most.
        window: rows of a prompt's window.
        windows_in_flight: at most.
        slots: streams at once; others wait.
    """

    def __init__(self, groups: int, window: int, windows_in_flight: int, slots: int) -> None:
        self._groups = [_Group() for _ in range(groups)]
        self._window, self._windows_in_flight, self._slots = window, windows_in_flight, slots
        self._waiting: deque[StreamRequest] = deque()
        self._prompts: deque[_Member] = deque()
        self._away: deque[_Away] = deque()
        self._windows = 0
        self._turn = 0
        self._window_next = False

    def submit(self, request: StreamRequest, now: float) -> None:
        """Take a request; there is no end to the queue."""
        self._waiting.append(request)
        self._admit()

    def next_frame(self, now: float) -> Load | None:
        """A window of the oldest prompt or the next group's frame, the other kind than before if it waits."""
        self._window_next = not self._window_next
        if self._window_next:
            return self._next_window() or self._next_group()
        return self._next_group() or self._next_window()

    def on_answer(self, now: float) -> Sequence[Came]:
        """The tokens of a group, or the first one of a prompt that is through."""
        frame = self._away.popleft()
        if frame.group is None:
            self._windows -= 1
        else:
            frame.group.away = False
        came: list[Came] = []
        for member in frame.members if frame.asking else ():
            member.tokens += 1
            last = member.tokens == member.request.max_tokens
            came.append(Came(member.request.stream, last))
            if last:
                self._leave(member)
        self._admit()
        return came

    def _next_group(self) -> Load | None:
        for step in range(len(self._groups)):
            group = self._groups[(self._turn + step) % len(self._groups)]
            ready = group.ready()
            if ready and not group.away:
                self._turn = (self._turn + step + 1) % len(self._groups)
                group.away = True
                self._away.append(_Away(tuple(ready), group, asking=True))
                return Load(len(ready), len(ready))
        return None

    def _next_window(self) -> Load | None:
        if not self._prompts or self._windows == self._windows_in_flight:
            return None
        member = self._prompts[0]
        rows = min(self._window, len(member.request.prompt) - member.sent)
        member.sent += rows
        through = member.sent == len(member.request.prompt)
        if through:
            self._prompts.popleft()
        self._windows += 1
        self._away.append(_Away((member,), None, asking=through))
        return Load(rows, int(through), rows)

    def _admit(self) -> None:
        while self._waiting and sum(len(group.members) for group in self._groups) < self._slots:
            member = _Member(self._waiting.popleft())
            min(self._groups, key=lambda group: len(group.members)).members.append(member)
            self._prompts.append(member)

    def _leave(self, member: _Member) -> None:
        for group in self._groups:
            if member in group.members:
                group.members.remove(member)
