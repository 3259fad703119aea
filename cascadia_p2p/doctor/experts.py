"""Tries a small layer of experts on a device, by the engine's own checks."""

from __future__ import annotations

from typing import Final

import numpy as np

from cascadia_p2p.engine.matrix import GatedWeights
from cascadia_p2p.engine.openvino.backend import OpenVINOBackend
from cascadia_p2p.matrices.encoding import GROUP, Encoding, StoredMatrix
from cascadia_p2p.matrices.packing import pack

_ROWS: Final = 8
_EXPERTS: Final = 8
_CHOSEN: Final = 2
_WIDTH: Final = 256
_INNER: Final = 128


def try_experts(device: str) -> None:
    """Compile the layer, look at what came of it, and compare calls of one row, two and eight.

    Raises:
        CascadiaError: it would not serve; the message says why.
    """
    rng = np.random.default_rng(7)

    def matrices(count: int, outputs: int, inputs: int) -> StoredMatrix:
        codes = rng.integers(-8, 8, (count, outputs, inputs), np.int8)
        scales = np.full((count, outputs, inputs // GROUP), 0.25 / np.sqrt(inputs), np.float32)
        return pack(Encoding.INT4, codes.shape, codes, scales)

    def layer(count: int) -> GatedWeights:
        gate, up = (matrices(count, _INNER, _WIDTH) for _ in range(2))
        return GatedWeights(gate, up, matrices(count, _WIDTH, _INNER))

    OpenVINOBackend(device, 1, _ROWS).experts(layer(_EXPERTS), layer(_CHOSEN), _CHOSEN, "a trial layer")
