"""The sizes of a Llama model, from its config alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from cascadia_p2p.engine.kernels.blocks import BLOCK, block_bytes
from cascadia_p2p.models.llama.config import LlamaConfig
from cascadia_p2p.models.sizes import CacheSizes, LayerSizes, Matrices, ModelSizes, Part

_PRODUCTS_A_LAYER: Final = 3
"""Query, key and value projections in one; the output projection; the MLP."""


@lru_cache(maxsize=8)
def llama_sizes(config: LlamaConfig) -> ModelSizes:
    """All sizes that follow from the config. A tied head counts by itself: a device packs it anew."""
    return ModelSizes(
        family="llama",
        hidden=config.hidden,
        context=config.context,
        layers=tuple(_layer(config, number) for number in range(config.layers)),
        embedding=Matrices(Part.EMBEDDING, config.vocab, config.hidden),
        head=Matrices(Part.HEAD, config.vocab, config.hidden),
    )


def _layer(config: LlamaConfig, number: int) -> LayerSizes:
    inward = (config.q_width, config.kv_width, config.kv_width)
    up = Matrices(Part.DENSE, config.width, config.hidden)
    return LayerSizes(
        matrices=(
            *(Matrices(Part.PROJECTIONS, width, config.hidden) for width in inward),
            Matrices(Part.PROJECTIONS, config.hidden, config.q_width),
            up,
            up,
            Matrices(Part.DENSE, config.hidden, config.width),
        ),
        cache=CacheSizes(
            position_bytes=block_bytes(config.kv_heads, config.head_dim) // BLOCK,
            window=config.windows[number],
        ),
        # Norms and biases are small beside everything else.
        small=0,
        row_numbers=sum(inward) + 2 * config.hidden + 3 * config.width,
        products=_PRODUCTS_A_LAYER,
    )
