"""Carries the numbers of a checkpoint to their places in exported files, a bounded piece at a time.

A piece is whole stacks of matrices, or rows of one: whole blocks of sixteen outputs where the encoding has
blocks, and whole heads where the order of a head's rows changes. So pieces change nothing in what is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.matrices.encoding import F32, GROUP, OUTPUTS, Encoding, StoredMatrix, block_counts
from cascadia_p2p.matrices.energy import largest_magnitude
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

_Piece: TypeAlias = tuple[range, range]
"""Stacks, and rows of each of them."""

_Any = TypeVar("_Any", bound=np.generic)
_LARGEST: Final = 3.38e38
"""The largest magnitude that bfloat16 and scales in float32 take, rounding included."""

_LIMITS: Final = {
    # Stored as they are: all but what is no number.
    Encoding.F32: float(np.finfo(np.float32).max),
    # Scales are FP16.
    Encoding.INT4: LARGEST,
    Encoding.INT8_GROUPED: LARGEST,
}
"""The largest magnitude of a weight, where it is not `_LARGEST`."""


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
    unit = math.lcm(*(part.unit for part in parts))

    def read(piece: tuple[range, range]) -> _Lines:
        stacks, rows = piece
        begin = low + rows.start * step
        count = min(len(rows) * step, length - begin)
        start, numbers = (stacks.start * length + begin) * inputs, len(stacks) * count * inputs
        if first.lossless:
            return _Lines(stacks, rows, count, None, _Groups(source, name, start, numbers, inputs))
        return _Lines(stacks, rows, count, source.read(name, start, numbers).reshape(-1, inputs), None)

    pieces = _pieces(first.stacks, first.rows, inputs * step, unit, first.rows * step == length)
    # Closed at once when something fails, so that nobody reads on from a source that is closed.
    with closing(_ahead(read, pieces)) as pieces_read:
        for lines in pieces_read:
            for part in parts:
                writer.progress(sum(_copy_lines(lines, part, low, writer)))


def _copy_lines(lines: _Lines, part: _Part, low: int, writer: _Writer) -> Iterator[int]:
    """Write a part's rows among lines of which the first is row `low` of a stack; the bytes of each stack."""
    row, rows = lines.rows.start, len(lines.rows)
    for at, stack in enumerate(lines.stacks):
        chosen = slice(at * lines.count + part.start - low, (at + 1) * lines.count, part.step)
        if lines.values is not None:
            yield writer.write(part, stack, row, _in_order(part, lines.values[chosen][:rows]))
        elif lines.groups is not None:
            yield writer.write_kept(part, stack, row, lines.groups.matrix(part, chosen, rows))


@dataclass(frozen=True, slots=True)
class _Lines:
    """Rows of a source.

    Args:
        stacks: that they belong to.
        rows: of each stack, as the exported tensor counts them.
        count: lines of the source for each stack.
        values: float32 [lines, inputs], or None.
        groups: the lines in a `LOSSLESS` form, or None.
    """

    stacks: range
    rows: range
    count: int
    values: F32 | None
    groups: _Groups | None


def _ahead(read: Callable[[_Piece], _Lines], pieces: Iterator[_Piece]) -> Generator[_Lines, None, None]:
    """Read each piece while the one before is being encoded and written."""
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as reader:
        coming: Future[_Lines] | None = None
        for piece in pieces:
            following = reader.submit(read, piece)
            if coming is not None:
                yield coming.result()
            coming = following
        if coming is not None:
            yield coming.result()


class _Groups:
    """Lines of a source in one of the `LOSSLESS` forms."""

    def __init__(self, source: Source, name: str, start: int, count: int, inputs: int) -> None:
        groups = source.read_groups(name, start, count)
        self._codes = groups.codes.reshape(-1, inputs)
        self._scales = groups.scales.reshape(-1, inputs // GROUP)
        self._offsets = None if groups.offsets is None else groups.offsets.reshape(-1, inputs // GROUP)

    def matrix(self, part: _Part, lines: slice, rows: int) -> StoredMatrix:
        """So many rows of a part, from these lines."""
        codes = _in_order(part, self._codes[lines][:rows])
        scales = _in_order(part, self._scales[lines][:rows])
        offsets = None if self._offsets is None else _in_order(part, self._offsets[lines][:rows])
        return pack(part.entry.encoding, codes.shape, codes, scales, offsets)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes rows in the encoding of their tensor."""

    source: Source
    file: WholeFile
    progress: Callable[[int], None]
    watch: Watch | None

    def write(self, part: _Part, stack: int, row: int, values: F32) -> int:
        """Encode rows [rows, inputs] of a stack, and write them; how many bytes."""
        encoding = part.entry.encoding
        self._check(part, stack, row, values)
        if self.watch is not None:
            self.watch(part.plan, stack, row, values)
        return self._put(part, stack, row, encode(encoding, values))

    def write_kept(self, part: _Part, stack: int, row: int, matrix: StoredMatrix) -> int:
        """Write rows that are encoded already; how many bytes."""
        values = dense(matrix)
        self._check(part, stack, row, values)
        if self.watch is not None:
            self.watch(part.plan, stack, row, values)
        return self._put(part, stack, row, matrix)

    def _put(self, part: _Part, stack: int, row: int, matrix: StoredMatrix) -> int:
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
        return matrix.nbytes

    def _check(self, part: _Part, stack: int, row: int, values: F32) -> None:
        """See that these can be weights."""
        limit = _LIMITS.get(part.entry.encoding, _LARGEST)
        if largest_magnitude(values) <= limit:
            return
        at, column = (int(index[0]) for index in np.nonzero(~(np.abs(values) <= limit)))
        name, found = part.plan.source, float(values[at, column])
        where = [stack] * (part.stacks > 1) + [row + at, column]
        what = "no number" if not np.isfinite(found) else "no weight of a model"
        raise CheckpointError(
            f"{self.source.file_of(name)} holds {found:g} in {name} (at {where} of {part.plan.name}), "
            f"which is {what}: download it again"
        )


def _in_order(part: _Part, lines: npt.NDArray[_Any]) -> npt.NDArray[_Any]:
    """A part's rows with those of each head in our order."""
    if not (size := part.plan.paired):
        return lines
    heads: npt.NDArray[_Any] = lines.reshape(-1, size // 2, 2, lines.shape[-1]).swapaxes(1, 2)
    return heads.reshape(lines.shape)


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
