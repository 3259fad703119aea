"""A ring in one process: stages chained by hand, and frames made from few words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cascadia_p2p.engine.kernel_backend import KernelBackend
from cascadia_p2p.engine.matrix import MatrixBackend
from cascadia_p2p.engine.model import StagePlan, TensorSource
from cascadia_p2p.engine.openvino.backend import OpenVINOBackend
from cascadia_p2p.engine.paging import Geometry
from cascadia_p2p.engine.slots import Table
from cascadia_p2p.engine.stage import Stage
from cascadia_p2p.matrices.encoding import Encoding, StoredMatrix
from cascadia_p2p.models.family import ModelConfig
from cascadia_p2p.models.stages import stage_builder
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.sample.weights import tensors
from cascadia_p2p.types import GREEDY, Promise, Sampling
from cascadia_p2p.wire.frames import OPERATION, SEGMENT, OperationKind, SegmentError, SegmentFlag

F32 = npt.NDArray[np.float32]
PROMISE = Promise(slots=3, context=400, rows=64)

AVX2 = ("haswell", "+sse2,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt")
"""Processor and features that numba is told to compile for; what is spelled alike shares the code."""


class SampleWeights:
    """A sample model's tensors, as a `TensorSource`."""

    def __init__(self, recipe: Recipe, seed: int = 0) -> None:
        self.tensors = dict(tensors(recipe, seed))
        self.tensors["head.weight"] = self.tensors["head.weight"][: recipe.vocab_valid].copy()

    def tensor(self, name: str) -> F32:
        return self.tensors[name]

    def matrix(self, name: str) -> StoredMatrix:
        return StoredMatrix.of(self.tensors[name])


@cache
def sample_weights(recipe: Recipe, seed: int = 0) -> SampleWeights:
    return SampleWeights(recipe, seed)


@dataclass(frozen=True)
class Window:
    """Consecutive rows of one stream in one slot."""

    stream: int
    start: int
    ids: Sequence[int]
    slot: int = 0
    want: bool = False


def segments(*windows: Window) -> Table:
    table = np.zeros(len(windows), SEGMENT)
    for segment, window in zip(table, windows, strict=True):
        segment["stream"], segment["slot"], segment["start"] = window.stream, window.slot, window.start
        segment["rows"] = len(window.ids)
        segment["flags"] = SegmentFlag.WANT_TOKEN if window.want else 0
    return table


Step: TypeAlias = (
    tuple[OperationKind, int, int]
    | tuple[OperationKind, int, int, int]
    | tuple[OperationKind, int, int, int, int]
)
"""Kind, stream, slot and, where the kind has them, position and entry."""


def operations(*steps: Step) -> Table:
    table = np.zeros(len(steps), OPERATION)
    for operation, step in zip(table, steps, strict=True):
        for name, value in zip(("kind", "stream", "slot", "position", "entry"), step, strict=False):
            operation[name] = value
    return table


NO_OPERATIONS = operations()


def own_blocks(promise: Promise, window: int | None, rewind: int) -> npt.NDArray[np.int32]:
    """A table that gives every slot blocks of its own, once and for all: int32 [slots, n]."""
    blocks = Geometry.of(promise, window, rewind).blocks
    return np.arange(promise.slots * blocks, dtype=np.int32).reshape(promise.slots, blocks)


def backend_for(precision: str, rows: int, threads: int) -> MatrixBackend:
    """Our kernels, or with "openvino" the reference."""
    if precision == "openvino":
        return OpenVINOBackend("CPU", threads, rows)
    return KernelBackend(precision, rows, threads)


class Stages:
    """All stages of one model of any family.

    Args:
        config: of the whole model.
        split: layers of each stage.
        source: the weights.
        cache: form of keys and values.
    """

    def __init__(
        self,
        config: ModelConfig,
        split: Sequence[int],
        source: TensorSource,
        promise: Promise = PROMISE,
        threads: int = 1,
        rewind: int = 16,
        precision: str = "exact",
        cache: Encoding = Encoding.F32,
    ) -> None:
        ends = np.cumsum(split).tolist()
        build = stage_builder(config)
        self.stages = [
            Stage(
                build(
                    StagePlan(range(end - count, end), promise, rewind, cache, call_bytes=1),
                    source,
                    backend_for(precision, promise.rows, threads),
                    None,
                ),
                promise,
                rewind,
                number,
            )
            for number, (end, count) in enumerate(zip(ends, split, strict=True))
        ]

    def start(self, stream: int, slot: int = 0, sampling: Sampling = GREEDY, alternatives: int = 0) -> None:
        table = operations((OperationKind.START, stream, slot))
        for name in ("seed", "top_k", "temperature", "top_p"):
            table[name] = getattr(sampling, name)
        table["logprobs"] = alternatives
        self.send([], table)

    def send(self, windows: Iterable[Window], table: Table = NO_OPERATIONS) -> tuple[Table, F32]:
        """Take one frame through all stages; the marked segments, and the rows behind the last layer."""
        windows = list(windows)
        marked = segments(*windows)
        rows: npt.NDArray[np.int32] | F32
        rows = np.array([token for window in windows for token in window.ids], np.int32)
        for stage in self.stages:
            rows = stage.apply(marked, table, rows, lambda: None)
        return marked, np.asarray(rows, np.float32)

    def logits(self, windows: Iterable[Window], table: Table = NO_OPERATIONS) -> F32:
        """The same, to logits; no segment may fail."""
        marked, rows = self.send(windows, table)
        assert (marked["error"] == SegmentError.NONE).all(), marked
        return self.stages[-1].logits(rows)

    def prefill(self, stream: int, ids: Sequence[int], window: int, slot: int = 0, start: int = 0) -> F32:
        """Logits of a whole sequence, fed in windows."""
        return np.concatenate(
            [
                self.logits([Window(stream, start + at, ids[at : at + window], slot)])
                for at in range(0, len(ids), window)
            ]
        )

    def generate(
        self,
        stream: int,
        prompt: Sequence[int],
        count: int,
        window: int,
        slot: int = 0,
        sampling: Sampling = GREEDY,
    ) -> tuple[int, ...]:
        """Prefill in windows, then decode by the records of the last stage."""
        self.start(stream, slot, sampling)
        made: list[int] = []
        ids, at = list(prompt), 0
        while len(made) < count:
            part = ids[at : at + window]
            marked, rows = self.send([Window(stream, at, part, slot, want=at + len(part) == len(ids))])
            at += len(part)
            records, _ = self.stages[-1].tokens(marked, rows)
            if at == len(ids):
                assert records["position"].tolist() == [at]
                assert records["status"].tolist() == [SegmentError.NONE]
                made.append(int(records["token"][0]))
                ids.append(made[-1])
            else:
                assert len(records) == 0
        return tuple(made)


class Ring(Stages):
    """All stages of a sample Inkling model.

    Args:
        recipe: the sample model.
        split: layers of each stage.
        weights: in place of those that belong to the recipe and seed 0.
    """

    def __init__(
        self,
        recipe: Recipe,
        split: Sequence[int],
        promise: Promise = PROMISE,
        weights: SampleWeights | None = None,
        threads: int = 1,
        rewind: int = 16,
        precision: str = "exact",
    ) -> None:
        source = weights or sample_weights(recipe)
        super().__init__(recipe.config(), split, source, promise, threads, rewind, precision)
