"""What a model family gives a stage: embedding, layers and head over rows, with all per-slot state inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cascadia_p2p.engine.kernels.blocks import Storage
from cascadia_p2p.engine.kernels.rows import RowTable
from cascadia_p2p.engine.matrix import F32, I32
from cascadia_p2p.engine.paging import Paging
from cascadia_p2p.engine.timing import WorkTimes
from cascadia_p2p.errors import ShardError
from cascadia_p2p.matrices.encoding import Encoding, StoredMatrix
from cascadia_p2p.types import Promise

PartLoaded: TypeAlias = Callable[[str, int, int], None]
"""Called with what was loaded, how many parts are loaded, and how many there are."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a stage is to hold and to have room for.

    Args:
        layers: numbers of its decoder layers.
        promise: slots, context, rows a frame and kept prefixes.
        rewind: positions by which a stream can go back.
        cache: form of keys and values, float32 or bfloat16.
        call_bytes: weights that one call of compiled layers takes, about. Small layers are too short to
            return to Python behind each.
        attenuation: layers whose inner width a device of small range keeps times 2 to the minus this.
    """

    layers: range
    promise: Promise
    rewind: int
    cache: Encoding = Encoding.F32
    call_bytes: int = 64 * 2**20
    attenuation: Mapping[int, int] = field(default_factory=dict)

    @property
    def storage(self) -> Storage:
        """The same, as the kernels of attention call it."""
        return "bf16" if self.cache is Encoding.BF16 else "f32"


class TensorSource(Protocol):
    """Where weights come from."""

    def tensor(self, name: str) -> F32:
        """The float32 tensor of a canonical name, C-contiguous; possibly a view of a mapped file.

        Raises:
            ShardError: there is no such tensor, or it is stored otherwise.
        """

    def matrix(self, name: str) -> StoredMatrix:
        """The matrix, or stack of matrices, of a canonical name as it is stored; possibly views of a file.

        Raises:
            ShardError: there is no such tensor.
        """


def checked_tensor(source: TensorSource, name: str, *shape: int) -> F32:
    """A tensor of the shape that the model's config gives it.

    Raises:
        ShardError: there is none, or it has another shape.
    """
    tensor = source.tensor(name)
    if tensor.shape != shape or tensor.dtype != np.float32:
        raise ShardError(
            f"tensor {name} is {tensor.dtype} {list(tensor.shape)}: the model's config asks for "
            f"float32 {list(shape)}; export the model again"
        )
    return tensor


def checked_matrix(source: TensorSource, name: str, *shape: int) -> StoredMatrix:
    """A matrix of the shape that the model's config gives it.

    Raises:
        ShardError: there is none, or it has another shape.
    """
    matrix = source.matrix(name)
    if matrix.shape != shape:
        raise ShardError(
            f"tensor {name} is {list(matrix.shape)}: the model's config asks for {list(shape)}; "
            "export the model again"
        )
    return matrix


def checked_embedding(source: TensorSource, vocab: int, hidden: int) -> F32 | npt.NDArray[np.uint16]:
    """The embedding [vocab, hidden]: float32, or uint16 that are bfloat16.

    Raises:
        ShardError: there is none, or it has another shape, or is stored otherwise.
    """
    matrix = checked_matrix(source, "embed.weight", vocab, hidden)
    if matrix.encoding not in (Encoding.F32, Encoding.BF16):
        raise ShardError(
            f"the embedding is stored as {matrix.encoding}: expected f32 or bf16; export the model again"
        )
    return matrix.codes


class Layer(Protocol):
    """One decoder layer with its caches, or several that are computed in one call."""

    @property
    def number(self) -> int:
        """The first one's place in the whole model."""

    def __call__(self, rows: RowTable, x: F32, failed: I32) -> None:
        """Compute in place.

        Args:
            rows: whose rows these are, and at which positions.
            x: float32 [rows, hidden], the residual.
            failed: int32 [rows]; -1, or the first layer whose result for the row was not finite.
        """


class StageModel(Protocol):
    """The part of a model that one stage holds.

    A frame is `enter`, then every layer in order; `head_rows` bounds the rows of one call of `logits`.
    """

    @property
    def hidden(self) -> int:
        """Numbers a row."""

    @property
    def vocab(self) -> int:
        """Token ids that exist."""

    @property
    def first(self) -> bool:
        """Whether rows come as token ids."""

    @property
    def last(self) -> bool:
        """Whether rows end as logits."""

    @property
    def layers(self) -> Sequence[Layer]:
        """The layers, in order."""

    @property
    def paging(self) -> Paging:
        """What the layers keep of streams and of kept prefixes; the stage says whose it is."""

    @property
    def head_rows(self) -> int:
        """Most rows that `logits` takes at once."""

    def embed(self, ids: I32, x: F32) -> None:
        """Fill `x` [rows, hidden] from token ids, each 0 to the embedding's size - 1; first stage only."""

    def enter(self, rows: RowTable, x: F32) -> None:
        """Prepare for the first layer on these rows; `x` is the residual."""

    def logits(self, x: F32) -> F32:
        """Logits of rows behind the last layer; last stage only.

        Float32 [rows, hidden] to [rows, vocab], which holds until the next call.
        """

    def times(self) -> WorkTimes:
        """What the frames so far have cost, by part; may be asked from any thread."""
