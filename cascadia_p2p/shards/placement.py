"""Decides where in an exported file every tensor lies, and in which encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.matrices.encoding import ALIGNMENT, stored_bytes
from cascadia_p2p.models.layout import TensorPlan
from cascadia_p2p.shards.encodings import Encodings
from cascadia_p2p.shards.manifest import TensorEntry
from cascadia_p2p.shards.source import Source


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor and its place in the file."""

    plan: TensorPlan
    entry: TensorEntry


def place(
    plans: Sequence[TensorPlan], encodings: Encodings, source: Source
) -> tuple[tuple[Placed, ...], int]:
    """Put tensors one after the other, each at a multiple of 64 bytes; also the size of the file.

    Raises:
        CheckpointError: the source can not be read.
    """
    placed: list[Placed] = []
    end = 0
    for plan in plans:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        form = source.form(plan.source)
        encoding = encodings.of(plan.role, form.kind, form.bits)
        nbytes = stored_bytes(encoding, plan.shape)
        entry = TensorEntry(shape=list(plan.shape), encoding=encoding, offset=offset, nbytes=nbytes)
        placed.append(Placed(plan, entry))
        end = offset + nbytes
    return tuple(placed), end


def check_source(plan: TensorPlan, source: Source) -> None:
    """See that the checkpoint's tensor can be what the plan takes it for.

    Raises:
        CheckpointError: it has another shape.
    """
    if (shape := source.shape(plan.source)) not in plan.source_shapes:
        expected = " or ".join(str(list(known)) for known in plan.source_shapes)
        raise CheckpointError(
            f"{source.file_of(plan.source)} holds {plan.source} of shape {list(shape)}: "
            f"by config.json it should be {expected}"
        )
