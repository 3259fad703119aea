"""Memory that compiled kernels work in, and the records by which they find it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cascadia_p2p.engine.kernels.checks import expect
from cascadia_p2p.engine.kernels.mixture import PICKS
from cascadia_p2p.engine.kernels.products import ACTIVATIONS, EXACT, MATRIX, describe
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.matrices.encoding import GROUP, INPUTS, Encoding, StoredMatrix

Record = npt.NDArray[np.void]

_ALIGNMENT: Final = 64


class Workspace:
    """Arrays at aligned addresses, kept alive together with all that records point at.

    Args:
        planes: of codes of activations; `EXACT` for none.
    """

    def __init__(self, planes: int) -> None:
        self.planes = planes
        self._kept: list[object] = []

    def keep(self, thing: object) -> None:
        """Keep something alive."""
        self._kept.append(thing)

    def array(self, kind: Any, *shape: int) -> npt.NDArray[Any]:
        """Zeros, in memory from the start."""
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        raw = np.empty(size + _ALIGNMENT, np.uint8)
        raw.fill(0)
        start = -raw.ctypes.data % _ALIGNMENT
        self._kept.append(raw)
        found: npt.NDArray[Any] = raw[start : start + size].view(kind).reshape(shape)
        return found

    def panels(self, rows: int, inputs: int, floats_too: bool) -> Record:
        """`ACTIVATIONS` [1] for so many rows."""
        width = -(-inputs // INPUTS) * INPUTS
        record = np.zeros(1, ACTIVATIONS)
        if self.planes != EXACT:
            count = rows * self.planes * width
            record["codes"] = self.array(np.int8, count).ctypes.data
            record["scales"] = self.array(np.float32, count // GROUP).ctypes.data
            record["offsets"] = self.array(np.int32, count // GROUP).ctypes.data
        if floats_too or self.planes == EXACT:
            record["numbers"] = self.array(np.float32, rows, width).ctypes.data
        self.keep(record)
        return record


def wants_floats(*matrices: StoredMatrix) -> bool:
    """Whether some matrix takes float32 activations whatever the precision."""
    return any(matrix.encoding is Encoding.F32 for matrix in matrices)


class MatrixTable:
    """`MATRIX` records of a stage or of a single call.

    Args:
        workspace: keeps the matrices alive.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._rows: list[Record] = []

    def add(self, matrix: StoredMatrix, target: int = 0) -> int:
        """Note a matrix, and where its product goes; its index."""
        record = np.zeros(1, MATRIX)
        describe(record[0], matrix, target)
        self._workspace.keep(matrix)
        self._rows.append(record)
        return len(self._rows) - 1

    def records(self) -> Record:
        """All that were noted, as one array."""
        result = np.concatenate(self._rows) if self._rows else np.zeros(0, MATRIX)
        self._workspace.keep(result)
        return result


def describe_mixture(
    record: np.void,
    table: MatrixTable,
    routed: tuple[StoredMatrix, StoredMatrix, StoredMatrix] | None,
    always: tuple[StoredMatrix, StoredMatrix, StoredMatrix] | None,
    chosen: int,
) -> None:
    """Fill a `MIXTURE` record from gate, up and down of routed and of always taken members.

    Args:
        record: to fill.
        table: takes the matrices.
        routed: stacks of those of which a row takes `chosen`.
        always: stacks, or single matrices, of those that every row takes.
        chosen: routed members a row.

    Raises:
        CascadiaError: shapes that do not belong together.
    """
    stacks = [stack for stack in (routed, always) if stack is not None]
    for each in stacks:
        _check_gated(each, stacks[0])
    most = 0 if routed is None else routed[0].shape[0]
    if (routed is not None and len(routed[0].shape) != 3) or not min(most, 1) <= chosen <= most:
        raise CascadiaError(f"a row can not choose {chosen} of {most} experts")
    for prefix, stack, count in (("", routed, "routed"), ("always_", always, "always")):
        if stack is None:
            continue
        for name, matrix in zip(("gate", "up", "down"), stack, strict=True):
            record[prefix + name] = table.add(matrix)
        record[count] = stack[0].shape[0] if len(stack[0].shape) > 2 else 1
    record["chosen"] = chosen
    record["outer_floats"] = wants_floats(*(each for gate, up, _ in stacks for each in (gate, up)))
    record["inner_floats"] = wants_floats(*(down for _, _, down in stacks))


def _check_gated(
    stack: tuple[StoredMatrix, StoredMatrix, StoredMatrix],
    like: tuple[StoredMatrix, StoredMatrix, StoredMatrix],
) -> None:
    """All members of a mixture have the width and the inner width of its first stack."""
    gate, up, down = stack
    count = gate.shape[:-2][:1]
    inner, width = like[0].shape[-2:]
    expect("gate", gate, (*count, inner, width))
    expect("up", up, (*count, inner, width))
    expect("down", down, (*count, width, inner))


def new_picks(workspace: Workspace, rows: int, chosen: int, members: int, always: int) -> Record:
    """`PICKS` [1] with room for so many rows; x, result, ids and weights are the caller's to put in.

    Args:
        workspace: gives the memory.
        rows: most rows.
        chosen: routed members a row.
        members: of the mixture, of both kinds.
        always: members that every row takes.
    """
    picks = rows * (chosen + always)
    record = np.zeros(1, PICKS)
    record["order"] = workspace.array(np.int64, picks).ctypes.data
    record["members"] = workspace.array(np.int64, members, 3).ctypes.data
    record["panels"] = workspace.array(np.int64, picks, 2).ctypes.data
    record["counts"] = workspace.array(np.int64, members + 1).ctypes.data
    workspace.keep(record)
    return record
