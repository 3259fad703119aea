"""One Llama decoder layer: kernels around the matrix products of a backend.

Arithmetic: transformers' `LlamaDecoderLayer`. The rows stand in the residual `x`; the norm that a sum needs
next is taken in the same pass, so each half of a layer starts from `normed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cascadia_p2p.engine.kernels.residual import ResidualSum
from cascadia_p2p.engine.kernels.rotary import angles
from cascadia_p2p.engine.kernels.rotary_attention import RotaryAttention
from cascadia_p2p.engine.kernels.rows import RowTable
from cascadia_p2p.engine.matrix import F32, I32, Projections, RowMap
from cascadia_p2p.engine.timing import WorkClock, WorkPart

# Reading a member off its class is a function call in Python 3.11; every layer needs these.
_PROJECTIONS: Final = WorkPart.PROJECTIONS
_ATTENTION: Final = WorkPart.ATTENTION
_DENSE: Final = WorkPart.DENSE
_GLUE: Final = WorkPart.GLUE


@dataclass(frozen=True, slots=True)
class Views:
    """A workspace cut to the number of rows of one frame.

    Args:
        normed: float32 [rows, hidden], input of the next products.
        attended: float32 [rows, heads * head_dim].
        cosines: float32 [rows, pairs], of the rows' angles.
        sines: float32 [rows, pairs].
    """

    normed: F32
    attended: F32
    cosines: F32
    sines: F32


class Workspace:
    """Memory that all layers of a stage use in turn.

    Args:
        rows: most rows a frame.
        hidden: numbers a row.
        attended: numbers a row that come out of attention.
        frequencies: float32 [pairs], radians a position.
    """

    def __init__(self, rows: int, hidden: int, attended: int, frequencies: F32) -> None:
        widths = (hidden, attended, len(frequencies), len(frequencies))
        self.whole = Views(*(np.zeros((rows, width), np.float32) for width in widths))
        self._frequencies = frequencies
        self._cut: dict[int, Views] = {}
        self.now = self.whole
        self.clock = WorkClock()

    def cut(self, rows: RowTable) -> Views:
        """Set the rows for the layers that follow; the same number of rows gives the same arrays."""
        count = len(rows)
        views = self._cut.get(count)
        if views is None:
            whole = self.whole
            views = self._cut[count] = Views(
                whole.normed[:count], whole.attended[:count], whole.cosines[:count], whole.sines[:count]
            )
        angles(rows.positions, self._frequencies, views.cosines, views.sines)
        self.now = views
        return views


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """A decoder layer with its state.

    Args:
        number: its place in the model.
        project: to queries, keys and values.
        attention: with keys and values.
        output: attention's result to the residual's width.
        after_attention: sum, and the norm in front of the MLP.
        mlp: gated.
        after_mlp: sum, and the norm in front of the next layer, if the stage has one.
        workspace: shared by the stage's layers.
    """

    number: int
    project: Projections
    attention: RotaryAttention
    output: Projections
    after_attention: ResidualSum
    mlp: RowMap
    after_mlp: ResidualSum
    workspace: Workspace

    def __call__(self, rows: RowTable, x: F32, failed: I32) -> None:
        views, clock = self.workspace.now, self.workspace.clock
        clock.start()
        q, k, v = self.project(views.normed)
        clock.lap(_PROJECTIONS)
        self.attention(rows, q, k, v, views.cosines, views.sines, views.attended)
        clock.lap(_ATTENTION)
        (update,) = self.output(views.attended)
        clock.lap(_PROJECTIONS)
        self.after_attention(x, update, views.normed, failed)
        clock.lap(_GLUE)
        update = self.mlp(views.normed)
        clock.lap(_DENSE)
        self.after_mlp(x, update, views.normed, failed)
        clock.lap(_GLUE)
