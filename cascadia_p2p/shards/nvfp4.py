"""Decodes NVFP4: four-bit floats with a scale for every sixteen columns and one or two for every expert.

A value is E2M1[nibble] * scale * factor, the low nibble of a byte first. The scale is E4M3; the factor is a
float32 that is stored as it is, or as its reciprocal: the tensors' names tell which. Product and quotient are
rounded once, to float32, as the first two factors together have six bits.

Format: https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/BlockScaling.html
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cascadia_p2p.errors import CheckpointError

GROUP = 16
"""Columns that share a scale."""

_LARGEST = 6.0 * 448.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = np.array([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)], np.float32)
# Both numbers of every byte, as one item of eight bytes: one look-up a byte is several times as fast as two.
_PAIRS = np.stack([_E2M1[np.arange(256) & 15], _E2M1[np.arange(256) >> 4]], axis=1).view(np.uint64)[:, 0]


@dataclass(frozen=True, slots=True)
class Parts:
    """The names of the tensors that make up one quantised weight.

    Args:
        packed: two numbers a byte.
        scale: one for every group of columns.
        factor: one or two for every expert.
        reciprocal: the factor divides.
    """

    packed: str
    scale: str
    factor: str
    reciprocal: bool

    @property
    def names(self) -> tuple[str, str, str]:
        """All three."""
        return (self.packed, self.scale, self.factor)


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How one kind of writer names the parts.

    Args:
        telling: matches the name of the one part that no other spelling has; group 1 is the weight's.
        packed, scale, factor: what stands behind the weight's name.
        reciprocal: the factor divides.
    """

    telling: re.Pattern[str]
    packed: str
    scale: str
    factor: str
    reciprocal: bool


_SPELLINGS = (
    _Spelling(re.compile(r"(.+)\.scale2"), "", ".scale", ".scale2", False),
    _Spelling(re.compile(r"(.+)_scale_2"), "", "_scale", "_scale_2", False),
    _Spelling(
        re.compile(r"(.+_weight)\.weight_packed"),
        ".weight_packed",
        ".weight_scale",
        ".weight_global_scale",
        True,
    ),
    _Spelling(re.compile(r"(.+(?<!_weight\.weight))_packed"), "_packed", "_scale", "_global_scale", True),
)


def find_parts(names: Collection[str]) -> dict[str, Parts]:
    """The quantised weights among these tensors, by the name that each would have without quantisation.

    Raises:
        CheckpointError: of some only a part is there, or there are two ways to read one.
    """
    present = frozenset(names)
    found: dict[str, Parts] = {}
    for name in sorted(present):
        for spelling in _SPELLINGS:
            match = spelling.telling.fullmatch(name)
            if match is None:
                continue
            base = match[1]
            parts = Parts(
                base + spelling.packed, base + spelling.scale, base + spelling.factor, spelling.reciprocal
            )
            if missing := [part for part in parts.names if part not in present]:
                raise CheckpointError(
                    f"the checkpoint holds {name}, a part of an NVFP4 weight, but not {missing[0]}: "
                    "its values need both"
                )
            if base in found or (spelling.packed and base in present):
                raise CheckpointError(
                    f"the checkpoint holds {base} in two forms, one of them {name}: "
                    "it is not clear which counts"
                )
            found[base] = parts
    return found


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of a quantised weight, and to which rows its factors belong.

    Args:
        experts: matrices in the stack.
        rows: of each.
        groups: of columns in a row.
        factors: for each expert: 1, or 2 of which rows take the first and the second in turn.
    """

    experts: int
    rows: int
    groups: int
    factors: int

    def factor_of(self, first: int, count: int) -> npt.NDArray[np.intp]:
        """Which factor belongs to each group from the `first` on, all groups counted in row-major order."""
        row = np.arange(first, first + count) // self.groups
        if self.factors == 1:
            return row // self.rows
        # Rows of gate and up take turns, so the parity of a row tells whose it is.
        return row // self.rows * 2 + row % 2


def fit(
    base: str,
    parts: Parts,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    paired: bool,
) -> tuple[tuple[int, ...], Layout]:
    """The weight's shape and layout, from the shapes of its parts.

    One factor an expert is `[experts]` or `[experts, 1]`. Two are `[experts, 2]`, the first for gate and the
    second for up, and only where rows of gate and up take turns. A single matrix has one factor.

    Args:
        base: the weight's name.
        parts: the names of its tensors.
        shapes: of these tensors.
        paired: rows of gate and up take turns in this weight.

    Raises:
        CheckpointError: the shapes do not belong together.
    """
    packed, scale, factor = (shapes[name] for name in parts.names)
    if len(packed) not in (2, 3) or 0 in packed or packed[-1] * 2 % GROUP:
        raise CheckpointError(
            f"{parts.packed} has shape {list(packed)}: expected rows of NVFP4 numbers, two a byte and a "
            f"multiple of {GROUP} a row"
        )
    shape = (*packed[:-1], 2 * packed[-1])
    groups = shape[-1] // GROUP
    if scale != (*shape[:-1], groups):
        raise CheckpointError(
            f"{parts.scale} has shape {list(scale)}: expected {[*shape[:-1], groups]}, one scale for every "
            f"{GROUP} columns of {base}"
        )
    experts = shape[0] if len(shape) == 3 else 1
    one = {(experts,), (experts, 1)} | (set() if len(shape) == 3 else {()})
    two = {(experts, 2)} if paired and len(shape) == 3 and shape[-2] % 2 == 0 else set()
    if factor not in one | two:
        expected = " or ".join(str(list(known)) for known in sorted(one | two, key=lambda known: len(known)))
        raise CheckpointError(f"{parts.factor} has shape {list(factor)}: expected {expected}")
    return shape, Layout(experts, shape[-2], groups, 2 if factor in two else 1)


def decode(
    packed: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
    factor: npt.NDArray[np.float32],
    *,
    reciprocal: bool,
) -> npt.NDArray[np.float32]:
    """The numbers of consecutive groups.

    Args:
        packed: [groups * 8].
        scale: [groups].
        factor: [groups].
        reciprocal: the factor divides.

    Returns:
        float32 [groups * 16].
    """
    values = _PAIRS[packed].view(np.float32).reshape(-1, GROUP)
    values *= scale[:, None]
    if reciprocal:
        values /= factor[:, None]
    else:
        values *= factor[:, None]
    return values.reshape(-1)


def check_factors(name: str, factors: npt.NDArray[np.float32], *, reciprocal: bool) -> None:
    """See that no weight can become infinite or change its sign by these.

    Raises:
        CheckpointError: one can.
    """
    with np.errstate(all="ignore"):
        largest = np.float32(_LARGEST) / factors if reciprocal else np.float32(_LARGEST) * factors
    if bad := np.flatnonzero(~np.isfinite(largest) | (largest < 0.0)).tolist():
        place, value = bad[0], float(factors.reshape(-1)[bad[0]])
        raise CheckpointError(
            f"{name} holds {value} at place {place}, which is no scale of weights: download its file again"
        )
