"""How fast each pair of a head's numbers turns with the position, in every spelling that configs have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.fields import Fields

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding: pair i of a head is (i, i + dims / 2) and turns by position x frequency i.

    Args:
        dims: numbers of each head that turn, from the first on; even.
        theta: base of the wavelengths.
        divisors: one a pair, by which frequencies are divided; None for none.
    """

    dims: int
    theta: float
    divisors: tuple[float, ...] | None = None

    def frequencies(self) -> npt.NDArray[np.float32]:
        """Radians a position: float32 [dims / 2], `theta ** (-2 i / dims) / divisors[i]`."""
        exponents = np.arange(0, self.dims, 2, dtype=np.float64) / self.dims
        plain = 1.0 / self.theta**exponents
        result: npt.NDArray[np.float32] = (plain / np.array(self.divisors or 1.0)).astype(np.float32)
        return result


def read_rotary(fields: Fields, head_dim: int, context: int) -> Rotary:
    """The rotary embedding that a `config.json` describes, in the spelling of transformers 4 or 5.

    Args:
        fields: the config.
        head_dim: numbers a head.
        context: `max_position_embeddings`.

    Raises:
        CheckpointError: a kind of scaling that is not computed here, or impossible numbers.
    """
    inner = fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or Fields({})
    if nested := [name for name in ("full_attention", "sliding_attention") if inner.has(name)]:
        raise CheckpointError(
            f"config.json turns heads differently in each kind of layer ({', '.join(nested)}): "
            "that is not computed here"
        )
    theta = inner.positive("rope_theta", fields.positive("rope_theta", DEFAULT_THETA))
    share = inner.positive("partial_rotary_factor", fields.positive("partial_rotary_factor", 1.0))
    dims = int(head_dim * share)
    if share > 1.0 or dims < 2 or dims % 2:
        raise CheckpointError(
            f"config.json turns {dims} of the {head_dim} numbers of a head: expected an even number, "
            f"2 to {head_dim}"
        )
    kind = inner.value("rope_type") or inner.value("type") or "default"
    if kind not in _DIVISORS:
        raise CheckpointError(
            f"config.json has rope_type {kind!r}: only {', '.join(_DIVISORS)} are computed here"
        )
    plain = Rotary(dims, theta)
    divisors = _DIVISORS[str(kind)](inner, plain, context)
    return Rotary(dims, theta, divisors)


def linear_divisors(factor: float, pairs: int) -> tuple[float, ...] | None:
    """Every position divided by the same number."""
    return None if factor == 1.0 else (factor,) * pairs


def _none(inner: Fields, plain: Rotary, context: int) -> None:
    return None


def _linear(inner: Fields, plain: Rotary, context: int) -> tuple[float, ...] | None:
    return linear_divisors(inner.positive("factor", 1.0), plain.dims // 2)


def _llama3(inner: Fields, plain: Rotary, context: int) -> tuple[float, ...]:
    """Long wavelengths by the whole factor, short ones not at all, those between by a share of it.

    Formula: `_compute_llama3_parameters` in transformers.
    """
    factor = inner.positive("factor", 8.0)
    low, high = inner.positive("low_freq_factor", 1.0), inner.positive("high_freq_factor", 4.0)
    if high <= low:
        raise inner.wrong("high_freq_factor", f"more than low_freq_factor, which is {low}")
    original = inner.integer("original_max_position_embeddings", context)
    divisors = []
    for frequency in plain.frequencies().astype(np.float64).tolist():
        turns = original * frequency / (2.0 * math.pi)
        if turns < low:
            divisors.append(factor)
        elif turns > high:
            divisors.append(1.0)
        else:
            smooth = (turns - low) / (high - low)
            divisors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return tuple(divisors)


_DIVISORS: dict[str, Callable[[Fields, Rotary, int], tuple[float, ...] | None]] = {
    "default": _none,
    "linear": _linear,
    "llama3": _llama3,
}
