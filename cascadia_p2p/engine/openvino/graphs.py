"""The graphs: plain products, gated MLPs, and the experts' tiled block that plugins turn into a sparse node.

What the tiled block has to look like, or it runs over all experts: Swish with one input, a dynamic number of
rows, `ReduceSum` that keeps no axis, no node inside it with a second reader, and one group size throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset15 as ops
from openvino.utils.node_factory import NodeFactory

from cascadia_p2p.engine.openvino.row_major import Element, RowMajor
from cascadia_p2p.matrices.encoding import GROUP

# OpenVINO has no types of its own.
Node: TypeAlias = Any
Model: TypeAlias = Any

_ELEMENTS: Final = {Element.I4: ov.Type.i4, Element.I8: ov.Type.i8, Element.F32: ov.Type.f32}


@dataclass(frozen=True, slots=True)
class Gated:
    """`down @ (silu(gate @ x) * (up @ x))` in row-major form, or a stack of such."""

    gate: RowMajor
    up: RowMajor
    down: RowMajor

    @property
    def matrices(self) -> tuple[RowMajor, RowMajor, RowMajor]:
        """All three."""
        return self.gate, self.up, self.down


@dataclass(slots=True)
class Graph:
    """A model in the making, with the memory that its constants lie in.

    Args:
        name: of the model.
        half_edges: whether rows cross in FP16.
    """

    name: str
    half_edges: bool
    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    sources: list[npt.NDArray[Any]] = field(default_factory=list)

    def rows(self, width: int) -> Node:
        """An input of rows, as float32 [rows, width]."""
        if not self.half_edges:
            return self._input(width, np.float32)
        return ops.convert(self._input(width, np.float16), "f32")

    def routing(self, chosen: int) -> tuple[Node, Node]:
        """Inputs of ids and of weights, [rows, chosen]."""
        return self._input(chosen, np.int32), self._input(chosen, np.float32)

    def weights(self, width: int) -> Node:
        """An input of weights, float32 [rows, width]."""
        return self._input(width, np.float32)

    def result(self, rows: Node) -> None:
        """Make rows an output."""
        self.outputs.append(ops.convert(rows, "f16") if self.half_edges else rows)

    def model(self) -> Model:
        """The model."""
        return ov.Model(self.outputs, self.inputs, self.name)

    def product(self, x: Node, matrix: RowMajor) -> Node:
        """`x @ matrix.T`, for a stack one product for each of its matrices."""
        result = ops.matmul(x, self._constant(matrix), False, True)
        if matrix.offsets is None:
            return result
        # What is added to all weights of a group meets the sum of the group's inputs.
        sums = ops.reshape(x, _integers(-1, matrix.offsets.shape[1], GROUP), False)
        sums = ops.reduce_sum(sums, _integers(-1), False)
        return ops.add(result, ops.matmul(sums, ops.constant(matrix.offsets), False, True))

    def gated(self, gate: Node, up: Node) -> Node:
        """`silu(gate) * up`."""
        # The helper of every opset gives Swish a second input, with which no plugin recognises the experts.
        silu = NodeFactory("opset4").create("Swish", [gate.output(0)], {})
        return ops.multiply(silu, up)

    def mlp(self, x: Node, weights: Gated) -> Node:
        """A gated MLP on every row."""
        hidden = self.gated(self.product(x, weights.gate), self.product(x, weights.up))
        return self.product(hidden, weights.down)

    def experts(self, x: Node, ids: Node, weights: Node, stack: Gated) -> Node:
        """Every expert on every row, weighted by a map with zeros but at the chosen: this turns sparse."""
        experts, _, width = stack.gate.shape
        tiled = ops.reshape(ops.tile(x, _integers(experts, 1)), _integers(experts, -1, width), False)
        inner = self.gated(self.product(tiled, stack.gate), self.product(tiled, stack.up))
        out = ops.reshape(self.product(inner, stack.down), _integers(experts, -1, width), False)
        rows = ops.gather(ops.shape_of(weights, "i64"), _integers(0), _integer(0))
        zeros = ops.broadcast(ops.constant(np.float32(0.0)), ops.concat([rows, _integers(experts)], 0))
        shares = ops.scatter_elements_update(zeros, ids, weights, _integer(1))
        shares = ops.reshape(ops.transpose(shares, _integers(1, 0)), _integers(experts, -1), False)
        weighted = ops.multiply(out, ops.unsqueeze(shares, _integer(-1)))
        return ops.reshape(ops.reduce_sum(weighted, _integers(0), False), _integers(-1, width), False)

    def shared_experts(self, x: Node, gammas: Node, both: tuple[RowMajor, RowMajor], downs: Downs) -> Node:
        """Experts that every row passes, as one MLP as wide as all of them together.

        Args:
            x: [rows, width].
            gammas: [rows, experts].
            both: gate and up, [experts * inner, width].
            downs: the last product, in one piece or in one for each expert.
        """
        count = gammas.get_output_partial_shape(0)[1].get_length()
        gate, up = (self.product(x, matrix) for matrix in both)
        inner = both[0].shape[0] // count
        hidden = ops.reshape(self.gated(gate, up), _integers(-1, count, inner), False)
        hidden = ops.multiply(hidden, ops.unsqueeze(gammas, _integer(-1)))
        if isinstance(downs, RowMajor):
            return self.product(ops.reshape(hidden, _integers(-1, count * inner), False), downs)
        result = None
        for part, down in zip(ops.split(hidden, _integer(1), count).outputs(), downs, strict=True):
            product = self.product(ops.reshape(part, _integers(-1, inner), False), down)
            result = product if result is None else ops.add(result, product)
        return result

    def _input(self, width: int, dtype: type[np.generic]) -> Node:
        parameter = ops.parameter([-1, width], dtype)
        self.inputs.append(parameter)
        return parameter

    def _constant(self, matrix: RowMajor) -> Node:
        if matrix.scales is None:
            return self._shared(matrix.codes, matrix.element, matrix.shape)
        *high, inputs = matrix.shape
        cut = (*high, inputs // GROUP, GROUP) if matrix.grouped else matrix.shape
        codes = self._shared(matrix.codes, matrix.element, cut)
        scales = matrix.scales[..., None] if matrix.grouped else matrix.scales
        chain = "f16" if scales.dtype == np.float16 else "f32"
        values = ops.multiply(ops.convert(codes, chain), ops.constant(scales))
        if matrix.grouped:
            values = ops.reshape(values, _integers(*matrix.shape), False)
        return ops.convert(values, "f32") if chain == "f16" else values

    def _shared(self, array: npt.NDArray[Any], element: Element, shape: Sequence[int]) -> Node:
        whole = np.ascontiguousarray(array)
        # OpenVINO does not keep the memory behind a constant alive.
        self.sources.append(whole)
        tensor = ov.Tensor(whole, ov.Shape(list(shape)), _ELEMENTS[element])
        return ov.op.Constant(tensor, shared_memory=True)


Downs: TypeAlias = RowMajor | Sequence[RowMajor]


def _integer(value: int) -> Node:
    return ops.constant(np.int64(value))


def _integers(*values: int) -> Node:
    return ops.constant(np.array(values, np.int64))
