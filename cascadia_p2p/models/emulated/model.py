"""A stage that waits instead of computing, and whose tokens tell whether every row came by in its place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import structlog

from cascadia_p2p.engine.kernels.rows import RowTable
from cascadia_p2p.engine.matrix import F32, I32, MatrixBackend
from cascadia_p2p.engine.model import Layer, PartLoaded, StagePlan, TensorSource
from cascadia_p2p.engine.paging import Paging
from cascadia_p2p.engine.timing import WorkPart, WorkTimes
from cascadia_p2p.errors import UsageError
from cascadia_p2p.models.emulated.config import EmulatedConfig

U64 = npt.NDArray[np.uint64]

_HALF: Final = np.uint64(24)
_LOW: Final = np.uint64((1 << 24) - 1)
"""A number of 48 bits travels as two float32 that are whole: they hold 24 bits exactly."""

_WRAP_US: Final = 1 << 48

_log = structlog.get_logger()


def mixed(values: U64) -> U64:
    """Every bit of the result depends on every bit of the value: the finaliser of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def contribution(values: U64, positions: U64, layer: int) -> U64:
    """What a layer adds to its sum at a position, from the number that the layer before gave."""
    return mixed(values + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(layer))


def passed_on(sums: U64) -> U64:
    """What a layer hands to the next, 48 bits, from the sum over all positions up to this one."""
    return mixed(sums) >> np.uint64(16)


def token_of(values: U64, vocab: int) -> U64:
    """The token that follows a position whose last layer handed on this number."""
    return values % np.uint64(vocab)


def expected_answers(
    config: EmulatedConfig, prompts: Sequence[Sequence[int]], count: int
) -> list[tuple[int, ...]]:
    """The answers of `count` tokens that a ring of emulated stages gives to prompts of equal length."""
    if not prompts:
        return []
    length = len(prompts[0])
    ids = np.zeros((len(prompts), length + count), np.uint64)
    ids[:, :length] = prompts
    sums = np.zeros((config.layers, len(prompts)), np.uint64)
    for position in range(length + count - 1):
        values = ids[:, position]
        for layer in range(config.layers):
            sums[layer] += contribution(values, np.full(len(prompts), position, np.uint64), layer)
            values = passed_on(sums[layer])
        if position >= length - 1:
            ids[:, position + 1] = token_of(values, config.vocab)
    return [tuple(answer) for answer in ids[:, length:].tolist()]


def put(x: F32, column: int, values: U64) -> None:
    """Write numbers of 48 bits into two columns of rows."""
    x[:, column] = values & _LOW
    x[:, column + 1] = values >> _HALF


def take(x: F32, column: int) -> U64:
    """The numbers that `put` wrote."""
    return x[:, column].astype(np.uint64) | (x[:, column + 1].astype(np.uint64) << _HALF)


class EmulatedLayer:
    """All layers of one machine: waits their time, and sums what rows bring.

    The sums up to every position are kept, so that a stream can go back to any of them.

    Args:
        number: its place in the model.
        seconds: of a frame of 1, 2, 3, ... rows.
        plan: slots and context.
        waiting: shared by the parts of the stage.
        paging: told what a kept prefix has to remember.
    """

    def __init__(
        self, number: int, seconds: Sequence[float], plan: StagePlan, waiting: Waiting, paging: Paging
    ) -> None:
        self.number = number
        self._seconds = seconds
        slots, context = plan.promise.slots, plan.promise.context
        self._sums = np.zeros((slots, context), np.uint64)
        # A number of 64 bits is copied as two of 32.
        paging.add_history(self._sums.view(np.float32).reshape(slots, context, 2), 1)
        self._waiting = waiting

    def __call__(self, rows: RowTable, x: F32, failed: I32) -> None:
        """See `engine.model.Layer`."""
        positions, sums = rows.positions.astype(np.uint64), self._sums
        # Positions count from 0 and sums from what lies before the first, which is 0.
        added = np.cumsum(contribution(take(x, 0), positions, self.number), dtype=np.uint64)
        first = np.arange(len(x)) - rows.before
        before = np.where(first > 0, added[first - 1], np.uint64(0))
        start = rows.positions - rows.before
        held = np.where(start > 0, sums[rows.slots, start - 1], np.uint64(0))
        total = held + added - before
        sums[rows.slots, rows.positions] = total
        put(x, 0, passed_on(total))
        self._waiting.wait(self._seconds[len(x) - 1], WorkPart.DENSE)
        put(x, 2, np.array([time.perf_counter_ns() // 1000 % _WRAP_US], np.uint64))


class Waiting:
    """Sleeps until planned times are over, and counts them by part.

    Planned time of layers counts as `dense`, of the end as `head`, of the link as `router`, and what sleeping
    took longer than planned as `glue`.
    """

    def __init__(self) -> None:
        self._times = WorkTimes()
        self._due = self._late = 0.0

    def frame(self, rows: int, not_before: float = 0.0) -> None:
        """A frame of so many rows begins, now or at `not_before` if that is later (`time.perf_counter`)."""
        self._times.frames += 1
        self._times.rows += rows
        self.start()
        if not_before > self._due:
            self._times.seconds[WorkPart.ROUTER] += not_before - self._due
            self._due = not_before

    def start(self) -> None:
        """Planned times run from now on."""
        self._due, self._late = time.perf_counter(), 0.0

    def wait(self, seconds: float, part: WorkPart) -> None:
        """Sleep until the next `seconds` of plan are over."""
        self._due += seconds
        while (left := self._due - time.perf_counter()) > 0:
            time.sleep(left)
        self._times.seconds[part] += seconds
        # What was late before this part has been counted; a long part may make up for it.
        self._times.seconds[WorkPart.GLUE] += -left - self._late
        self._late = -left

    def times(self) -> WorkTimes:
        """The totals so far."""
        return self._times.copy()


class EmulatedStageModel:
    """One stage of an emulated model; see `engine.model.StageModel`.

    A row carries the number that its token and all rows before it make, and the time at which the stage
    before sent it: all nodes of an emulated ring are on one machine and share its clock. A frame that
    arrives earlier than the link's planned time waits for it.
    """

    def __init__(
        self,
        config: EmulatedConfig,
        plan: StagePlan,
        source: TensorSource,
        backend: MatrixBackend,
        progress: PartLoaded | None = None,
    ) -> None:
        if plan.promise.rows > config.rows:
            raise UsageError(
                f"--rows {plan.promise.rows}: this emulated model knows the times of frames of at most "
                f"{config.rows} rows"
            )
        self._config = config
        self._waiting = Waiting()
        self.paging = Paging(plan.promise, plan.rewind)
        self.first, self.last = plan.layers.start == 0, plan.layers.stop == config.layers
        self.layers: Sequence[Layer] = tuple(
            EmulatedLayer(number, config.frame_s[number], plan, self._waiting, self.paging)
            for number in plan.layers
        )
        self._logits = np.zeros((config.rows, config.vocab), np.float32)
        _log.warning("stage_emulated", message="this stage is emulated: it waits and computes nothing")
        if progress is not None:
            progress("emulated stage", 1, 1)

    @property
    def hidden(self) -> int:
        """See `engine.model.StageModel`."""
        return self._config.hidden

    @property
    def vocab(self) -> int:
        """See `engine.model.StageModel`."""
        return self._config.vocab

    @property
    def head_rows(self) -> int:
        """See `engine.model.StageModel`."""
        return self._config.rows

    def embed(self, ids: I32, x: F32) -> None:
        """See `engine.model.StageModel`."""
        x.fill(0.0)
        put(x, 0, ids.astype(np.uint64))

    def enter(self, rows: RowTable, x: F32) -> None:
        """See `engine.model.StageModel`."""
        due = 0.0
        if not self.first:
            link = self._config.link_s[self.layers[0].number - 1]
            due = int(take(x[:1], 2)[0]) / 1e6 + link[len(x) - 1]
        self._waiting.frame(len(x), due)

    def logits(self, x: F32) -> F32:
        """See `engine.model.StageModel`."""
        self._waiting.start()
        logits = self._logits[: len(x)]
        logits.fill(0.0)
        logits[np.arange(len(x)), token_of(take(x, 0), self._config.vocab).astype(np.int64)] = 1.0
        self._waiting.wait(self._config.head_s[len(x) - 1], WorkPart.HEAD)
        # A token frame carries no time, so its way is waited for here: the last stage is later free by that.
        self._waiting.wait(self._config.link_s[-1][len(x) - 1], WorkPart.ROUTER)
        return logits

    def times(self) -> WorkTimes:
        """See `engine.model.StageModel`."""
        return self._waiting.times()
