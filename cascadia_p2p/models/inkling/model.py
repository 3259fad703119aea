"""Builds the part of an Inkling model that one stage holds, from weights and a matrix backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cascadia_p2p.engine.kernels.attention import Attention, AttentionWeights
from cascadia_p2p.engine.kernels.convolution import ResidualConvolution
from cascadia_p2p.engine.kernels.norms import embed, normalise
from cascadia_p2p.engine.kernels.router import Router
from cascadia_p2p.engine.kernels.rows import RowTable
from cascadia_p2p.engine.matrix import F32, I32, GatedWeights, MatrixBackend, Projections
from cascadia_p2p.engine.model import (
    Layer,
    PartLoaded,
    StagePlan,
    TensorSource,
    checked_matrix,
    checked_tensor,
)
from cascadia_p2p.engine.slots import block_table, cached_positions
from cascadia_p2p.matrices.encoding import StoredMatrix
from cascadia_p2p.models.inkling.config import AttentionShape, InklingConfig
from cascadia_p2p.models.inkling.layer import DenseMlp, InklingLayer, Mlp, SparseMlp, Workspace
from cascadia_p2p.models.inkling.sizes import attention_sizes


class InklingStageModel:
    """Embedding, layers and head of one stage; a `StageModel`.

    Args:
        config: of the whole model.
        plan: which layers, and room for what.
        source: the weights.
        backend: for the large matrices.
        progress: called behind the embedding, each layer and the head.

    Raises:
        ShardError: a tensor is missing or has another shape.
    """

    def __init__(
        self,
        config: InklingConfig,
        plan: StagePlan,
        source: TensorSource,
        backend: MatrixBackend,
        progress: PartLoaded | None = None,
    ) -> None:
        build = _Builder(config, plan, source, backend)
        self._config = config
        self._workspace = build.workspace
        self.first, self.last = plan.layers.start == 0, plan.layers.stop == config.layers
        self.head_rows = min(plan.promise.slots, plan.promise.rows)
        parts = len(plan.layers) + self.first + self.last
        loaded = 0

        def done(part: str) -> None:
            nonlocal loaded
            loaded += 1
            if progress is not None:
                progress(part, loaded, parts)

        if self.first:
            self._embedding = checked_tensor(source, "embed.weight", config.vocab, config.hidden)
            self._embedding_norm = build.small("embed.norm", config.hidden)
            done("embedding")
        self._first_norm = build.small(f"layers.{plan.layers.start}.attn_norm", config.hidden)
        self._layers: list[Layer] = []
        for number in plan.layers:
            self._layers.append(build.layer(number))
            done(f"layer {number}")
        if self.last:
            self._final_norm = build.small("final_norm", config.hidden)
            self._head = build.head()
            self._head_input = np.zeros((self.head_rows, config.hidden), np.float32)
            done("head")

    @property
    def hidden(self) -> int:
        return self._config.hidden

    @property
    def vocab(self) -> int:
        return self._config.vocab_valid

    @property
    def layers(self) -> Sequence[Layer]:
        return self._layers

    def embed(self, ids: I32, x: F32) -> None:
        embed(ids, self._embedding, self._embedding_norm, self._config.eps, x)

    def enter(self, rows: RowTable, x: F32) -> None:
        views = self._workspace.cut(len(x))
        normalise(x, self._first_norm, self._config.eps, views.normed)

    def logits(self, x: F32) -> F32:
        normed = self._head_input[: len(x)]
        config = self._config
        normalise(np.ascontiguousarray(x), self._final_norm, config.eps, normed, config.mup_divisor)
        (logits,) = self._head(normed)
        return logits


class _Builder:
    """Makes the parts of one stage."""

    def __init__(
        self, config: InklingConfig, plan: StagePlan, source: TensorSource, backend: MatrixBackend
    ) -> None:
        self.config, self.plan, self.source, self.backend = config, plan, source, backend
        shapes = [config.attention[number] for number in plan.layers]
        self.workspace = Workspace(
            plan.promise.rows,
            config.hidden,
            sorted({shape.q_width for shape in shapes}),
            config.experts_per_token,
            config.shared_experts,
        )
        # Layers that cache the same number of positions have their blocks at the same places.
        self._tables: dict[int, I32] = {}

    def weight(self, name: str, *shape: int) -> StoredMatrix:
        return checked_matrix(self.source, name, *shape)

    def small(self, name: str, *shape: int) -> F32:
        """A copy in memory, independent of the source."""
        return np.array(checked_tensor(self.source, name, *shape), np.float32)

    def layer(self, number: int) -> InklingLayer:
        c, at = self.config, f"layers.{number}."
        shape, hidden = c.attention[number], c.hidden
        widths = {"q": shape.q_width, "k": shape.kv_width, "v": shape.kv_width, "r": shape.r_width}
        project = self.backend.projections(
            [self.weight(at + part, width, hidden) for part, width in widths.items()], f"{at}qkvr"
        )
        output = self.backend.projections([self.weight(f"{at}o", hidden, shape.q_width)], f"{at}o")
        following = None
        if number + 1 in self.plan.layers:
            following = self.small(f"layers.{number + 1}.attn_norm", hidden)
        return InklingLayer(
            number,
            project,
            self._attention(shape, at),
            output,
            self._convolution(number, "attn_conv", self.small(f"{at}mlp_norm", hidden)),
            self._sparse(at) if c.sparse[number] else self._dense(at),
            self._convolution(number, "mlp_conv", following),
            self.workspace,
        )

    def head(self) -> Projections:
        weight = self.weight("head.weight", self.config.vocab_valid, self.config.hidden)
        return self.backend.projections([weight], "head")

    def _attention(self, shape: AttentionShape, at: str) -> Attention:
        c, plan = self.config, self.plan
        sizes = attention_sizes(c, shape)
        weights = AttentionWeights(
            self.small(f"{at}q_norm", shape.head_dim),
            self.small(f"{at}k_norm", shape.head_dim),
            self.small(f"{at}k_conv", shape.kv_width, c.conv_kernel),
            self.small(f"{at}v_conv", shape.kv_width, c.conv_kernel),
            self.small(f"{at}rel_proj", shape.d_rel, shape.extent),
        )
        positions = cached_positions(plan.promise, shape.window, plan.rewind)
        if positions not in self._tables:
            self._tables[positions] = block_table(plan.promise.slots, positions)
        scaling = None
        if shape.kind == "global" and c.log_scaling_floor is not None:
            scaling = (c.log_scaling_floor, c.log_scaling_alpha)
        table = self._tables[positions]
        return Attention(sizes, weights, table, plan.rewind, c.eps, scaling, plan.cache)

    def _convolution(self, number: int, name: str, norm: F32 | None) -> ResidualConvolution:
        c, plan = self.config, self.plan
        weight = self.small(f"layers.{number}.{name}", c.hidden, c.conv_kernel)
        return ResidualConvolution(weight, plan.promise.slots, plan.rewind, norm, c.eps, number)

    def _dense(self, at: str) -> Mlp:
        weights = self._gated(at, (), self.config.dense_width)
        scale = float(self.small(f"{at}global_scale", 1)[0])
        return DenseMlp(self.backend.gated_mlp(weights, scale, f"{at}mlp"))

    def _sparse(self, at: str) -> Mlp:
        c = self.config
        router = Router(
            self.small(f"{at}router", c.experts + c.shared_experts, c.hidden),
            self.small(f"{at}router_bias", c.experts),
            c.route_scale * float(self.small(f"{at}global_scale", 1)[0]),
            self.plan.promise.rows,
        )
        experts = self.backend.experts(
            self._gated(f"{at}experts.", (c.experts,), c.expert_width),
            self._gated(f"{at}shared.", (c.shared_experts,), c.expert_width),
            c.experts_per_token,
            f"{at}experts",
        )
        return SparseMlp(router, experts)

    def _gated(self, at: str, stack: tuple[int, ...], inner: int) -> GatedWeights:
        hidden = self.config.hidden
        return GatedWeights(
            self.weight(f"{at}gate", *stack, inner, hidden),
            self.weight(f"{at}up", *stack, inner, hidden),
            self.weight(f"{at}down", *stack, hidden, inner),
        )
