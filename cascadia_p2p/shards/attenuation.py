"""Estimates from a layer's weights how far its MLPs reach beyond FP16, and so how to attenuate them.

A backend that computes in FP16 multiplies the up scales of such a layer by 2^-n and its result, in FP32, by
2^n. Both are exact, so nodes need not agree on n, and stored codes and scales do not depend on it.

The estimate: behind the norm a row has length sqrt(hidden) before the norm's weights. Random rows meet a
neuron's weights at a cosine of about 1 / sqrt(hidden), but the rows behind a model's largest activations are
aligned with few neurons. Each neuron is therefore taken to be met at a cosine of 1/4 by gate and up at once,
and an output to be the root of the sum of the squares of what its neurons give: at least what the strongest
gives alone. With half of FP16's range as reserve, n is the least that brings neurons and outputs inside it.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from cascadia_p2p.errors import UsageError
from cascadia_p2p.matrices.encoding import F32
from cascadia_p2p.matrices.energy import row_energies
from cascadia_p2p.models.layout import TensorPlan

MOST: Final = 24
"""The largest power of two that a layer can be attenuated by."""

_COSINE: Final = 0.25
_INSIDE: Final = 65504.0 / 2

_F64 = npt.NDArray[np.float64]


class RangeEstimate:
    """Follows the weights of one layer as they are exported: the norm first, gate and up before down."""

    def __init__(self) -> None:
        self._norm: F32 = np.empty(0, np.float32)
        self._lengths: dict[str, _F64] = {}
        self._largest = 0.0

    def watch(self, plan: TensorPlan, stack: int, row: int, values: F32) -> None:
        """Take rows [rows, inputs] of a tensor into account."""
        group, _, part = plan.name.rpartition(".")
        if part == "mlp_norm":
            if row == 0:
                self._norm = np.empty(plan.shape, np.float32)
            self._norm[row : row + len(values)] = values[:, 0]
        elif part in ("gate", "up"):
            lengths = self._lengths.setdefault(
                plan.name, np.zeros((math.prod(plan.shape[:-2]), plan.shape[-2]))
            )
            lengths[stack, row : row + len(values)] = np.sqrt(row_energies(values, self._norm))
        elif part == "down" and f"{group}.up" in self._lengths:
            neurons = self._neurons(group, stack)
            strongest = float(neurons.max())
            shares = (neurons / max(strongest, 1e-30)).astype(np.float32)
            output = math.sqrt(float(row_energies(values, shares).max())) * strongest
            self._largest = max(self._largest, strongest, output)

    def exponent(self) -> int:
        """The least n that brings the layer inside FP16, 0 to `MOST`."""
        if self._largest <= _INSIDE:
            return 0
        # Exports in float32 take weights whose squares are beyond it.
        if not math.isfinite(self._largest):
            return MOST
        return min(MOST, math.ceil(math.log2(self._largest / _INSIDE)))

    def _neurons(self, group: str, stack: int) -> _F64:
        """What gate and up together can give, for each neuron of a stack."""
        reach = _COSINE * math.sqrt(len(self._norm))
        neurons: _F64 = reach**2 * self._lengths[f"{group}.gate"][stack] * self._lengths[f"{group}.up"][stack]
        return neurons


def parse_attenuation(text: str) -> dict[int, int]:
    """Read `8=4,40=5`: exponents by layer; whether there are such layers is known once the model is.

    Raises:
        UsageError: anything else.
    """
    found: dict[int, int] = {}
    for part in text.split(","):
        layer, _, exponent = part.strip().partition("=")
        if not (layer.isdecimal() and exponent.isdecimal() and len(layer) < 5 and int(exponent or 0) <= MOST):
            raise UsageError(
                f"--attenuate has '{part}': expected LAYER=N with N from 0 to {MOST}, as in 8=4 for 2^-4"
            )
        if int(layer) in found:
            raise UsageError(f"--attenuate names layer {int(layer)} twice: keep one")
        found[int(layer)] = int(exponent)
    return found


def check_layers(chosen: dict[int, int], layers: int) -> None:
    """See that there are these layers.

    Raises:
        UsageError: there are not.
    """
    if strange := [layer for layer in chosen if layer >= layers]:
        raise UsageError(
            f"--attenuate names layer {strange[0]}: the model has {layers} layers, 0 to {layers - 1}"
        )
