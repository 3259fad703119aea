"""Random matrices in every stored form, and what gated MLPs of them are in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cascadia_p2p.engine.matrix import F32, I32, GatedWeights
from cascadia_p2p.matrices.encoding import ALIGNMENT, GROUP, Encoding, StoredMatrix
from cascadia_p2p.matrices.packing import dense, pack

F64 = npt.NDArray[np.float64]

INTEGER = (Encoding.INT4, Encoding.INT8, Encoding.INT8_GROUPED)
"""Those that sparse nodes take."""
RANGES = {
    Encoding.INT4: (-8, 7),
    Encoding.INT4_AFFINE: (0, 15),
    Encoding.INT8: (-127, 127),
    Encoding.INT8_GROUPED: (-128, 127),
}


def stored(encoding: Encoding, seed: int, *shape: int) -> StoredMatrix:
    """A matrix, or a stack, whose products keep the size of their input."""
    rng = np.random.default_rng(seed)
    size = 1.0 / np.sqrt(shape[-1])
    if encoding.block_bytes is None:
        values = (size * rng.standard_normal(shape)).astype(np.float32)
        if encoding is Encoding.F32:
            return StoredMatrix.of(values)
        return StoredMatrix(encoding, shape, (values.view(np.uint32) >> 16).astype(np.uint16))
    low, high = RANGES[encoding]
    codes = rng.integers(low, high, shape, np.int8, endpoint=True)
    groups = () if encoding is Encoding.INT8 else (-(-shape[-1] // GROUP),)
    scales = (size * 1.7 / high * rng.uniform(0.5, 1.5, (*shape[:-1], *groups))).astype(np.float32)
    if encoding is not Encoding.INT4_AFFINE:
        return aligned(pack(encoding, shape, codes, scales))
    offsets = (-scales * rng.uniform(5, 10, scales.shape)).astype(np.float32)
    return aligned(pack(encoding, shape, codes, 2 * scales, 2 * offsets))


def aligned(matrix: StoredMatrix) -> StoredMatrix:
    """The matrix with its codes where a file would have them: kernels read blocks at such addresses only."""
    memory = np.zeros(matrix.codes.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    codes = memory[start : start + matrix.codes.nbytes].view(matrix.codes.dtype).reshape(matrix.codes.shape)
    codes[...] = matrix.codes
    return replace(matrix, codes=codes)


def extremes(encoding: Encoding) -> StoredMatrix:
    """Codes at both ends of their range, in runs and in turns."""
    low, high = RANGES.get(encoding, (-1, 1))
    if encoding is Encoding.INT8:
        low = -128
    codes = np.full((32, 192), high, np.int8)
    codes[1] = codes[17] = low
    codes[2, ::2] = codes[3, 1::2] = codes[4, : 192 // 2] = low
    codes[5::4, ::3] = low
    if encoding is Encoding.F32:
        return StoredMatrix.of(codes.astype(np.float32))
    scales = np.full((32,) if encoding is Encoding.INT8 else (32, 6), 0.5, np.float32)
    offsets = -3.5 * np.ones((32, 6), np.float32) if encoding is Encoding.INT4_AFFINE else None
    return aligned(pack(encoding, (32, 192), codes, scales, offsets))


def gated(encoding: Encoding, seed: int, width: int, inner: int, *stack: int) -> GatedWeights:
    return GatedWeights(
        stored(encoding, seed, *stack, inner, width),
        stored(encoding, seed + 1, *stack, inner, width),
        stored(encoding, seed + 2, *stack, width, inner),
    )


def mlp(weights: GatedWeights, x: F32 | F64, index: tuple[int, ...] = ()) -> F64:
    """A gated MLP, or one of a stack, in float64."""
    gate, up, down = (
        dense(part)[index].astype(np.float64) for part in (weights.gate, weights.up, weights.down)
    )
    z = x @ gate.T
    return np.asarray((z / (1 + np.exp(-z)) * (x @ up.T)) @ down.T)


def experts(routed: GatedWeights, shared: GatedWeights, x: F32, ids: I32, weights: F32, gammas: F32) -> F64:
    """A layer of experts in float64."""
    result = np.zeros(x.shape)
    for row, rows in enumerate(x.astype(np.float64)):
        for place, expert in enumerate(ids[row]):
            result[row] += float(weights[row, place]) * mlp(routed, rows, (expert,))
        for expert in range(gammas.shape[1]):
            result[row] += float(gammas[row, expert]) * mlp(shared, rows, (expert,))
    return result


class Coded:
    """Small tensors as they are, and matrices of their shapes that take turns in encodings."""

    def __init__(self, tensors: dict[str, F32]) -> None:
        self._tensors = tensors
        self._made: dict[str, StoredMatrix] = {}

    def tensor(self, name: str) -> F32:
        return self._tensors[name]

    def matrix(self, name: str) -> StoredMatrix:
        if name == "embed.weight":
            return StoredMatrix.of(self._tensors[name])
        if name not in self._made:
            seed = len(self._made)
            kind = (*INTEGER, Encoding.INT4_AFFINE, Encoding.F32)[seed % 5]
            self._made[name] = stored(kind, seed, *self._tensors[name].shape)
        return self._made[name]


def drawn_ids(seed: int, rows: int, experts_: int, chosen: int) -> I32:
    """Ascending ids without repetition, int32 [rows, chosen]."""
    rng = np.random.default_rng(seed)
    return np.stack([np.sort(rng.permutation(experts_)[:chosen]) for _ in range(rows)]).astype(np.int32)
