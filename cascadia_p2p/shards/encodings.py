"""How exported matrices are stored, chosen by what they are for and by the form that the checkpoint has."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self, TypeAlias, TypedDict

from pydantic import BaseModel, ConfigDict, model_validator

from cascadia_p2p.errors import UsageError
from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.models.layout import TensorRole


class Kept(StrEnum):
    """Left to the checkpoint."""

    KEEP = "keep"
    """Without loss where the form that the checkpoint has is one of ours, else quantised."""


Choice: TypeAlias = Encoding | Kept
"""What can be asked for."""

MATRICES: Final[tuple[Choice, ...]] = (
    Encoding.INT4,
    Encoding.INT8,
    Encoding.INT8_GROUPED,
    Encoding.F32,
    Kept.KEEP,
)
"""What matrices can be asked to be stored as."""

EMBEDDING: Final[tuple[Choice, ...]] = (Encoding.BF16, Encoding.F32, Kept.KEEP)
"""The same for the embedding."""

LOSSLESS: Final = {
    "Q4_0": Encoding.INT4,
    "Q4_1": Encoding.INT4_AFFINE,
    "Q5_0": Encoding.INT8_GROUPED,
    "Q8_0": Encoding.INT8_GROUPED,
}
"""Forms of GGUF files, by ggml's names, of which codes and scales can be taken over as they are."""

_PLAIN: Final = ("F32", "F16", "BF16")
_FEW_BITS: Final = 5.0


class Asked(TypedDict, total=False):
    """What a user asks for; the rest is as usual for the checkpoint."""

    experts: Choice
    projections: Choice
    head: Choice
    embedding: Choice


class Encodings(BaseModel):
    """The stored form of experts (and dense MLPs), projections, the vocabulary head, and the embedding."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experts: Choice = Encoding.INT4
    projections: Choice = Encoding.INT8
    head: Choice = Encoding.INT8
    embedding: Choice = Encoding.BF16

    @model_validator(mode="after")
    def _possible(self) -> Self:
        storable = (*MATRICES, *LOSSLESS.values())
        if any(choice not in storable for choice in (self.experts, self.projections, self.head)):
            raise ValueError(f"matrices are stored as one of {', '.join(MATRICES)}")
        if self.embedding not in EMBEDDING:
            raise ValueError(f"the embedding is stored as one of {', '.join(EMBEDDING)}")
        return self

    def of(self, role: TensorRole, kind: str = "BF16", bits: float = 16.0) -> Encoding:
        """The encoding of a tensor of this role; small tensors are float32.

        Args:
            role: of the tensor.
            kind: the form that the checkpoint has it in, by the file format's name.
            bits: that a weight takes in this form.
        """
        choice = self._choice(role)
        if isinstance(choice, Encoding):
            return choice
        if role is TensorRole.EMBEDDING:
            return Encoding.BF16 if kind == "BF16" else Encoding.F32
        if kind in LOSSLESS:
            return LOSSLESS[kind]
        if kind not in _PLAIN and bits > _FEW_BITS:
            return Encoding.INT8_GROUPED
        return DEFAULT.of(role)

    @property
    def settled(self) -> bool:
        """Whether nothing is left to the checkpoint."""
        return all(isinstance(self._choice(role), Encoding) for role in TensorRole)

    def _choice(self, role: TensorRole) -> Choice:
        match role:
            case TensorRole.EXPERTS | TensorRole.DENSE:
                return self.experts
            case TensorRole.PROJECTIONS:
                return self.projections
            case TensorRole.HEAD:
                return self.head
            case TensorRole.EMBEDDING:
                return self.embedding
            case TensorRole.SMALL:
                return Encoding.F32


DEFAULT: Final = Encodings()
"""Of checkpoints whose weights are numbers."""

EXACT: Final = Encodings(
    experts=Encoding.F32, projections=Encoding.F32, head=Encoding.F32, embedding=Encoding.F32
)
"""Float32 throughout: what transformers computes with."""

AS_IN_FILE: Final = Encodings(experts=Kept.KEEP, projections=Kept.KEEP, head=Kept.KEEP, embedding=Kept.KEEP)
"""Of files that are quantised already."""


def parse_encoding(flag: str, text: str, allowed: tuple[Choice, ...] = MATRICES) -> Choice:
    """Read the value of a flag.

    Raises:
        UsageError: none of those that are allowed.
    """
    for choice in allowed:
        if text == choice.value:
            return choice
    raise UsageError(f"{flag} '{text}' is not possible: expected one of {', '.join(allowed)}")
