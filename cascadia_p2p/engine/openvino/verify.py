"""Compares what a device computes with float64 on our own dequantised weights, for a few rows and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import openvino as ov

from cascadia_p2p.engine.matrix import F32, I32, GatedWeights
from cascadia_p2p.engine.openvino.device import LEAST_ROWS, DeviceRules
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.matrices.encoding import OUTPUTS, StoredMatrix
from cascadia_p2p.matrices.packing import dense

F64: TypeAlias = npt.NDArray[np.float64]

_SAMPLES: Final = 16
"""Blocks of outputs, or outputs, that are compared of each matrix."""
_SEED: Final = 20260
_SAFE: Final = 2.0**14
"""No number between is larger, so that FP16 holds it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Two rows and what some of their outputs have to be.

    Args:
        x: float32 [2, in].
        outputs: which outputs are known.
        expected: float64 [2, known].
    """

    x: F32
    outputs: I32
    expected: F64


def sample_projection(matrix: StoredMatrix) -> Sample:
    """Some outputs of a product."""
    chosen = _sampled_outputs(matrix)
    x = _rows(matrix.inputs)
    return Sample(x, chosen, x.astype(np.float64) @ _some_rows(matrix, chosen).T)


def sample_mlp(weights: GatedWeights, scale: float) -> Sample:
    """Some outputs of a gated MLP."""
    chosen = _sampled_outputs(weights.down)
    x, expected = _within_range(weights.gate.inputs, lambda rows: _gated(weights, rows, chosen))
    return Sample(x, chosen, scale * expected)


def sample_experts(routed: GatedWeights, shared: GatedWeights, ids: I32, weights: F32, gammas: F32) -> Sample:
    """Some outputs of a layer of experts.

    Args:
        routed: stacks.
        shared: stacks.
        ids: int32 [chosen], the same for both rows.
        weights: float32 [chosen].
        gammas: float32 [shared].
    """
    chosen = _sampled_outputs(routed.down)
    terms = [(_one(routed, int(i)), float(w)) for i, w in zip(ids, weights, strict=True) if w]
    terms += [(_one(shared, i), float(w)) for i, w in enumerate(gammas)]

    def compute(rows: F32) -> tuple[F64, float]:
        total, peak = np.zeros((len(rows), len(chosen))), 0.0
        for one, weight in terms:
            part, inside = _gated(one, rows, chosen)
            total += weight * part
            peak = max(peak, inside)
        return total, peak

    x, expected = _within_range(routed.gate.inputs, compute)
    return Sample(x, chosen, expected)


def require_right(
    call: Callable[[F32], F32], sample: Sample, rules: DeviceRules, rows: int, name: str
) -> None:
    """Compare calls of one row, of two, and of every number of rows that calls are filled up to.

    Args:
        call: float32 [rows, in] to [rows, out].
        sample: what to compare with.
        rules: of the device.
        rows: most rows a call.
        name: of the layer.

    Raises:
        CascadiaError: a result is wrong.
    """
    size = float(np.sqrt(np.mean(sample.expected**2)))
    for count in sorted({1, LEAST_ROWS, *rules.warmed(rows)}):
        repeated = sample.x[np.arange(count) % 2]
        got = call(np.ascontiguousarray(repeated))[:, sample.outputs].astype(np.float64)
        wanted = sample.expected[np.arange(count) % 2]
        error = float(np.sqrt(np.mean((got - wanted) ** 2)))
        if not error <= rules.tolerance * size + 1e-38:
            raise CascadiaError(
                f"{name}: OpenVINO {ov.__version__} on {rules.device} computes it wrongly at {count} rows "
                f"(error {error / max(size, 1e-38):.1e} of the result, at most "
                f"{rules.tolerance:.0e} is right): use a version and driver that this release was tested with"
            )


def _gated(weights: GatedWeights, x: F32, outputs: I32) -> tuple[F64, float]:
    """Some outputs of one gated MLP, and the largest number on the way."""
    rows = x.astype(np.float64)
    gate = rows @ dense(weights.gate).T.astype(np.float64)
    up = rows @ dense(weights.up).T.astype(np.float64)
    hidden = gate / (1.0 + np.exp(-np.clip(gate, -700.0, 700.0))) * up
    out = hidden @ _some_rows(weights.down, outputs).T
    return out, max(float(np.abs(part).max()) for part in (gate, up, hidden, out))


def _within_range(width: int, compute: Callable[[F32], tuple[F64, float]]) -> tuple[F32, F64]:
    """Rows small enough that FP16 holds all that is computed of them."""
    x = _rows(width)
    expected, peak = compute(x)
    while peak > _SAFE and float(np.abs(x).max()) > 2.0**-10:
        x = x * np.float32(0.125)
        expected, peak = compute(x)
    return x, expected


def _rows(width: int) -> F32:
    rows = np.random.default_rng(_SEED).standard_normal((2, width)).astype(np.float16)
    return rows.astype(np.float32)


def _sampled_outputs(matrix: StoredMatrix) -> I32:
    """Outputs of the first, the last and evenly spread blocks."""
    blocks = -(-matrix.outputs // OUTPUTS)
    starts = np.unique(np.linspace(0, blocks - 1, _SAMPLES).astype(np.int32)) * OUTPUTS
    chosen = (starts[:, None] + np.arange(OUTPUTS, dtype=np.int32)).ravel()
    return chosen[chosen < matrix.outputs].astype(np.int32)


def _some_rows(matrix: StoredMatrix, outputs: I32) -> F64:
    """Some outputs' weights: float64 [outputs, inputs]."""
    if matrix.encoding.block_bytes is None:
        part = replace(matrix, shape=(len(outputs), matrix.inputs), codes=matrix.codes[outputs])
        return dense(part).astype(np.float64)
    blocks = np.unique(outputs // OUTPUTS)
    places = (blocks[:, None] * OUTPUTS + np.arange(OUTPUTS)).ravel()
    part = StoredMatrix(
        matrix.encoding,
        (len(places), matrix.inputs),
        matrix.codes[blocks],
        None if matrix.scales is None else matrix.scales[places],
    )
    return dense(part)[np.isin(places, outputs)].astype(np.float64)


def _one(stack: GatedWeights, index: int) -> GatedWeights:
    return GatedWeights(*(_at(part, index) for part in (stack.gate, stack.up, stack.down)))


def _at(stack: StoredMatrix, index: int) -> StoredMatrix:
    scales = None if stack.scales is None else stack.scales[index]
    return StoredMatrix(stack.encoding, stack.shape[1:], stack.codes[index], scales)
