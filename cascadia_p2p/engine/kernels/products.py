"""Products of stored matrices with panels of activations: a block of sixteen outputs at a time.

A set of rows lies in panels of nearly equal size, at most `panel_limit(planes)` rows each, one after the
other: as codes for coded matrices, as float32 for the others and with `EXACT`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numba
import numpy as np
import numpy.typing as npt

from cascadia_p2p.compiled.addresses import call, floats, pointer
from cascadia_p2p.compiled.compiling import address, kernel, part
from cascadia_p2p.engine.kernels.checks import expect
from cascadia_p2p.engine.kernels.dots import dot_int4, dot_int4_affine, dot_int8, dot_int8_grouped
from cascadia_p2p.engine.kernels.exact_dots import (
    MOST_ROWS,
    exact_dot_f32,
    exact_dot_int4,
    exact_dot_int4_affine,
    exact_dot_int8,
    exact_dot_int8_grouped,
)
from cascadia_p2p.engine.kernels.frame import record_of
from cascadia_p2p.engine.kernels.instructions import instructions
from cascadia_p2p.engine.kernels.panels import put_codes, put_floats
from cascadia_p2p.engine.kernels.team import claim, done, wait
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.matrices.encoding import ALIGNMENT, INPUTS, OUTPUTS, Encoding, StoredMatrix, block_counts

EXACT: Final = 0
"""Planes of float32 activations."""

_F32, _INT4, _INT8, _GROUPED, _AFFINE = range(5)
_KINDS: Final[dict[Encoding, tuple[int, Callable[..., None] | None, Callable[..., None]]]] = {
    Encoding.F32: (_F32, None, exact_dot_f32),
    Encoding.INT4: (_INT4, dot_int4, exact_dot_int4),
    Encoding.INT4_AFFINE: (_AFFINE, dot_int4_affine, exact_dot_int4_affine),
    Encoding.INT8: (_INT8, dot_int8, exact_dot_int8),
    Encoding.INT8_GROUPED: (_GROUPED, dot_int8_grouped, exact_dot_int8_grouped),
}
"""A number for each encoding, and what multiplies its block rows by codes and by float32 numbers."""

_chosen = instructions()
_MOST: Final = 4 if _chosen is None else _chosen.most_rows
_AHEAD: Final = 2048
"""Bytes of weights that a pass asks for in advance when it is the only one over a block row."""

_SHARES: Final = 32
"""Chunks a thread, where work is large enough: what is left to wait for at the end is one chunk."""

_LEAST_CHUNK: Final = 48 * 2**10
"""Bytes of weights that are worth a claim."""

MATRIX: Final = record_of("codes scales encoding outputs inputs blocks high block_row target dot exact_dot")
"""A stored matrix, or a stack of such, as kernels see it.

Addresses of codes and scales, the encoding's number, outputs, inputs, blocks of inputs, blocks of outputs,
bytes of a block row, the address that a product's float32 [rows][outputs] goes to, and those of the code
for codes and for float32 activations.
"""

ACTIVATIONS: Final = record_of("codes scales offsets numbers")
"""Addresses of a set of panels: see `panels`; `numbers` are float32 rows of whole blocks."""

Matrix: TypeAlias = Any
Matrices: TypeAlias = npt.NDArray[np.void]
Panels: TypeAlias = Any

PROJECTING: Final = record_of("counters matrices count panels x rows planes floats_too threads scratch")
"""One call of several matrices: addresses of counters of two phases at zero, of `MATRIX` [count] and
`ACTIVATIONS` [1], of float32 x [rows][inputs]; planes of codes, whether float32 numbers are wanted beside
them; threads; and address of float32 scratch [threads][SCRATCH]."""

SCRATCH: Final = 4 * 8 * OUTPUTS
"""Float32 numbers that a thread works in while it multiplies."""


def describe(record: np.void, matrix: StoredMatrix, target: int = 0) -> None:
    """Fill a `MATRIX` record; the matrix has to be kept alive for as long as the record is used.

    Raises:
        CascadiaError: the kernels have no code for the encoding, or the numbers are not as they read them.
    """
    block = matrix.encoding.block_bytes
    if matrix.encoding not in _KINDS:
        raise CascadiaError(f"kernels do not multiply {matrix.encoding} matrices: export the model again")
    if len(matrix.shape) < 2 or min(matrix.shape) < 1:
        raise CascadiaError(f"{list(matrix.shape)} is not the shape of a matrix or of a stack of such")
    _check_memory(matrix, matrix.codes, *((np.float32, 4) if block is None else (np.uint8, ALIGNMENT)))
    expect("codes", matrix.codes, _codes_shape(matrix))
    if matrix.encoding is Encoding.INT8:
        outputs = -(-matrix.outputs // OUTPUTS) * OUTPUTS
        scales = np.asarray(matrix.scales)
        expect("scales", scales, (*matrix.shape[:-2], outputs))
        _check_memory(matrix, scales, np.float32, 4)
    blocks = -(-matrix.inputs // INPUTS)
    record["codes"] = matrix.codes.ctypes.data
    record["scales"] = 0 if matrix.scales is None else matrix.scales.ctypes.data
    number, dot, exact_dot = _KINDS[matrix.encoding]
    record["encoding"] = number
    record["dot"] = 0 if dot is None else address(dot)
    record["exact_dot"] = address(exact_dot)
    record["outputs"], record["inputs"] = matrix.outputs, matrix.inputs
    record["blocks"], record["high"] = blocks, -(-matrix.outputs // OUTPUTS)
    record["block_row"] = OUTPUTS * 4 * matrix.inputs if block is None else blocks * block
    record["target"] = target


def _check_memory(matrix: StoredMatrix, array: npt.NDArray[Any], kind: type, alignment: int) -> None:
    if array.dtype != kind or not array.flags.c_contiguous or array.ctypes.data % alignment:
        raise CascadiaError(
            f"a matrix {list(matrix.shape)} of {matrix.encoding} does not lie as {np.dtype(kind)} in one "
            f"piece at a multiple of {alignment} bytes, as the kernels read it"
        )


def _codes_shape(matrix: StoredMatrix) -> tuple[int, ...]:
    block = matrix.encoding.block_bytes
    return matrix.shape if block is None else (*matrix.shape[:-2], *block_counts(matrix.shape), block)


@part
def panel_limit(planes: int) -> int:
    """Rows of a panel, at most."""
    return MOST_ROWS if planes == 0 else max(1, _MOST // planes)


@part
def panel_start(rows: int, panels: int, panel: int) -> int:
    """The first row of one of so many nearly equal panels."""
    return rows * panel // panels


@part
def put_row(
    x: int, inputs: int, panels: Panels, first: int, rows: int, row: int, planes: int, floats_too: bool
) -> None:
    """Put one row into a panel that starts behind `first` others of the set.

    Args:
        x: address of float32 [inputs].
        inputs: of the matrices to come.
        panels: `ACTIVATIONS`.
        first: rows of the set in front of the panel.
        rows: of the panel.
        row: the row's place in it.
        planes: of codes; `EXACT` makes none.
        floats_too: whether float32 numbers are wanted beside codes.
    """
    width = (inputs + INPUTS - 1) // INPUTS * INPUTS
    if planes == 0 or floats_too:
        put_floats(x, inputs, panels.numbers + (first + row) * width * 4, width)
    if planes > 0:
        at = first * planes * width
        put_codes(
            x,
            inputs,
            panels.codes + at,
            panels.scales + at // 8,
            panels.offsets + at // 8,
            rows,
            row,
            planes,
        )


@part
def block_product(
    m: Matrix,
    index: int,
    block: int,
    panels: Panels,
    first: int,
    rows: int,
    planes: int,
    turn: int,
    turns: int,
    distance: int,
    out: int,
) -> None:
    """Sixteen outputs of one matrix for one panel: float32 [rows][16] at address `out`, of room for [8][16].

    Args:
        m: `MATRIX`.
        index: of the matrix in its stack.
        block: of outputs.
        panels: `ACTIVATIONS`.
        first: rows of the set in front of the panel.
        rows: of the panel.
        planes: of codes, or `EXACT`.
        turn: passes over the block row before this one, each for another panel.
        turns: passes over it in all.
        distance: block rows to the one of this matrix that comes next but for passes of the same group.
        out: address; outputs beyond the matrix mean nothing.
    """
    width = m.blocks * INPUTS
    if planes == 0 or m.encoding == _F32:
        _block_of_numbers(m, index, block, panels.numbers + first * width * 4, rows, width * 4, out)
    else:
        weights = m.codes + (index * m.high + block) * m.block_row
        at = first * planes * width
        codes, scales, offsets = panels.codes + at, panels.scales + at // 8, panels.offsets + at // 8
        ahead, step = _asked(m, turn, turns, distance)
        wide = rows * planes
        call(m.dot, (wide, weights, codes, scales, offsets, out, m.blocks, ahead, step))
        if planes == 2:
            result = floats(out, 2 * rows * OUTPUTS)
            for r in range(rows):
                for n in range(OUTPUTS):
                    at = 2 * r * OUTPUTS + n
                    result[r * OUTPUTS + n] = result[at] + result[at + OUTPUTS]
    if m.encoding == _INT8:
        result = floats(out, rows * OUTPUTS)
        own = floats(m.scales + 4 * (index * m.high + block) * OUTPUTS, OUTPUTS)
        for r in range(rows):
            for n in range(OUTPUTS):
                result[r * OUTPUTS + n] *= own[n]


@part
def _asked(m: Matrix, turn: int, turns: int, distance: int) -> tuple[int, int]:
    """Which weights a pass asks for: how many bytes ahead it begins, and how many further with each block.

    A single pass stays a little ahead of itself. Of several, the first two fetch half of a later block row
    each, while they compute with what is in the cache already.
    """
    size = m.block_row // m.blocks
    if turns == 1:
        return _AHEAD, size
    if turn < 2:
        return distance * m.block_row + turn * (m.block_row // 2), size // 2
    return 0, size


@part
def _block_of_numbers(m: Matrix, index: int, block: int, x: int, rows: int, stride: int, out: int) -> None:
    """The same with float32 activations, a few rows at a time."""
    if m.encoding == _F32:
        weights = m.codes + 4 * (index * m.outputs + block * OUTPUTS) * m.inputs
    else:
        weights = m.codes + (index * m.high + block) * m.block_row
    for at in range(0, rows, MOST_ROWS):
        count = min(MOST_ROWS, rows - at)
        start, target = x + at * stride, out + 64 * at
        if m.encoding == _F32:
            outputs = min(OUTPUTS, m.outputs - block * OUTPUTS)
            call(m.exact_dot, (count, weights, start, target, m.inputs, stride, outputs))
        else:
            call(m.exact_dot, (count, weights, start, target, m.blocks, stride))


@part
def chunk_size(items: int, item_bytes: int, threads: int) -> int:
    """Items of a chunk."""
    least = (_LEAST_CHUNK + item_bytes - 1) // max(item_bytes, 1)
    return max(1, least, items // (_SHARES * threads))


@part
def project(
    counters: int,
    phase: int,
    matrices: Matrices,
    first: int,
    count: int,
    panels: Panels,
    rows: int,
    planes: int,
    threads: int,
    scratch: int,
) -> None:
    """One phase: all rows of a set through several matrices of one width, each to its target.

    Args:
        counters: address of the team's.
        phase: its number.
        matrices: `MATRIX` [n].
        first: of the matrices to take.
        count: how many follow one another.
        panels: `ACTIVATIONS` that hold the rows.
        rows: of the set.
        planes: of codes, or `EXACT`.
        threads: of the team.
        scratch: address of float32 [8][16] of this thread.
    """
    total, largest = 0, 1
    for n in range(first, first + count):
        total += matrices[n].high
        largest = max(largest, matrices[n].block_row)
    size = chunk_size(total, largest, threads)
    chunks = (total + size - 1) // size
    while True:
        chunk = claim(counters, phase, chunks)
        if chunk < 0:
            break
        n, block = first, chunk * size
        while block >= matrices[n].high:
            block -= matrices[n].high
            n += 1
        for _ in range(min(size, total - chunk * size)):
            if block == matrices[n].high:
                n, block = n + 1, 0
            _project_block(matrices[n], block, panels, rows, planes, scratch)
            block += 1
        done(counters, phase)
    wait(counters, phase, chunks)


@part
def _project_block(m: Matrix, block: int, panels: Panels, rows: int, planes: int, scratch: int) -> None:
    limit = panel_limit(planes)
    parts = (rows + limit - 1) // limit
    outputs = min(OUTPUTS, m.outputs - block * OUTPUTS)
    target = floats(m.target, rows * m.outputs)
    for p in range(parts):
        start = panel_start(rows, parts, p)
        count = panel_start(rows, parts, p + 1) - start
        block_product(m, 0, block, panels, start, count, planes, p, parts, 1, scratch)
        result = floats(scratch, count * OUTPUTS)
        for r in range(count):
            at = (start + r) * m.outputs + block * OUTPUTS
            for n in range(outputs):
                target[at + n] = result[r * OUTPUTS + n]


@part
def fill_panels(
    counters: int, phase: int, x: int, inputs: int, panels: Panels, rows: int, planes: int, floats_too: bool
) -> None:
    """One phase: put float32 [rows][inputs] at address `x` into panels."""
    while True:
        row = claim(counters, phase, rows)
        if row < 0:
            break
        fill_row(x + 4 * row * inputs, inputs, panels, rows, row, planes, floats_too)
        done(counters, phase)
    wait(counters, phase, rows)


@part
def fill_row(x: int, inputs: int, panels: Panels, rows: int, row: int, planes: int, floats_too: bool) -> None:
    """Put one of a set's rows, at address `x`, into its panel."""
    limit = panel_limit(planes)
    parts = (rows + limit - 1) // limit
    p = ((row + 1) * parts - 1) // rows
    start = panel_start(rows, parts, p)
    put_row(
        x, inputs, panels, start, panel_start(rows, parts, p + 1) - start, row - start, planes, floats_too
    )


@kernel("(int64, int64)", usable=_chosen is not None)
def work_projections(own: int, thread: int) -> None:
    """Rows through several matrices.

    Args:
        own: address of a `PROJECTING` record.
        thread: of the team; see `team.run_team`.
    """
    p = numba.carray(pointer(own), (1,), PROJECTING)[0]
    matrices = numba.carray(pointer(p.matrices), (p.count,), MATRIX)
    panels = numba.carray(pointer(p.panels), (1,), ACTIVATIONS)[0]
    scratch = p.scratch + thread * 4 * SCRATCH
    fill_panels(p.counters, 0, p.x, matrices[0].inputs, panels, p.rows, p.planes, p.floats_too != 0)
    project(p.counters, 1, matrices, 0, p.count, panels, p.rows, p.planes, p.threads, scratch)
