"""How much memory a stage of a Llama model takes, from its config alone."""

from __future__ import annotations

from typing import Final

from cascadia_p2p.engine.kernels.blocks import BLOCK, block_bytes
from cascadia_p2p.engine.memory import MemoryNeed
from cascadia_p2p.engine.slots import cached_positions
from cascadia_p2p.models.llama.config import LlamaConfig
from cascadia_p2p.types import Promise

_F32: Final = 4
_PRODUCTS_A_LAYER: Final = 3
_PRODUCT_OVERHEAD: Final = 2**20
"""What the runtime keeps for one compiled product besides weights and results."""


def memory_need(config: LlamaConfig, layers: range, promise: Promise, rewind: int) -> MemoryNeed:
    """Bytes for a stage with float32 weights.

    The device's packed copy of the weights counts in full. The embedding does not: it stays a mapped file.
    """
    attention = config.hidden * 2 * (config.q_width + config.kv_width)
    weights = _F32 * len(layers) * (attention + 3 * config.hidden * config.width)
    numbers = len(layers) * (config.q_width + 2 * config.kv_width + 2 * config.hidden + 3 * config.width)
    products = _PRODUCTS_A_LAYER * len(layers)
    if layers.stop == config.layers:
        weights += _F32 * config.vocab * config.hidden
        numbers += config.vocab
        products += 1
    blocks = sum(cached_positions(promise, config.windows[number], rewind) // BLOCK for number in layers)
    caches = promise.slots * blocks * block_bytes(config.kv_heads, config.head_dim)
    buffers = _F32 * max(promise.rows, 2) * numbers + products * _PRODUCT_OVERHEAD
    return MemoryNeed(weights, caches, buffers)
