"""The seam between a model's layers and whatever multiplies its large matrices.

A backend turns weights into callables once, at load; each call takes rows and gives rows. What a call
returns lies in memory of the callable and holds until its next call. A row's result does not depend on the
rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cascadia_p2p.matrices.encoding import StoredMatrix

F32: TypeAlias = npt.NDArray[np.float32]
I32: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """`down @ (silu(gate @ x) * (up @ x))`, or a stack of such with one more axis in front.

    Args:
        gate: [inner, width].
        up: [inner, width].
        down: [width, inner].
    """

    gate: StoredMatrix
    up: StoredMatrix
    down: StoredMatrix


class Projections(Protocol):
    """Several matrices on the same rows, in one call."""

    def __call__(self, x: F32) -> tuple[F32, ...]:
        """Float32 [rows, in] to one float32 [rows, out] a matrix."""


class RowMap(Protocol):
    """Rows to rows."""

    def __call__(self, x: F32) -> F32:
        """Float32 [rows, in] to float32 [rows, out]."""


class Experts(Protocol):
    """A mixture of experts whose routing is decided outside."""

    def __call__(self, x: F32, ids: I32, weights: F32, shared: F32) -> F32:
        """Weighted sum of each row's experts.

        Args:
            x: float32 [rows, width].
            ids: int32 [rows, chosen], ascending.
            weights: float32 [rows, chosen].
            shared: float32 [rows, shared], weights of the experts that every row passes.
        """


class MatrixBackend(Protocol):
    """Makes callables from weights.

    Weights come as they are stored and may be views of mapped files; a backend that reads them after the call
    that it got them in keeps them alive. Calls have 1 row up to the number that the backend was made for.
    """

    @property
    def device(self) -> str:
        """Where the products are computed."""

    def projections(self, weights: Sequence[StoredMatrix], name: str) -> Projections:
        """`x @ w.T` for each [out, in] of `weights`, which share `in`."""

    def gated_mlp(self, weights: GatedWeights, scale: float, name: str, attenuation: int = 0) -> RowMap:
        """A gated MLP, its result times `scale`.

        With `attenuation`, a device of small range keeps the inner width times 2 ** -attenuation.
        """

    def experts(
        self, routed: GatedWeights, shared: GatedWeights, chosen: int, name: str, attenuation: int = 0
    ) -> Experts:
        """Stacks of experts; each row passes `chosen` of the routed ones and all of the shared ones.

        With `attenuation`, a device of small range keeps the inner width times 2 ** -attenuation.

        Raises:
            CascadiaError: the device would compute all experts for every row.
        """
