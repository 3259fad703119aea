"""Carries the numbers of a checkpoint to their places in exported files, a bounded piece at a time.

A piece is whole stacks of matrices, or rows of one: whole blocks of sixteen outputs where the encoding has
blocks, and whole heads where the order of a head's rows changes. So pieces change nothing in what is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.matrices.encoding import F32, GROUP, OUTPUTS, Encoding, StoredMatrix, block_counts
from cascadia_p2p.matrices.packing import dense, pack
from cascadia_p2p.matrices.quantise import LARGEST, encode
from cascadia_p2p.models.layout import TensorPlan
from cascadia_p2p.shards.encodings import LOSSLESS
from cascadia_p2p.shards.files import WholeFile
from cascadia_p2p.shards.placement import Placed
from cascadia_p2p.shards.source import Source

PIECE_NUMBERS = 2**20
"""Numbers read at once, unless a single block of rows has more: what bounds an export's memory."""

Watch = Callable[[TensorPlan, int, int, F32], None]
"""Told of each piece of a tensor: its plan, the stack, the first row, and float32 [rows, inputs]."""

_Any = TypeVar("_Any", bound=np.generic)
_LARGEST: Final = 3.38e38
"""The largest magnitude that bfloat16 and float32 take, rounding included."""

_FP16_SCALES: Final = (Encoding.INT4, Encoding.INT8_GROUPED)


def copy(
    source: Source,
    placed: Sequence[Placed],
    file: WholeFile,
    progress: Callable[[int], None],
    watch: Watch | None = None,
) -> None:
    """Write every tensor of a file, reading each number once.

    Args:
        source: the checkpoint.
        placed: the file's tensors, in order.
        file: where to write.
        progress: told the number of bytes of each piece written.
        watch: told of all numbers.

    Raises:
        CheckpointError: the source can not be read, or holds what is no weight.
    """
    for name, group in groupby(placed, key=lambda item: item.plan.source):
        parts = [_Part(source, item) for item in group]
        # What fills the room between tensors, so that the next bytes are hashed as they pass.
        file.settle(min(part.entry.offset for part in parts))
        interleaved = [part for part in parts if part.step > 1]
        alone = [[part] for part in parts if part.step == 1]
        for together in ([interleaved] if interleaved else []) + alone:
            _copy_parts(source, name, together, _Writer(source, file, progress, watch))
        file.settle(max(part.entry.offset + part.entry.nbytes for part in parts))


class _Part:
    """A tensor as stacks of rows, and where its rows are in the source.

    Row `k` of stack `s` is row `start + k * step` of the source's stack `s`, which has `length` rows.
    """

    def __init__(self, source: Source, item: Placed) -> None:
        self.plan, self.entry = item.plan, item.entry
        shape = item.plan.shape
        self.rows, self.inputs = (shape[-2], shape[-1]) if len(shape) > 1 else (shape[0], 1)
        self.stacks = math.prod(shape[:-2])
        pick = item.plan.pick
        self.start, self.step = (pick.start, pick.step) if pick else (0, 1)
        self.length = source.shape(item.plan.source)[pick.axis] if pick else self.rows
        form = source.form(item.plan.source)
        self.lossless = LOSSLESS.get(form.kind) is item.entry.encoding
        blocks = item.entry.encoding.block_bytes is not None
        self.unit = math.lcm(OUTPUTS if blocks else 1, max(1, item.plan.paired))
        """Rows of which a piece has a whole number, unless it is the last of its stack."""


def _copy_parts(source: Source, name: str, parts: Sequence[_Part], writer: _Writer) -> None:
    """Copy parts whose rows take turns in the source, or one part alone."""
    first = parts[0]
    low, step, length, inputs = min(part.start for part in parts), first.step, first.length, first.inputs
    whole = first.rows * step == length
    unit = math.lcm(*(part.unit for part in parts))
    for stacks, rows in _pieces(first.stacks, first.rows, inputs * step, unit, whole):
        begin = low + rows.start * step
        count = min(len(rows) * step, length - begin)
        place = (stacks.start * length + begin) * inputs
        if first.lossless:
            groups = source.read_groups(name, place, len(stacks) * count * inputs)
            for at, stack in enumerate(stacks):
                lines = slice(at * count, (at + 1) * count)
                codes = groups.codes.reshape(-1, inputs)[lines]
                numbers = [groups.scales, groups.scales if groups.offsets is None else groups.offsets]
                scales, offsets = (each.reshape(-1, inputs // GROUP)[lines] for each in numbers)
                for part in parts:
                    picked = [_picked(part, low, len(rows), each) for each in (scales, offsets)]
                    kept = pack(
                        part.entry.encoding,
                        (len(rows), inputs),
                        _picked(part, low, len(rows), codes),
                        picked[0],
                        None if groups.offsets is None else picked[1],
                    )
                    writer.write_kept(part, stack, rows.start, kept)
            continue
        values = source.read(name, place, len(stacks) * count * inputs).reshape(len(stacks), count, inputs)
        for part in parts:
            for at, stack in enumerate(stacks):
                writer.write(part, stack, rows.start, _picked(part, low, len(rows), values[at]))


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes rows in the encoding of their tensor."""

    source: Source
    file: WholeFile
    progress: Callable[[int], None]
    watch: Watch | None

    def write(self, part: _Part, stack: int, row: int, values: F32) -> None:
        """Encode rows [rows, inputs] of a stack, and write them."""
        encoding = part.entry.encoding
        if encoding is not Encoding.F32:
            self._check(part, stack, row, values)
        if self.watch is not None:
            self.watch(part.plan, stack, row, values)
        self._put(part, stack, row, encode(encoding, values))

    def write_kept(self, part: _Part, stack: int, row: int, matrix: StoredMatrix) -> None:
        """Write rows that are encoded already."""
        values = dense(matrix)
        self._check(part, stack, row, values)
        if self.watch is not None:
            self.watch(part.plan, stack, row, values)
        self._put(part, stack, row, matrix)

    def _put(self, part: _Part, stack: int, row: int, matrix: StoredMatrix) -> None:
        entry = part.entry
        block = matrix.encoding.block_bytes
        if block is None:
            before = (stack * part.rows + row) * part.inputs
            self.file.write(entry.offset + before * matrix.codes.itemsize, matrix.codes)
        else:
            high, wide = block_counts((part.rows, part.inputs))
            before = stack * high + row // OUTPUTS
            self.file.write(entry.offset + before * wide * block, matrix.codes)
            if matrix.scales is not None:
                scales = entry.offset + part.stacks * high * wide * block
                self.file.write(scales + before * OUTPUTS * matrix.scales.itemsize, matrix.scales)
        self.progress(matrix.nbytes)

    def _check(self, part: _Part, stack: int, row: int, values: F32) -> None:
        """See that these can be weights."""
        largest = max(float(values.max(initial=0.0)), -float(values.min(initial=0.0)))
        limit = LARGEST if part.entry.encoding in _FP16_SCALES else _LARGEST
        if largest <= limit:
            return
        at, column = (int(index[0]) for index in np.nonzero(~(np.abs(values) <= limit)))
        name, found = part.plan.source, float(values[at, column])
        where = [stack] * (part.stacks > 1) + [row + at, column]
        what = "no number" if not np.isfinite(found) else "no weight of a model"
        raise CheckpointError(
            f"{self.source.file_of(name)} holds {found:g} in {name} (at {where} of {part.plan.name}), "
            f"which is {what}: download it again"
        )


def _picked(part: _Part, low: int, count: int, lines: npt.NDArray[_Any]) -> npt.NDArray[_Any]:
    """A part's rows among lines of the source, `count` of them, each head's in our order."""
    chosen = lines[part.start - low :: part.step][:count]
    size = part.plan.paired
    if not size:
        return chosen
    heads: npt.NDArray[Any] = chosen.reshape(-1, size // 2, 2, chosen.shape[-1]).swapaxes(1, 2)
    return heads.reshape(chosen.shape)


def _pieces(stacks: int, rows: int, inputs: int, unit: int, whole: bool) -> Iterator[tuple[range, range]]:
    """Cut stacks of rows into pieces: several whole stacks where `whole`, or rows of one."""
    if rows * inputs <= PIECE_NUMBERS:
        some = max(1, PIECE_NUMBERS // max(1, rows * inputs)) if whole else 1
        for start in range(0, stacks, some):
            yield range(start, min(stacks, start + some)), range(rows)
        return
    count = max(1, PIECE_NUMBERS // (inputs * unit)) * unit
    for stack in range(stacks):
        for start in range(0, rows, count):
            yield range(stack, stack + 1), range(start, min(rows, start + count))
