"""Decides where in an exported file every tensor lies, and carries the numbers there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.layout import Pick, TensorPlan
from cascadia_p2p.shards.encodings import Encodings
from cascadia_p2p.shards.files import WholeFile
from cascadia_p2p.shards.manifest import TensorEntry
from cascadia_p2p.shards.source import Source

ALIGNMENT = 64
PIECE_NUMBERS = 2**20
"""Numbers read at once, unless a single row has more: what bounds an export's memory."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor and its place in the file."""

    plan: TensorPlan
    entry: TensorEntry


def place(plans: Sequence[TensorPlan], encodings: Encodings) -> tuple[tuple[Placed, ...], int]:
    """Put tensors one after the other, each at a multiple of 64 bytes; also the size of the file."""
    placed: list[Placed] = []
    end = 0
    for plan in plans:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        nbytes = 4 * math.prod(plan.shape)
        entry = TensorEntry(
            shape=list(plan.shape), encoding=encodings.of(plan.role), offset=offset, nbytes=nbytes
        )
        placed.append(Placed(plan, entry))
        end = offset + nbytes
    return tuple(placed), end


def check_source(plan: TensorPlan, source: Source) -> None:
    """See that the checkpoint's tensor can be what the plan takes it for.

    Raises:
        CheckpointError: it has another shape.
    """
    if (shape := source.shape(plan.source)) not in plan.source_shapes:
        expected = " or ".join(str(list(known)) for known in plan.source_shapes)
        raise CheckpointError(
            f"{source.file_of(plan.source)} holds {plan.source} of shape {list(shape)}: "
            f"by config.json it should be {expected}"
        )


def copy(source: Source, placed: Sequence[Placed], file: WholeFile, progress: Callable[[int], None]) -> None:
    """Write every tensor of a file, reading each source once and a bounded piece at a time.

    Args:
        source: the checkpoint.
        placed: the file's tensors, in order.
        file: where to write.
        progress: told the number of bytes of each piece written.

    Raises:
        CheckpointError: the source can not be read.
    """
    for name, group in groupby(placed, key=lambda item: item.plan.source):
        parts = list(group)
        if parts[0].plan.paired:
            _copy_unpaired(source, parts[0], file, progress)
            continue
        shape = source.shape(name)
        axis = parts[0].plan.pick.axis if parts[0].plan.pick else max(0, len(shape) - 1)
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        length = shape[axis]
        for stack, row in _pieces(outer, length, inner):
            start = (stack.start * length + row.start) * inner
            numbers = source.read(name, start, len(stack) * len(row) * inner)
            values = numbers.reshape(len(stack), len(row), inner)
            for part in parts:
                pick = part.plan.pick or Pick(axis, 0, 1, length)
                first, last = _picked(pick, row)
                if first < last:
                    begin = pick.start + first * pick.step - row.start
                    chosen = values[:, begin : begin + (last - first - 1) * pick.step + 1 : pick.step]
                    at = part.entry.offset + 4 * (stack.start * pick.count + first) * inner
                    file.write(at, chosen)
                    progress(chosen.nbytes)
        file.settle(max(part.entry.offset + part.entry.nbytes for part in parts))


def _copy_unpaired(source: Source, item: Placed, file: WholeFile, progress: Callable[[int], None]) -> None:
    """Write a tensor whose rows stand in pairs within each head, with the halves of each head apart."""
    plan, (rows, *rest) = item.plan, item.plan.shape
    inner = math.prod(rest)
    heads, half = rows // plan.paired, plan.paired // 2
    step = max(1, PIECE_NUMBERS // (plan.paired * inner))
    at = item.entry.offset
    for head in range(0, heads, step):
        count = min(step, heads - head)
        size = plan.paired * inner
        numbers = source.read(plan.source, head * size, count * size)
        chosen = numbers.reshape(count, half, 2, inner).swapaxes(1, 2)
        file.write(at, chosen)
        progress(chosen.nbytes)
        at += chosen.nbytes


def _pieces(outer: int, length: int, inner: int) -> Iterator[tuple[range, range]]:
    """Cut `outer` stacks of `length` rows into pieces: several whole stacks, or rows of one."""
    if length * inner <= PIECE_NUMBERS:
        stacks = max(1, PIECE_NUMBERS // max(1, length * inner))
        for start in range(0, outer, stacks):
            yield range(start, min(outer, start + stacks)), range(length)
        return
    rows = max(1, PIECE_NUMBERS // inner)
    for stack in range(outer):
        for start in range(0, length, rows):
            yield range(stack, stack + 1), range(start, min(length, start + rows))


def _picked(pick: Pick, rows: range) -> tuple[int, int]:
    """Which of the picked rows, counted from 0, are among these rows: first and one past the last."""
    first = -(-(rows.start - pick.start) // pick.step)
    last = -(-(rows.stop - pick.start) // pick.step)
    return min(max(0, first), pick.count), min(max(0, last), pick.count)
