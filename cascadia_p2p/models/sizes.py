"""The sizes of a model, whatever its family: matrices, what a row uses of them, and what a stream keeps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Part(StrEnum):
    """What a matrix is for, as people speak of it."""

    ROUTED = "routed experts"
    SHARED = "shared experts"
    DENSE = "dense MLP"
    PROJECTIONS = "projections"
    HEAD = "head"
    EMBEDDING = "embedding"
    SMALL = "small tensors"


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices of one size that lie in one tensor.

    Args:
        part: what they are for.
        rows: numbers that each gives.
        columns: numbers that each takes.
        count: how many.
        taken: how many of them one row of activations passes; None for all.
    """

    part: Part
    rows: int
    columns: int
    count: int = 1
    taken: int | None = None

    @property
    def outputs(self) -> int:
        """Rows of all of them together."""
        return self.count * self.rows

    @property
    def weights(self) -> int:
        """Numbers in all of them together."""
        return self.outputs * self.columns

    def share_read(self, rows: int) -> float:
        """The part of them that `rows` rows pass, 0 to 1, when rows choose independently and evenly.

        `1 - (1 - taken / count) ** rows`.
        """
        if self.taken is None:
            return 1.0
        return 1.0 - (1.0 - self.taken / self.count) ** rows


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What a layer keeps of a stream.

    Args:
        position_bytes: keys and values of one position, as float32.
        window: positions that a row sees, its own among them; None for all.
        taps: of the layer's short convolutions; 1 or 0 when it has none.
        channels: numbers that go into all these convolutions at one position.
    """

    position_bytes: int
    window: int | None
    taps: int = 0
    channels: int = 0


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """One decoder layer.

    Args:
        matrices: all that are large.
        cache: what it keeps of a stream.
        small: float32 numbers in everything else that is worth counting.
        row_numbers: float32 numbers a row that its products hold, between them and as results.
        products: compiled products.
    """

    matrices: tuple[Matrices, ...]
    cache: CacheSizes
    small: int
    row_numbers: int
    products: int

    @property
    def sparse(self) -> bool:
        """Whether rows choose among experts."""
        return any(each.taken is not None for each in self.matrices)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A whole model.

    Args:
        family: which it is of.
        hidden: numbers a row between layers.
        context: positions that the model was made for.
        layers: the decoder layers.
        embedding: with the first layer; a row of it is read for a token.
        head: with the last layer.
    """

    family: str
    hidden: int
    context: int
    layers: tuple[LayerSizes, ...]
    embedding: Matrices
    head: Matrices

    @property
    def weights(self) -> int:
        """Numbers in all matrices and small tensors."""
        inside = sum(sum(each.weights for each in layer.matrices) + layer.small for layer in self.layers)
        return inside + self.embedding.weights + self.head.weights

    def matrices(self, layers: range) -> tuple[Matrices, ...]:
        """The matrices of a stage with these layers, without the embedding, which is no product."""
        inside = tuple(each for number in layers for each in self.layers[number].matrices)
        return (*inside, self.head) if layers.stop == len(self.layers) else inside
