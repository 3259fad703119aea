"""One stage of the ring: takes a frame's rows through its layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import structlog

from cascadia_p2p.engine.kernels.rows import I32, RowTable
from cascadia_p2p.engine.matrix import F32
from cascadia_p2p.engine.model import StageModel
from cascadia_p2p.engine.paging import Mask
from cascadia_p2p.engine.sampling import Choice, SlotSampling
from cascadia_p2p.engine.slots import Slots, Table
from cascadia_p2p.engine.timing import WorkTimes
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import RECORD, SegmentError, SegmentFlag, alternative_table

Inputs: TypeAlias = npt.NDArray[Any]
"""Token ids, int32 [rows], on the first stage; float32 [rows, hidden] on the others."""

_NO_ALTERNATIVES: Final = alternative_table()
_NO_NUMBERS: Final = np.empty(0, np.uint32)

_log = structlog.get_logger()


class Stage:
    """The engine of one node.

    One thread uses it. A segment that can not be computed is marked with error and stage, its rows come out
    as zeros, and its stream's state is as before or failed; the frame's other segments are computed as if
    it were not there.

    Args:
        model: embedding, layers and head of this stage.
        promise: what the model's state was made for.
        rewind: positions by which a stream can go back.
        number: the stage's place in the ring, for marking.
    """

    def __init__(self, model: StageModel, promise: Promise, rewind: int = 16, number: int = 0) -> None:
        self._model = model
        self._promise = promise
        self._slots = Slots(promise, rewind, model.paging)
        self._sampling = SlotSampling(promise.slots)
        self.number = number

    @property
    def model(self) -> StageModel:
        """What the stage computes with."""
        return self._model

    @property
    def promise(self) -> Promise:
        """Slots, context and rows a frame that the stage has room for."""
        return self._promise

    def held(self, slot: int) -> int:
        """Positions that the slot's stream has here; 0 for a free slot."""
        return self._slots.held(slot)

    @property
    def taken(self) -> int:
        """Slots that hold a stream here; may be asked from any thread."""
        return self._slots.taken

    @property
    def misfits(self) -> int:
        """Operations so far that did not fit what slots and kept prefixes held; the head should send none."""
        return self._slots.misfits

    def times(self) -> WorkTimes:
        """What the frames so far have cost, by part; may be asked from any thread."""
        return self._model.times()

    def reset(self) -> None:
        """Drop every stream and every kept prefix, as at the start of an epoch."""
        self._slots.reset()

    def apply(self, segments: Table, operations: Table, inputs: Inputs, on_layer: Callable[[], None]) -> F32:
        """Apply a frame's operations, then compute its rows.

        Args:
            segments: SEGMENT table in row order; failed ones get error and stage put in.
            operations: OPERATION table.
            inputs: rows of all segments, marked ones included; not kept.
            on_layer: called behind every layer. What it raises abandons the frame: its streams have failed
                then,
                until they are started anew or the stage is reset.

        Returns:
            Fresh C-contiguous float32 [rows, hidden]; zeros for segments with an error.

        Raises:
            CascadiaError: more rows than promised, or inputs that do not belong to the segments.
        """
        self._slots.operate(operations)
        if self._model.last and len(operations):
            self._sampling.operate(operations)
        counts = segments["rows"].astype(np.int32)
        self._check(int(counts.sum()), inputs)
        right = self._slots.admit(segments, self.number)
        if self._model.first:
            self._refuse_unknown_ids(segments, right, counts, inputs)
        if right.all():
            chosen, out = segments, np.empty((len(inputs), self._model.hidden), np.float32)
            if len(chosen):
                self._compute(chosen, inputs, out, on_layer)
            return out
        out = np.zeros((len(inputs), self._model.hidden), np.float32)
        if right.any():
            chosen, picked = segments[right], np.repeat(right, counts)
            part = np.empty((int(picked.sum()), self._model.hidden), np.float32)
            self._compute(chosen, inputs[picked], part, on_layer)
            segments[right] = chosen
            out[picked] = part
        return out

    def tokens(self, segments: Table, hidden: F32) -> tuple[Table, Table]:
        """Choose the next token of every segment that wants one; last stage only.

        Args:
            segments: as `apply` left them.
            hidden: what `apply` returned.

        Returns:
            RECORD table in the order of segments: one for each that wants a token, with the position that
            the token takes, and one for each with an error, whose status and stage it carries. ALTERNATIVE
            table: those of all records, one after the other.
        """
        wants = (segments["flags"] & SegmentFlag.WANT_TOKEN) != 0
        wrong = segments["error"] != SegmentError.NONE
        asked = wants & ~wrong
        last_rows = np.cumsum(segments["rows"], dtype=np.int64) - 1
        records = np.zeros(len(segments), RECORD)
        records["stream"], records["slot"] = segments["stream"], segments["slot"]
        records["position"] = segments["start"] + segments["rows"]
        records["token"] = -1
        records["status"], records["stage"] = segments["error"], segments["stage"]
        alternatives: Table = _NO_ALTERNATIVES
        if asked.any():
            choice = self._choose(hidden[last_rows[asked]], segments, records, asked)
            records["token"][asked], records["logprob"][asked] = choice.tokens, choice.logprobs
            records["stage"][asked] = 0
            if choice.alternatives:
                records["alternatives"][asked] = choice.named
                alternatives = np.concatenate(choice.alternatives)
            if not choice.finite.all():
                self._mark_not_finite(records, asked, choice.finite)
        return records[wants | wrong], alternatives

    def logits(self, hidden: F32) -> F32:
        """Logits of rows behind the last layer, a copy: float32 [rows, vocab]; last stage only."""
        step = self._model.head_rows
        parts = [self._model.logits(hidden[at : at + step]).copy() for at in range(0, len(hidden), step)]
        return np.concatenate(parts) if parts else np.empty((0, self._model.vocab), np.float32)

    def _choose(self, rows: F32, segments: Table, records: Table, asked: Mask) -> Choice:
        choice, step = Choice(len(rows)), self._model.head_rows
        greedy = self._sampling.all_greedy
        slots = positions = _NO_NUMBERS
        if not greedy:
            slots, positions = segments["slot"][asked], records["position"][asked]
        for at in range(0, len(rows), step):
            end = at + step
            logits = self._model.logits(rows[at:end])
            choice.pick(logits, at)
            if not greedy:
                self._sampling.choose(logits, slots[at:end], positions[at:end], choice, at)
        return choice

    def _mark_not_finite(self, records: Table, asked: Mask, finite: Mask) -> None:
        wrong = np.flatnonzero(asked)[~finite]
        records["token"][wrong], records["logprob"][wrong] = -1, 0.0
        records["status"][wrong], records["stage"][wrong] = SegmentError.NON_FINITE, self.number
        _log.error("logits_not_finite", streams=records["stream"][wrong].tolist())

    def _check(self, rows: int, inputs: Inputs) -> None:
        if rows > self._promise.rows:
            raise CascadiaError(f"a frame has {rows} rows: this stage promised {self._promise.rows}")
        first = self._model.first
        shape = (rows,) if first else (rows, self._model.hidden)
        kind = np.int32 if first else np.float32
        if inputs.shape != shape or inputs.dtype != kind:
            raise CascadiaError(
                f"a frame of {rows} rows came with {inputs.dtype} {list(inputs.shape)}: "
                f"expected {np.dtype(kind)} {list(shape)}"
            )

    def _refuse_unknown_ids(self, segments: Table, right: Mask, counts: I32, ids: Inputs) -> None:
        unknown = (ids < 0) | (ids >= self._model.vocab)
        if not unknown.any():
            return
        owners = np.repeat(np.arange(len(segments)), counts)
        for index in np.unique(owners[unknown]):
            if right[index]:
                _log.error("token_id_out_of_range", stream=int(segments[index]["stream"]))
                self._fail(segments[index : index + 1], SegmentError.INTERNAL)
                right[index] = False

    def _compute(self, segments: Table, inputs: Inputs, x: F32, on_layer: Callable[[], None]) -> None:
        """Take admitted segments through all layers; `x` becomes the result."""
        rows = RowTable.from_windows(
            segments["slot"].astype(np.int32),
            segments["start"].astype(np.int32),
            segments["rows"].astype(np.int32),
        )
        failed = np.full(len(x), -1, np.int32)
        self._slots.begin(segments)
        if not self._run(partial(self._enter, rows, inputs, x), segments, x):
            return
        for layer in self._model.layers:
            if not self._run(partial(layer, rows, x, failed), segments, x):
                return
            on_layer()
        self._slots.commit(segments)
        if (failed >= 0).any():
            self._fail_not_finite(segments, x, failed)

    def _enter(self, rows: RowTable, inputs: Inputs, x: F32) -> None:
        if self._model.first:
            self._model.embed(np.ascontiguousarray(inputs, np.int32), x)
        else:
            x[...] = inputs
        self._model.enter(rows, x)

    def _run(self, step: Callable[[], None], segments: Table, x: F32) -> bool:
        """Whether a step went well; otherwise all segments have failed, and the ring goes on without them."""
        try:
            step()
        except Exception:
            _log.exception("stage_failed", stage=self.number, streams=segments["stream"].tolist())
            self._fail(segments, SegmentError.INTERNAL)
            x.fill(0.0)
            return False
        return True

    def _fail_not_finite(self, segments: Table, x: F32, failed: I32) -> None:
        ends = np.cumsum(segments["rows"], dtype=np.int64)
        for index, end in enumerate(ends.tolist()):
            segment = segments[index : index + 1]
            start = end - int(segment["rows"][0])
            layers = failed[start:end]
            if (layers >= 0).any():
                row = int(np.argmax(layers >= 0))
                _log.error(
                    "layer_not_finite",
                    layer=int(layers[layers >= 0].min()),
                    stream=int(segment["stream"][0]),
                    position=int(segment["start"][0]) + row,
                )
                self._fail(segment, SegmentError.NON_FINITE)
                x[start:end] = 0.0

    def _fail(self, segments: Table, error: SegmentError) -> None:
        segments["error"], segments["stage"] = error, self.number
        for slot in segments["slot"].tolist():
            self._slots.fail(slot, error)
