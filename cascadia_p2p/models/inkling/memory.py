"""The sizes of an Inkling model and the memory of its stages, from its config alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from cascadia_p2p.engine.kernels.blocks import BLOCK
from cascadia_p2p.engine.memory import MemoryNeed, stage_memory
from cascadia_p2p.models.inkling.config import InklingConfig
from cascadia_p2p.models.inkling.sizes import attention_sizes
from cascadia_p2p.models.sizes import CacheSizes, LayerSizes, Matrices, ModelSizes, Part
from cascadia_p2p.types import Promise

_PRODUCTS_A_LAYER: Final = 3
"""Query, key, value and relative projections in one; the output projection; the MLP or the experts."""


def memory_need(config: InklingConfig, layers: range, promise: Promise, rewind: int) -> MemoryNeed:
    """Bytes for a stage with float32 weights.

    The device's packed copy of the weights counts in full. The embedding does not: it stays a mapped file.
    """
    return stage_memory(inkling_sizes(config), layers, promise, rewind)


@lru_cache(maxsize=8)
def inkling_sizes(config: InklingConfig) -> ModelSizes:
    """All sizes that follow from the config."""
    return ModelSizes(
        family="inkling",
        hidden=config.hidden,
        context=config.context,
        layers=tuple(_layer(config, number) for number in range(config.layers)),
        embedding=Matrices(Part.EMBEDDING, config.vocab, config.hidden),
        head=Matrices(Part.HEAD, config.vocab_valid, config.hidden),
    )


def _layer(config: InklingConfig, number: int) -> LayerSizes:
    sparse = config.sparse[number]
    return LayerSizes(
        matrices=(*_projections(config, number), *(_experts(config) if sparse else _dense(config))),
        cache=_cache(config, number),
        small=_small(config, number),
        row_numbers=_row_numbers(config, number),
        products=_PRODUCTS_A_LAYER,
    )


def _projections(config: InklingConfig, number: int) -> tuple[Matrices, ...]:
    shape = config.attention[number]
    widths = (shape.q_width, shape.kv_width, shape.kv_width, shape.r_width)
    inward = tuple(Matrices(Part.PROJECTIONS, width, config.hidden) for width in widths)
    return (*inward, Matrices(Part.PROJECTIONS, config.hidden, shape.q_width))


def _dense(config: InklingConfig) -> tuple[Matrices, ...]:
    up = Matrices(Part.DENSE, config.dense_width, config.hidden)
    return (up, up, Matrices(Part.DENSE, config.hidden, config.dense_width))


def _experts(config: InklingConfig) -> tuple[Matrices, ...]:
    inner, hidden, chosen = config.expert_width, config.hidden, config.experts_per_token
    result: list[Matrices] = []
    for rows, columns in ((inner, hidden), (inner, hidden), (hidden, inner)):
        result.append(Matrices(Part.ROUTED, rows, columns, config.experts, chosen))
        result.append(Matrices(Part.SHARED, rows, columns, config.shared_experts))
    return tuple(result)


def _small(config: InklingConfig, number: int) -> int:
    """Numbers in norms, convolutions, relative projection and router."""
    shape, hidden, taps = config.attention[number], config.hidden, config.conv_kernel
    attention = 2 * shape.head_dim + 2 * shape.kv_width * taps + shape.d_rel * shape.extent
    around = 2 * hidden + 2 * hidden * taps + 1
    if not config.sparse[number]:
        return attention + around
    return attention + around + (config.experts + config.shared_experts) * hidden + config.experts


def _cache(config: InklingConfig, number: int) -> CacheSizes:
    shape = config.attention[number]
    return CacheSizes(
        position_bytes=attention_sizes(config, shape).block_bytes() // BLOCK,
        window=shape.window,
        taps=config.conv_kernel,
        # Keys, values, what attention adds and what the MLP adds.
        channels=2 * shape.kv_width + 2 * config.hidden,
    )


def _row_numbers(config: InklingConfig, number: int) -> int:
    """Results of products, and what lies between gate and down."""
    shape = config.attention[number]
    results = shape.q_width + 2 * shape.kv_width + shape.r_width + 2 * config.hidden
    if not config.sparse[number]:
        return results + 3 * config.dense_width
    taken = config.experts_per_token + config.shared_experts
    return results + taken * (3 * config.expert_width + config.hidden)
