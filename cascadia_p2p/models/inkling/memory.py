"""How much memory a stage of an Inkling model takes, from its config alone."""

from __future__ import annotations

from typing import Final

from cascadia_p2p.engine.kernels.blocks import BLOCK
from cascadia_p2p.engine.memory import MemoryNeed
from cascadia_p2p.engine.slots import cached_positions
from cascadia_p2p.models.inkling.config import InklingConfig
from cascadia_p2p.models.inkling.sizes import attention_sizes
from cascadia_p2p.types import Promise

_F32: Final = 4
_PRODUCTS_A_LAYER: Final = 3
_PRODUCT_OVERHEAD: Final = 2**20
"""What the runtime keeps for one compiled product besides weights and results; 0.5 MiB were measured."""


def memory_need(config: InklingConfig, layers: range, promise: Promise, rewind: int) -> MemoryNeed:
    """Bytes for a stage with float32 weights.

    The device's packed copy of the weights counts in full. The embedding does not: it stays a mapped file.
    """
    weights = caches = numbers = 0
    for number in layers:
        weights += _F32 * _layer_weights(config, number)
        caches += _layer_caches(config, number, promise, rewind)
        numbers += _layer_numbers(config, number)
    products = _PRODUCTS_A_LAYER * len(layers)
    if layers.stop == config.layers:
        weights += _F32 * config.vocab_valid * config.hidden
        numbers += config.vocab_valid
        products += 1
    buffers = _F32 * max(promise.rows, 2) * numbers + products * _PRODUCT_OVERHEAD
    return MemoryNeed(weights, caches, buffers)


def _layer_weights(config: InklingConfig, number: int) -> int:
    """Numbers in a layer's matrices; all else is small beside them."""
    shape, hidden = config.attention[number], config.hidden
    attention = hidden * (2 * shape.q_width + 2 * shape.kv_width + shape.r_width)
    if not config.sparse[number]:
        return attention + 3 * hidden * config.dense_width
    experts = config.experts + config.shared_experts
    return attention + experts * hidden * (3 * config.expert_width + 1)


def _layer_caches(config: InklingConfig, number: int, promise: Promise, rewind: int) -> int:
    shape = config.attention[number]
    sizes = attention_sizes(config, shape)
    blocks = cached_positions(promise, shape.window, rewind) // BLOCK
    residual = 2 * _F32 * (config.conv_kernel - 1 + rewind) * config.hidden
    return promise.slots * (blocks * sizes.block_bytes() + sizes.history_bytes(rewind) + residual)


def _layer_numbers(config: InklingConfig, number: int) -> int:
    """Numbers a row that a layer's products hold: results, and what lies between gate and down."""
    shape = config.attention[number]
    results = shape.q_width + 2 * shape.kv_width + shape.r_width + 2 * config.hidden
    if not config.sparse[number]:
        return results + 3 * config.dense_width
    taken = config.experts_per_token + config.shared_experts
    return results + taken * (3 * config.expert_width + config.hidden)
