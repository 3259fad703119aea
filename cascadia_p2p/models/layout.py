"""How a model family tells export which tensors it has and where their values come from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum


class TensorRole(StrEnum):
    """What a tensor is for; an export chooses the encoding by it."""

    EXPERTS = "experts"
    DENSE = "dense"
    PROJECTIONS = "projections"
    EMBEDDING = "embedding"
    HEAD = "head"
    SMALL = "small"


@dataclass(frozen=True, slots=True)
class Pick:
    """Which indices along one axis of the source make up a tensor: `start + k * step` for `k < count`."""

    axis: int
    start: int
    step: int
    count: int


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of the exported model, and its values' place in the checkpoint.

    Args:
        name: the canonical name, independent of the checkpoint's spelling.
        shape: as exported.
        role: decides the encoding.
        source: the checkpoint's name; tensors that are cut from one source stand next to each other.
        source_shapes: shapes that the source may have; in row-major order it holds the same numbers
            as `shape`, apart from what `pick` leaves out.
        pick: the part that is taken; None takes all.
        paired: 0, or the size of a head of which the source keeps rows in pairs, row i of the first half in
            front of row i of the second; without `pick`.
    """

    name: str
    shape: tuple[int, ...]
    role: TensorRole
    source: str
    source_shapes: tuple[tuple[int, ...], ...]
    pick: Pick | None = None
    paired: int = 0


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """All tensors of a model by the part of it that holds them, and what else the checkpoint has.

    Args:
        embed: what the holder of the first layer has besides.
        layers: one tuple a decoder layer.
        head: what the holder of the last layer has besides.
        skipped: source tensors of parts that are left out on purpose, by the part's name.
        unknown: source tensors that mean nothing here.
    """

    embed: tuple[TensorPlan, ...]
    layers: tuple[tuple[TensorPlan, ...], ...]
    head: tuple[TensorPlan, ...]
    skipped: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    def tensors(self) -> tuple[TensorPlan, ...]:
        """Every tensor, in the order of the model."""
        return (*self.embed, *(plan for layer in self.layers for plan in layer), *self.head)


def names_in_words(names: Collection[str], most: int = 3) -> str:
    """The first names and how many more there are, for a sentence."""
    first = ", ".join(sorted(names)[:most])
    more = len(names) - most
    return f"{first} and {more} more" if more > 0 else first
