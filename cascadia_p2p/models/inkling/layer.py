"""One Inkling decoder layer: kernels around the matrix products of a backend.

Arithmetic: transformers' `InklingDecoderLayer`. The rows stand in the residual `x`; the norm that a
convolution's sum needs next is taken in the same pass, so each half of a layer starts from `normed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from cascadia_p2p.engine.kernels.attention import Attention
from cascadia_p2p.engine.kernels.convolution import ResidualConvolution
from cascadia_p2p.engine.kernels.router import Router
from cascadia_p2p.engine.kernels.rows import RowTable
from cascadia_p2p.engine.matrix import F32, I32, Experts, Projections, RowMap
from cascadia_p2p.engine.timing import WorkClock, WorkPart

# Reading a member off its class is a function call in Python 3.11; every layer needs these.
_PROJECTIONS: Final = WorkPart.PROJECTIONS
_ATTENTION: Final = WorkPart.ATTENTION
_GLUE: Final = WorkPart.GLUE


@dataclass(frozen=True, slots=True)
class Views:
    """A workspace cut to the number of rows of one frame.

    Args:
        normed: float32 [rows, hidden], input of the next products.
        attended: float32 [rows, heads * head_dim] by that width.
        ids: int32 [rows, experts_per_token].
        weights: float32 [rows, experts_per_token].
        shared: float32 [rows, shared_experts].
    """

    normed: F32
    attended: dict[int, F32]
    ids: I32
    weights: F32
    shared: F32


class Workspace:
    """Memory that all layers of a stage use in turn.

    Args:
        rows: most rows a frame.
        hidden: numbers a row.
        widths: numbers a row that comes out of attention, for each kind of layer.
        chosen: routed experts a row.
        shared: shared experts.
    """

    def __init__(self, rows: int, hidden: int, widths: Sequence[int], chosen: int, shared: int) -> None:
        self.whole = Views(
            np.zeros((rows, hidden), np.float32),
            {width: np.zeros((rows, width), np.float32) for width in widths},
            np.zeros((rows, chosen), np.int32),
            np.zeros((rows, chosen), np.float32),
            np.zeros((rows, shared), np.float32),
        )
        self._cut: dict[int, Views] = {}
        self.now = self.whole
        self.clock = WorkClock()

    def cut(self, rows: int) -> Views:
        """Set the number of rows for the layers that follow; the same number gives the same arrays."""
        views = self._cut.get(rows)
        if views is None:
            whole = self.whole
            views = self._cut[rows] = Views(
                whole.normed[:rows],
                {width: array[:rows] for width, array in whole.attended.items()},
                whole.ids[:rows],
                whole.weights[:rows],
                whole.shared[:rows],
            )
        self.now = views
        return views


class Mlp(Protocol):
    """The second half of a layer up to its convolution."""

    def __call__(self, views: Views) -> F32:
        """Float32 [rows, hidden] from `views.normed`."""


class DenseMlp:
    """A gated MLP for every row."""

    def __init__(self, mlp: RowMap, clock: WorkClock) -> None:
        self._mlp = mlp
        self._clock = clock

    def __call__(self, views: Views) -> F32:
        update = self._mlp(views.normed)
        self._clock.lap(WorkPart.DENSE)
        return update


class SparseMlp:
    """Experts, chosen by a router."""

    def __init__(self, router: Router, experts: Experts, clock: WorkClock) -> None:
        self._router = router
        self._experts = experts
        self._clock = clock

    def __call__(self, views: Views) -> F32:
        self._router(views.normed, views.ids, views.weights, views.shared)
        self._clock.lap(WorkPart.ROUTER)
        update = self._experts(views.normed, views.ids, views.weights, views.shared)
        self._clock.lap(WorkPart.EXPERTS)
        return update


@dataclass(frozen=True, slots=True)
class InklingLayer:
    """A decoder layer with its state.

    Args:
        number: its place in the model.
        project: to queries, keys, values and relative states.
        attention: with keys, values and their convolutions.
        output: attention's result to the residual's width.
        after_attention: convolution, sum, and the norm in front of the MLP.
        mlp: dense or sparse.
        after_mlp: convolution, sum, and the norm in front of the next layer, if the stage has one.
        workspace: shared by the stage's layers.
    """

    number: int
    project: Projections
    attention: Attention
    output: Projections
    after_attention: ResidualConvolution
    mlp: Mlp
    after_mlp: ResidualConvolution
    workspace: Workspace

    def __call__(self, rows: RowTable, x: F32, failed: I32) -> None:
        views, clock = self.workspace.now, self.workspace.clock
        clock.start()
        q, k, v, r = self.project(views.normed)
        clock.lap(_PROJECTIONS)
        attended = views.attended[q.shape[1]]
        self.attention(rows, q, k, v, r, attended)
        clock.lap(_ATTENTION)
        (update,) = self.output(attended)
        clock.lap(_PROJECTIONS)
        self.after_attention(rows, x, update, views.normed, failed)
        clock.lap(_GLUE)
        update = self.mlp(views)
        self.after_mlp(rows, x, update, views.normed, failed)
        clock.lap(_GLUE)
