"""The sizes of an emulated model: next to nothing, in the forms that every family has."""

from __future__ import annotations

from cascadia_p2p.models.emulated.config import EmulatedConfig
from cascadia_p2p.models.sizes import CacheSizes, LayerSizes, Matrices, ModelSizes, Part

_POSITION_BYTES = 8
"""One number of 64 bits is kept of a position."""


def emulated_sizes(config: EmulatedConfig) -> ModelSizes:
    """All sizes that follow from the config."""
    layer = LayerSizes(
        matrices=(Matrices(Part.PROJECTIONS, 1, 1), Matrices(Part.DENSE, config.hidden, 1)),
        cache=CacheSizes(_POSITION_BYTES, None),
        small=0,
        row_numbers=0,
        products=0,
    )
    return ModelSizes(
        family="emulated",
        hidden=config.hidden,
        context=config.context,
        layers=(layer,) * config.layers,
        embedding=Matrices(Part.EMBEDDING, config.vocab, 1),
        head=Matrices(Part.HEAD, config.vocab, 1),
    )
