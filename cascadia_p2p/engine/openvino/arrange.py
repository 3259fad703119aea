"""Puts stored matrices into the stacks that graphs are made of: filled up, cut into slices, scaled down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cascadia_p2p.engine.matrix import GatedWeights
from cascadia_p2p.engine.openvino.graphs import Downs, Gated
from cascadia_p2p.engine.openvino.row_major import (
    Element,
    RowMajor,
    at_index,
    attenuated,
    cut_inputs,
    cut_outputs,
    element_of,
    joined_inputs,
    row_major,
    row_major_stack,
    with_scales_of,
)
from cascadia_p2p.matrices.encoding import GROUP, Encoding, StoredMatrix

_SLICE: Final = 3072
"""Inner width of a slice of a dense layer: that of a routed expert of the large model."""
_LEAST_SLICES: Final = 2
_LEAST_GROUPS: Final = 2
"""A matrix of experts with a single group is not accepted."""
_GROUPED: Final = frozenset({Encoding.INT4, Encoding.INT4_AFFINE, Encoding.INT8_GROUPED})
_SPARSE: Final = frozenset({Encoding.INT4, Encoding.INT8, Encoding.INT8_GROUPED})


@dataclass(frozen=True, slots=True)
class Form:
    """How matrices are put into constants.

    Args:
        half: scales in FP16, which the device computes with.
        attenuation: the up matrices are taken times 2 ** -attenuation.
    """

    half: bool
    attenuation: int = 0

    def of(self, gate: RowMajor, up: RowMajor, down: RowMajor) -> Gated:
        """The three of a gated MLP, with scales of one type."""
        gate, up, down = (with_scales_of(matrix, self.half) for matrix in (gate, up, down))
        matrices = (gate, attenuated(up, self.attenuation), down)
        if len({matrix.scales.dtype for matrix in matrices if matrix.scales is not None}) > 1:
            return Gated(*(with_scales_of(matrix, False) for matrix in matrices))
        return Gated(*matrices)


def one_encoding(*matrices: StoredMatrix) -> bool:
    """Whether matrices are stored alike, in 4 or 8 bits, as sparse nodes take them."""
    encodings = {matrix.encoding for matrix in matrices}
    return len(encodings) == 1 and encodings <= _SPARSE


def projections(weights: Sequence[StoredMatrix], half: bool) -> list[RowMajor]:
    """Matrices that share their inputs, which are filled up alike."""
    inputs = max(_filled(weight) for weight in weights)
    outputs = [_outputs(weight) for weight in weights]
    return [
        with_scales_of(row_major(weight, count, inputs), half)
        for weight, count in zip(weights, outputs, strict=True)
    ]


def plain_mlp(weights: GatedWeights, form: Form) -> Gated:
    """A gated MLP as it is, its inner width filled up."""
    width, inner = _widths(weights, 1)
    return form.of(
        row_major(weights.gate, inner, width),
        row_major(weights.up, inner, width),
        row_major(weights.down, _outputs(weights.down), inner),
    )


def slices_of(inner: int) -> int:
    """How many slices a dense layer of this inner width is cut into."""
    return max(_LEAST_SLICES, -(-inner // _SLICE))


def sliced_mlp(weights: GatedWeights, form: Form) -> Gated:
    """A gated MLP as a stack of experts whose sum it is, cut between groups; widths as in `expert_stack`."""
    width = _widths(weights, _LEAST_GROUPS)[0]
    count = slices_of(weights.gate.outputs)
    inner = count * max(_up(-(-weights.gate.outputs // count)), _LEAST_GROUPS * GROUP)
    return form.of(
        cut_outputs(row_major(weights.gate, inner, width), count),
        cut_outputs(row_major(weights.up, inner, width), count),
        cut_inputs(row_major(weights.down, width, inner), count),
    )


def expert_width(*stacks: GatedWeights) -> int:
    """Numbers a row that stacks of experts take and give, filled up alike."""
    return max(_widths(stack, _LEAST_GROUPS)[0] for stack in stacks)


def expert_stack(stacks: Sequence[GatedWeights], width: int, least: int, form: Form) -> Gated:
    """Stacks of experts one behind the other.

    Args:
        stacks: with experts of one shape and one encoding.
        width: numbers a row that they take and give, filled up.
        least: experts of the result; ones of zeros stand behind the others if there are fewer.
        form: how they are put into constants.
    """
    inner = _widths(stacks[0], _LEAST_GROUPS)[1]
    return form.of(
        row_major_stack([stack.gate for stack in stacks], inner, width, least),
        row_major_stack([stack.up for stack in stacks], inner, width, least),
        row_major_stack([stack.down for stack in stacks], width, inner, least),
    )


def shared_mlp(shared: GatedWeights, width: int, form: Form) -> tuple[tuple[RowMajor, RowMajor], Downs]:
    """Shared experts as one MLP: gate and up of all of them, and their downs in as few pieces as can be.

    Args:
        shared: the stack.
        width: numbers a row that it takes and gives, filled up.
        form: how they are put into constants.
    """
    inner = _widths(shared, 1)[1]
    count = shared.gate.shape[0]
    stack = form.of(
        row_major_stack([shared.gate], inner, width),
        row_major_stack([shared.up], inner, width),
        row_major_stack([shared.down], width, inner),
    )
    both = (_flat(stack.gate), _flat(stack.up))
    if stack.down.grouped:
        return both, joined_inputs(stack.down)
    return both, [at_index(stack.down, index) for index in range(count)]


def _widths(weights: GatedWeights, least_groups: int) -> tuple[int, int]:
    """Inputs of gate and up, and of down, filled up to whole groups where scales are of groups."""
    width = max(_filled(weights.gate, least_groups), _filled(weights.up, least_groups))
    return width, _filled(weights.down, least_groups)


def _filled(matrix: StoredMatrix, least_groups: int = 1) -> int:
    if element_of(matrix.encoding) is Element.F32:
        return matrix.inputs
    if matrix.encoding not in _GROUPED:
        return max(matrix.inputs, GROUP)
    return max(_up(matrix.inputs), least_groups * GROUP)


def _outputs(matrix: StoredMatrix) -> int:
    """Two at least, as inputs are 32 at least: plugins decompress what is smaller."""
    return matrix.outputs if element_of(matrix.encoding) is Element.F32 else max(matrix.outputs, 2)


def _up(width: int) -> int:
    return -(-width // GROUP) * GROUP


def _flat(stack: RowMajor) -> RowMajor:
    count, outputs, inputs = stack.shape
    scales = None if stack.scales is None else stack.scales.reshape(count * outputs, -1)
    return RowMajor(
        stack.element, (count * outputs, inputs), stack.codes.reshape(count * outputs, -1), scales
    )
