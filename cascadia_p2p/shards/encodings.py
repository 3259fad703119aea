"""How exported matrices are stored, chosen by what they are for."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from cascadia_p2p.errors import UsageError
from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.models.layout import TensorRole

_PLANNED = ("bf16", "int8", "int4")


class Encodings(BaseModel):
    """The stored form of experts (and dense MLPs), of projections, and of the vocabulary head."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experts: Encoding = Encoding.F32
    projections: Encoding = Encoding.F32
    head: Encoding = Encoding.F32

    def of(self, role: TensorRole) -> Encoding:
        """The encoding of a tensor of this role; small tensors and the embedding are float32."""
        chosen = {
            TensorRole.EXPERTS: self.experts,
            TensorRole.DENSE: self.experts,
            TensorRole.PROJECTIONS: self.projections,
            TensorRole.HEAD: self.head,
        }
        return chosen.get(role, Encoding.F32)


def parse_encoding(flag: str, text: str) -> Encoding:
    """Read the value of a flag.

    Raises:
        UsageError: an encoding of a later version, or no encoding at all.
    """
    if text in _PLANNED:
        raise UsageError(f"{flag} {text} comes with a later version: use f32")
    try:
        return Encoding(text)
    except ValueError:
        raise UsageError(f"{flag} '{text}' is no encoding: expected f32") from None
