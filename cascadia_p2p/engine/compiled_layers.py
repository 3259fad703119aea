"""The layers of a stage on the CPU: a compiled program and the memory that it works in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from cascadia_p2p.compiled import compiling
from cascadia_p2p.compiled.simd import LANES
from cascadia_p2p.engine.kernels.attention_items import (
    ITEM,
    PARTIAL_NUMBERS,
    most_items,
    work_numbers,
)
from cascadia_p2p.engine.kernels.checks import expect
from cascadia_p2p.engine.kernels.frame import FRAME, Record, put_addresses
from cascadia_p2p.engine.kernels.mixture import MIXTURE
from cascadia_p2p.engine.kernels.products import SCRATCH
from cascadia_p2p.engine.kernels.program import (
    ATTENDED,
    HIDDEN,
    INNER,
    LAYER,
    LAYER_PHASES,
    OUTER,
    PARTS,
    ROUTER,
    RUN,
    work_layers,
)
from cascadia_p2p.engine.kernels.query_tiles import SEGMENT_BLOCKS
from cascadia_p2p.engine.kernels.router import Router
from cascadia_p2p.engine.kernels.rows import RowTable
from cascadia_p2p.engine.kernels.team import new_counters, run_team
from cascadia_p2p.engine.kernels.workspace import (
    MatrixTable,
    Workspace,
    describe_mixture,
    new_picks,
    wants_floats,
)
from cascadia_p2p.engine.matrix import F32, I32, GatedWeights
from cascadia_p2p.engine.timing import WorkClock, WorkPart
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.matrices.encoding import StoredMatrix

Step: TypeAlias = Callable[..., None]
"""A kernel that the program calls by address."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What a family does in its own way; None for what it does not have.

    Args:
        append: puts keys and values into their blocks.
        attend: takes one planned item.
        remember_attention: keeps what later rows' keys and values need.
        add: adds an update to the residual.
        remember_sum: keeps what later rows' sums need.
    """

    append: Step
    attend: Step
    add: Step
    remember_attention: Step | None = None
    remember_sum: Step | None = None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer.

    Args:
        number: its place in the model.
        inward: matrices that take the normed residual: queries, keys, values, and what else there is.
        output: takes attention's result.
        attention: `ATTENTION` [1].
        after_attention: `SUM` [1].
        after_mlp: `SUM` [1].
        always: MLPs that every row passes, or the one of a dense layer.
        scale: by which a dense MLP's result is multiplied.
        routed: of which a row passes `chosen`.
        router: chooses among them.
        chosen: routed members a row.
        kept: whatever has to live as long as the layer.
    """

    number: int
    inward: Sequence[StoredMatrix]
    output: StoredMatrix
    attention: Record
    after_attention: Record
    after_mlp: Record
    always: GatedWeights
    scale: float = 1.0
    routed: GatedWeights | None = None
    router: Router | None = None
    chosen: int = 0
    kept: Sequence[object] = ()

    @property
    def weight_bytes(self) -> int:
        """Bytes of its large matrices."""
        gated = [weights for weights in (self.always, self.routed) if weights is not None]
        stored = [matrix for weights in gated for matrix in (weights.gate, weights.up, weights.down)]
        return sum(matrix.nbytes for matrix in (*self.inward, self.output, *stored))


class CompiledLayers:
    """Layers that follow one another.

    Args:
        parts: of each layer.
        steps: of their family.
        planes: of codes of activations, or `EXACT`.
        normed: float32 [rows, hidden] for most rows a frame; holds the normed rows when a frame begins.
        angles: cosines and sines of the rows' angles, float32 [rows, pairs]; None for a family without.
        clock: counts time by part.
        call_bytes: weights that one call takes, about.
    """

    def __init__(
        self,
        parts: Sequence[LayerParts],
        steps: Steps,
        planes: int,
        normed: F32,
        angles: tuple[F32, F32] | None,
        clock: WorkClock,
        call_bytes: int,
    ) -> None:
        self._threads = compiling.threads()
        self._planes = planes
        self._rows, self._hidden = normed.shape
        self._workspace = Workspace(planes)
        self._workspace.keep((normed, angles))
        self._clock = clock
        self._parts = tuple(parts)
        self._frame = self._new_frame(normed, angles)
        self._tables = _Tables(self._workspace, parts, steps, normed)
        self._panels = self._new_panels()
        self._matrices = self._tables.matrices.records()
        self._scratch = self._workspace.array(np.float32, self._threads, SCRATCH)
        self._ticks = np.zeros(len(PARTS), np.int64)
        batches = _batches(parts, call_bytes)
        self.batches = tuple(Batch(self, batch, parts[batch.start].number) for batch in batches)
        longest = max(len(batch) for batch in batches)
        self._counters = new_counters(longest * LAYER_PHASES + 1)
        self._work_layers, self._run = compiling.address(work_layers), self._new_run()

    def __call__(self, batch: range, rows: RowTable, x: F32, failed: I32) -> None:
        """Take normed rows through the layers at these places, in place.

        Args:
            batch: places among the layers.
            rows: the frame's.
            x: float32 [rows, hidden], the residual; C-contiguous.
            failed: int32 [rows].

        Raises:
            CascadiaError: no such layers, more rows than there is room for, or arrays that do not belong
                together.
        """
        if batch.step != 1 or not 0 <= batch.start < batch.stop <= len(self._parts):
            raise CascadiaError(f"a stage of {len(self._parts)} layers has none at {batch}")
        count = min(len(x), self._rows)
        expect("x", x, (count, self._hidden))
        for name, array in (("failed", failed), ("slots", rows.slots), ("positions", rows.positions)):
            expect(name, array, (count,))
        if x.dtype != np.float32 or not x.flags.c_contiguous or failed.dtype != np.int32:
            raise CascadiaError(
                f"rows as {x.dtype} and marks as {failed.dtype} do not lie as kernels read them"
            )
        frame = self._frame
        frame["rows"] = len(x)
        frame["x"], frame["failed"] = x.ctypes.data, failed.ctypes.data
        frame["slots"], frame["positions"] = rows.slots.ctypes.data, rows.positions.ctypes.data
        frame["before"], frame["after"] = rows.before.ctypes.data, rows.after.ctypes.data
        self._ticks.fill(0)
        begin = time.perf_counter_ns()
        self._run["first"], self._run["last"] = batch.start, batch.stop
        self._counters.fill(0)
        run_team(self._work_layers, self._run.ctypes.data, self._threads)
        self._clock.share(time.perf_counter_ns() - begin, _PARTS, self._ticks)

    def _new_run(self) -> Record:
        """`RUN` [1] for all calls."""
        run = np.zeros(1, RUN)
        arrays = {
            "counters": self._counters,
            "frame": self._frame,
            "layers": self._tables.layers,
            "mixtures": self._tables.mixtures,
            "matrices": self._matrices,
            "picks": self._tables.picks,
            "panels": self._panels,
            "scratch": self._scratch,
            "work": self._work,
            "ticks": self._ticks,
        }
        put_addresses(run, arrays)
        run["matrix_count"], run["work_numbers"] = len(self._matrices), self._work.shape[1]
        run["planes"], run["threads"] = self._planes, self._threads
        return run

    def _new_frame(self, normed: F32, angles: tuple[F32, F32] | None) -> Record:
        frame, workspace = np.zeros(1, FRAME), self._workspace
        frame["hidden"], frame["workers"] = self._hidden, self._threads
        frame["normed"] = normed.ctypes.data
        if angles is not None:
            cosines, sines = angles
            frame["cosines"], frame["sines"] = cosines.ctypes.data, sines.ctypes.data
            frame["pairs"] = cosines.shape[1]
        attentions = [part.attention[0] for part in self._parts]
        splits = any(int(a["ring"]) > SEGMENT_BLOCKS for a in attentions)
        partials = PARTIAL_NUMBERS if self._threads > 1 and splits else 0
        places, numbers = 0, 0
        for a in attentions:
            group = int(a["heads"]) // int(a["kv_heads"])
            places = max(
                places, most_items(self._rows, int(a["kv_heads"]), group, partials, int(a["stored"]))
            )
            numbers = max(numbers, work_numbers(group, int(a["dim"]), int(a["stored"]), int(a["ranks"])))
        for name in ("items", "merges"):
            frame[name] = workspace.array(np.int32, places, ITEM).ctypes.data
        frame["places"], frame["partial_numbers"] = places, partials
        frame["partials"] = workspace.array(np.float32, partials).ctypes.data
        self._work = workspace.array(np.float32, self._threads, -(-numbers // LANES) * LANES)
        return frame

    def _new_panels(self) -> Record:
        parts = self._parts
        members = max(part.chosen + _count(part.always) for part in parts)
        sets = {
            HIDDEN: (self._rows, self._hidden, [m for part in parts for m in part.inward]),
            ATTENDED: (
                self._rows,
                max(part.output.inputs for part in parts),
                [part.output for part in parts],
            ),
            OUTER: (self._rows * members, self._hidden, [part.always.gate for part in parts]),
            INNER: (
                self._rows * members,
                max(part.always.down.inputs for part in parts),
                [part.always.down for part in parts],
            ),
        }
        gated = [weights for part in parts for weights in (part.always, part.routed) if weights is not None]
        for weights in gated:
            sets[OUTER][2].extend((weights.gate, weights.up))
            sets[INNER][2].append(weights.down)
        records = [
            self._workspace.panels(rows, inputs, wants_floats(*matrices))
            for _, (rows, inputs, matrices) in sorted(sets.items())
        ]
        return np.concatenate(records)


@dataclass(frozen=True, slots=True)
class Batch:
    """Layers of one call of the program; a `Layer`.

    Args:
        layers: of the stage.
        places: among them.
        number: of the first, in the model.
    """

    layers: CompiledLayers
    places: range
    number: int

    def __call__(self, rows: RowTable, x: F32, failed: I32) -> None:
        self.layers(self.places, rows, x, failed)


class _Tables:
    """The records of layers, mixtures and picks."""

    def __init__(self, workspace: Workspace, parts: Sequence[LayerParts], steps: Steps, normed: F32) -> None:
        rows, hidden = normed.shape
        self._workspace, self._rows = workspace, rows
        self.matrices = MatrixTable(workspace)
        self._normed = normed
        self._update = workspace.array(np.float32, rows, hidden)
        count = max(len(part.inward) for part in parts)
        widths = [max(p.inward[n].outputs for p in parts if n < len(p.inward)) for n in range(count)]
        self._targets = [workspace.array(np.float32, rows, width).ctypes.data for width in widths]
        width = max(part.output.inputs for part in parts)
        self._attended = workspace.array(np.float32, rows, width).ctypes.data
        self.layers = np.zeros(len(parts), LAYER)
        self.mixtures = np.zeros(len(parts), MIXTURE)
        self._shared_picks = self._new_picks(parts)
        self.picks = np.concatenate([self._layer(n, part, steps) for n, part in enumerate(parts)])

    def _new_picks(self, parts: Sequence[LayerParts]) -> Record:
        chosen = max(part.chosen for part in parts)
        always = max(_count(part.always) for part in parts)
        members = max(_members(part) for part in parts)
        record = new_picks(self._workspace, self._rows, chosen, members, always)
        record["x"], record["result"] = self._normed.ctypes.data, self._update.ctypes.data
        array = self._workspace.array
        record["ids"] = array(np.int32, self._rows, chosen).ctypes.data
        record["weights"] = array(np.float32, self._rows, chosen).ctypes.data
        record["always"] = array(np.float32, self._rows, always).ctypes.data
        return record

    def _layer(self, place: int, part: LayerParts, steps: Steps) -> Record:
        """Fill the records at a place; the layer's own `PICKS`."""
        _check(part, self._normed.shape[1])
        layer, address = self.layers[place], compiling.address
        inward = [self.matrices.add(m, self._targets[n]) for n, m in enumerate(part.inward)]
        layer["first_matrix"], layer["matrices"] = inward[0], len(inward)
        layer["in_floats"] = wants_floats(*part.inward)
        layer["output"] = self.matrices.add(part.output, self._update.ctypes.data)
        layer["out_floats"] = wants_floats(part.output)
        for name, target in zip("qkvr", self._targets, strict=False):
            part.attention[name] = target
        part.attention["out"] = self._attended
        for name in ("attention", "after_attention", "after_mlp"):
            record: Record = getattr(part, name)
            if name != "attention":
                record["update"] = self._update.ctypes.data
            self._workspace.keep(record)
            layer[name] = record.ctypes.data
        for name in ("append", "attend", "add", "remember_attention", "remember_sum"):
            step: Step | None = getattr(steps, name)
            layer[name] = 0 if step is None else address(step)
        self._workspace.keep(part)
        return self._mixture(place, part)

    def _mixture(self, place: int, part: LayerParts) -> Record:
        layer, always = self.layers[place], part.always
        layer["mixture"] = layer["picks"] = place
        routed = part.routed
        stack = None if routed is None else (routed.gate, routed.up, routed.down)
        own = (always.gate, always.up, always.down)
        describe_mixture(self.mixtures[place], self.matrices, stack, own, part.chosen)
        picks = self._shared_picks.copy()
        if part.router is None:
            scales = self._workspace.array(np.float32, self._rows)
            scales.fill(part.scale)
            picks["always"] = scales.ctypes.data
        else:
            layer["router"] = self._router(part.router, part.chosen)
        return picks

    def _router(self, router: Router, chosen: int) -> int:
        weight, bias, scale = router.parts
        record = np.zeros(1, ROUTER)
        record["weight"], record["bias"], record["scale"] = weight.ctypes.data, bias.ctypes.data, scale
        record["routed"], record["always"] = len(bias), len(weight) - len(bias)
        record["chosen"] = chosen
        record["logits"] = self._workspace.array(np.float32, self._rows, len(weight)).ctypes.data
        record["scores"] = self._workspace.array(np.float32, self._rows, len(bias)).ctypes.data
        for name, source in (("ids", "ids"), ("weights", "weights"), ("shared", "always")):
            record[name] = self._shared_picks[source]
        self._workspace.keep((record, router))
        return record.ctypes.data


def _check(part: LayerParts, hidden: int) -> None:
    """Refuse parts whose sizes do not fit together, before anything has their addresses."""
    attention, router, always = part.attention[0], part.router, _count(part.always)
    heads, kv_heads, dim, ranks = (int(attention[name]) for name in ("heads", "kv_heads", "dim", "ranks"))
    outputs = (heads * dim, kv_heads * dim, kv_heads * dim, heads * ranks)
    for name, matrix, width in zip("qkvr", part.inward, outputs, strict=False):
        expect(name, matrix, (width, hidden))
    expect("o", part.output, (hidden, heads * dim))
    expect("down", part.always.down, (*part.always.down.shape[:-2], hidden, part.always.gate.outputs))
    routed = 0 if part.routed is None else _count(part.routed)
    if router is None:
        if routed or always != 1:
            raise CascadiaError(f"a layer of {routed} and {always} experts has no router")
        return
    weight, bias, _ = router.parts
    expect("router", weight, (routed + always, hidden))
    expect("bias", bias, (routed,))
    if not (
        weight.flags.c_contiguous and bias.flags.c_contiguous and weight.dtype == bias.dtype == np.float32
    ):
        raise CascadiaError("a router does not lie as float32 in one piece, as the kernels read it")


_PARTS: Final = tuple(WorkPart(name) for name in PARTS)


def _count(weights: GatedWeights) -> int:
    """Members of a stack; 1 for a single MLP."""
    return weights.gate.shape[0] if len(weights.gate.shape) > 2 else 1


def _members(part: LayerParts) -> int:
    return _count(part.always) + (0 if part.routed is None else _count(part.routed))


def _batches(parts: Sequence[LayerParts], call_bytes: int) -> tuple[range, ...]:
    """Places of layers that one call of the program takes, so many bytes of weights or more."""
    batches: list[range] = []
    start = size = 0
    for place, part in enumerate(parts):
        size += part.weight_bytes
        if size >= call_bytes or place + 1 == len(parts):
            batches.append(range(start, place + 1))
            start, size = place + 1, 0
    return tuple(batches)
