"""Inkling's attention sizes as the kernels name them."""

from __future__ import annotations

from cascadia_p2p.engine.kernels.attention import AttentionSizes
from cascadia_p2p.models.inkling.config import AttentionShape, InklingConfig


def attention_sizes(config: InklingConfig, shape: AttentionShape) -> AttentionSizes:
    """The sizes of a layer with this shape."""
    return AttentionSizes(
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.d_rel,
        shape.extent,
        shape.window,
        config.conv_kernel,
    )
