"""Makes the plan: who takes which layers, what that needs, what does not fit, and how fast it will be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from cascadia_p2p.engine.footprint import Backend, Footprint
from cascadia_p2p.engine.kernels.blocks import BLOCK
from cascadia_p2p.models.sizes import Matrices, ModelSizes
from cascadia_p2p.planning.machine import GPU_ALLOCATION, GpuMemory, Machine, gb, gib
from cascadia_p2p.planning.measured import MeasuredNode
from cascadia_p2p.planning.needs import Demand, Needs, StageBytes
from cascadia_p2p.planning.predict import Prediction
from cascadia_p2p.planning.search import Arrangement, LeftOut, Place, Search
from cascadia_p2p.planning.split import Split, fewest_stages
from cascadia_p2p.planning.stagetime import Reading, StageTimes
from cascadia_p2p.types import Promise

_FEW: Final = (1, 2, 4, 8)
_WAYS: Final[tuple[tuple[Backend, GpuMemory | None, bool], ...]] = (
    (Backend.KERNELS, None, False),
    (Backend.OPENVINO_CPU, None, False),
    (Backend.OPENVINO_CPU, None, True),
    *((Backend.OPENVINO_GPU, limit, False) for limit in reversed(GpuMemory)),
)


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One node of the plan.

    Args:
        machine: the PC.
        layers: that it takes.
        need: bytes by kind.
        lack: bytes that it lacks, of all its memory or of the GPU's share, whichever lacks more; 0 if none.
        read: bytes that it reads for one token of a lone stream.
        seconds: for a frame at the planned number of streams; None without measurements.
        without: tokens a second that the ring would give without this node; None without measurements, and
            where the rest has no room.
    """

    machine: Machine
    layers: range
    need: StageBytes
    lack: int
    read: int
    seconds: float | None = None
    without: float | None = None

    @property
    def over_gpu(self) -> bool:
        """Whether it is the GPU's share that lacks."""
        return (
            self.machine.gpu is not None
            and self.need.gpu - self.machine.gpu > self.need.total - self.machine.usable
        )


@dataclass(frozen=True, slots=True)
class Option:
    """How far PCs like these get with one backend.

    Args:
        backend: who multiplies.
        gpu: what the GPU may take; None when the CPU multiplies.
        lean: whether the backend's needs, which vary, are taken at their least.
        slots: streams of the planned context that the planned number of PCs holds, at most the planned slots;
            0 when not one fits.
        fewest: PCs that hold all that is planned; None when no number does.
        planned: whether this is what was asked for.
    """

    backend: Backend
    gpu: GpuMemory | None
    lean: bool
    slots: int
    fewest: int | None
    planned: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan for one model on these PCs.

    Args:
        sizes: of the model.
        demand: what was asked.
        streams: for which speed was optimised.
        stages: in ring order.
        problem: why it can not work, in one sentence; empty when it can.
        advice: what else would work, a sentence each.
        options: what equal PCs hold, by backend; none for unequal ones or a split that is given.
        left_out: harmful nodes, with reasons.
        standby: nodes that have nothing to do.
        needed: why the slowest node stays although it slows the ring down; empty when there is no such thing.
        predictions: for several numbers of streams; none without measurements.
    """

    sizes: ModelSizes
    demand: Demand
    streams: int
    stages: tuple[PlannedStage, ...]
    problem: str
    advice: tuple[str, ...]
    options: tuple[Option, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    standby: tuple[str, ...] = ()
    needed: str = ""
    predictions: tuple[Prediction, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every node has room."""
        return not self.problem

    @property
    def split(self) -> Split:
        """Layers of each stage."""
        return tuple(len(stage.layers) for stage in self.stages)

    @property
    def read(self) -> dict[str, int]:
        """Bytes that all nodes together read for one token of a lone stream, by what they are.

        Its keys and values count at half of the promised context.
        """
        return Reading(self.sizes, self.demand.footprint, self.demand.promise.context // 2).by_part(1)


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned.

    Args:
        sizes: of the model.
        demand: slots, context, rows, forms of weights.
        machines: the PCs.
        measured: of each PC, in the same order; empty when nothing was measured.
        streams: for which speed is optimised.
        split: given by an export; None to find the best.
    """

    sizes: ModelSizes
    demand: Demand
    machines: tuple[Machine, ...]
    measured: tuple[MeasuredNode, ...] = ()
    streams: int = 1
    split: Split | None = None


def make_plan(question: Question) -> Plan:
    """The best plan, or the least bad one together with what is wrong with it."""
    return _Planner(question).plan()


class _Planner:
    def __init__(self, question: Question) -> None:
        self.question = question
        self.needs = Needs(question.sizes, question.demand)
        positions = question.demand.promise.context // 2
        self.reading = Reading(question.sizes, question.demand.footprint, positions)
        self.search = Search(self.needs, self.reading, question.streams)
        nodes: Sequence[MeasuredNode | None] = question.measured or [None] * len(question.machines)
        self.places = tuple(
            Place(machine, None if node is None else StageTimes(node, self.reading))
            for machine, node in zip(question.machines, nodes, strict=True)
        )

    def plan(self) -> Plan:
        layers = len(self.question.sizes.layers)
        most = layers if self.question.split is None else len(self.question.split)
        taken, spare = self.places[:most], self.places[most:]
        standby = tuple(place.name for place in spare)
        left_out: tuple[LeftOut, ...] = ()
        arrangement = self._arranged(taken)
        fits = arrangement is not None
        if arrangement is None:
            arrangement = self._least_bad(taken)
        elif self.question.measured and self.question.split is None:
            arrangement, left_out = self.search.without_harmful(arrangement)
        return Plan(
            sizes=self.question.sizes,
            demand=self.question.demand,
            streams=self.question.streams,
            stages=self._stages(arrangement),
            problem="" if fits else self._problem(arrangement),
            advice=() if fits else self._advice(taken),
            options=self._options(),
            left_out=left_out,
            standby=standby,
            needed=self._needed(arrangement) if fits else "",
            predictions=self._predictions(arrangement) if fits and self.question.measured else (),
        )

    def _arranged(self, places: tuple[Place, ...]) -> Arrangement | None:
        """The arrangement that fits, if there is one."""
        if self.needs.too_large() is not None:
            return None
        split = self.question.split
        if split is None:
            return self.search.best(places)
        if len(split) > len(places):
            return None
        arrangement = Arrangement(places, split)
        return arrangement if all(lack <= 0 for lack in self._lacks(arrangement)) else None

    def _least_bad(self, places: tuple[Place, ...]) -> Arrangement:
        split = self.question.split
        if split is None:
            return self.search.least_lack(places)
        return Arrangement(places, split[: len(places)])

    def _lacks(self, arrangement: Arrangement) -> list[int]:
        return [
            round(float(self.needs.lack(place.machine)[layers.start, layers.stop]))
            for place, layers in zip(arrangement.places, arrangement.layers, strict=True)
        ]

    def _stages(self, arrangement: Arrangement) -> tuple[PlannedStage, ...]:
        seconds: Sequence[float | None] = [None] * len(arrangement.places)
        without: Sequence[float | None] = seconds
        if self.question.measured:
            seconds = self.search.ring(arrangement).predict(self.question.streams).stages
            if self.question.split is None:
                without = self.search.rates_without(arrangement)
        lacks = self._lacks(arrangement)
        return tuple(
            PlannedStage(
                machine=place.machine,
                layers=layers,
                need=self.needs.stage(layers),
                lack=max(lack, 0),
                read=round(self.reading.stage(layers, 1)),
                seconds=time,
                without=rate,
            )
            for place, layers, lack, time, rate in zip(
                arrangement.places, arrangement.layers, lacks, seconds, without, strict=True
            )
        )

    # --- what is wrong, and what else would do --------------------------------------------------------------

    def _problem(self, arrangement: Arrangement) -> str:
        if (large := self.needs.too_large()) is not None:
            return _too_large(*large)
        split = self.question.split
        if split is not None and len(split) > len(arrangement.places):
            return (
                f"the model is split into {len(split)} shards and there are {len(arrangement.places)} PCs: "
                f"{_shards(len(arrangement.places), len(split) - 1)} would have no node"
            )
        stages = self._stages(arrangement)
        lacks: dict[tuple[str, bool], list[str]] = {}
        for stage in stages:
            if stage.lack:
                lacks.setdefault((gib(stage.lack), stage.over_gpu), []).append(stage.machine.name)
        named = [
            f"{_named(names)} {lack}{' of what the GPU may take' if over_gpu else ''}"
            for (lack, over_gpu), names in lacks.items()
        ]
        return f"it does not fit: {'; '.join(named)}"

    def _advice(self, places: tuple[Place, ...]) -> tuple[str, ...]:
        if self.needs.too_large() is not None:
            return ()
        promise = self.question.demand.promise
        slots = _largest(promise.slots - 1, lambda n: self._holds(places, replace(promise, slots=n)))
        blocks = _largest(
            (promise.context - 1) // BLOCK, lambda n: self._holds(places, replace(promise, context=n * BLOCK))
        )
        kept = _largest(promise.kept, lambda n: self._holds(places, replace(promise, kept=n)))
        ways: list[str] = []
        if promise.kept and (kept or self._holds(places, replace(promise, kept=0))):
            ways.append(f"--prefixes {kept}")
        if slots:
            ways.append(f"--slots {slots}")
        if blocks:
            ways.append(f"--context {blocks * BLOCK}")
        if ways:
            return (f"with {len(places)} such PCs it would fit with {' or with '.join(ways)}",)
        alone = replace(promise, slots=1, context=BLOCK, kept=0)
        least = "" if self._holds(places, alone) else ", not even one short stream: the weights are too large"
        return (f"no smaller promise of slots or context alone makes it fit{least}",)

    def _holds(self, places: tuple[Place, ...], promise: Promise) -> bool:
        question = replace(self.question, demand=replace(self.question.demand, promise=promise), measured=())
        return _Planner(question)._arranged(tuple(Place(place.machine) for place in places)) is not None

    def _options(self) -> tuple[Option, ...]:
        """What PCs like these hold, whoever multiplies."""
        question = self.question
        first = question.machines[0]
        unequal = any(replace(each, name="") != replace(first, name="") for each in question.machines)
        if unequal or question.split is not None:
            return ()
        found: list[Option] = []
        for backend, gpu, lean in _WAYS:
            footprint = replace(question.demand.footprint, backend=backend, lean=lean)
            if lean and not footprint.varies:
                continue
            limit = None if gpu is None else gpu.limit(first.shown)
            planned = footprint == question.demand.footprint and limit == first.gpu
            found.append(self._option(footprint, replace(first, gpu=limit), gpu, planned))
        return tuple(found)

    def _option(self, footprint: Footprint, machine: Machine, gpu: GpuMemory | None, planned: bool) -> Option:
        sizes, demand = self.question.sizes, replace(self.question.demand, footprint=footprint)
        count = min(len(self.question.machines), len(sizes.layers))

        def fewest(slots: int) -> int | None:
            needs = Needs(sizes, replace(demand, promise=replace(demand.promise, slots=slots)))
            return None if needs.too_large() is not None else fewest_stages(needs.lack(machine) <= 0)

        all_slots = fewest(demand.promise.slots)
        slots = _largest(demand.promise.slots, lambda n: (fewest(n) or count + 1) <= count)
        return Option(footprint.backend, gpu, footprint.lean, slots, all_slots, planned)

    def _needed(self, arrangement: Arrangement) -> str:
        """Why the slowest node can not be left out, where that would help."""
        if not self.question.measured or len(arrangement.places) < 2 or self.question.split is not None:
            return ""
        now = self.search.ring(arrangement).predict(self.question.streams)
        place = arrangement.places[now.slowest]
        others = [seconds for number, seconds in enumerate(now.stages) if number != now.slowest]
        missing = self.search.missing_without(arrangement, place)
        if not missing or now.stages[now.slowest] < 1.25 * float(np.mean(others)):
            return ""
        return (
            f"{place.name} slows the ring down, but is needed: without it {gib(missing)} would be missing "
            "on another node"
        )

    def _predictions(self, arrangement: Arrangement) -> tuple[Prediction, ...]:
        ring = self.search.ring(arrangement)
        stages, streams = len(arrangement.places), self.question.streams
        slots = self.question.demand.promise.slots
        wanted = {*_FEW, stages, 2 * stages, 4 * stages, 8 * stages, streams, slots}
        return tuple(ring.predict(n) for n in sorted(wanted) if n <= slots or n == streams)


def _named(names: Sequence[str]) -> str:
    """Who lacks something, in words."""
    if len(names) == 1:
        return f"{names[0]} lacks"
    if len(names) <= 3:
        return f"{', '.join(names)} each lack"
    return f"{len(names)} nodes, {names[0]} to {names[-1]}, each lack"


def _shards(first: int, last: int) -> str:
    return f"shard {first}" if first == last else f"shards {first} to {last}"


def _too_large(matrices: Matrices, count: int) -> str:
    return (
        f"{matrices.part}: one tensor is {gb(count)}, and the GPU allocates at most {gb(GPU_ALLOCATION)} in "
        "one piece; choose a smaller form, such as int8 or int4"
    )


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
