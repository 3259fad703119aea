"""Builds the part of an Inkling model that one stage holds, from weights and a matrix backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cascadia_p2p.engine.compiled_layers import CompiledLayers, LayerParts, Steps
from cascadia_p2p.engine.kernel_backend import KernelBackend
from cascadia_p2p.engine.kernels.attention import Attention, AttentionWeights
from cascadia_p2p.engine.kernels.convolution import ResidualConvolution
from cascadia_p2p.engine.kernels.inkling_steps import (
    add_row,
    append_step,
    attend_step,
    remember_attention,
    remember_sum,
)
from cascadia_p2p.engine.kernels.norms import embed, normalise
from cascadia_p2p.engine.kernels.router import Router
from cascadia_p2p.engine.kernels.rows import RowTable
from cascadia_p2p.engine.matrix import F32, I32, GatedWeights, MatrixBackend, Projections
from cascadia_p2p.engine.model import (
    Layer,
    PartLoaded,
    StagePlan,
    TensorSource,
    checked_embedding,
    checked_matrix,
    checked_tensor,
)
from cascadia_p2p.engine.paging import Paging
from cascadia_p2p.engine.timing import WorkPart, WorkTimes
from cascadia_p2p.matrices.encoding import StoredMatrix
from cascadia_p2p.models.inkling.config import InklingConfig
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
        self._workspace, self.paging = build.workspace, build.paging
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
            self._embedding = checked_embedding(source, config.vocab, config.hidden)
            self._embedding_norm = build.small("embed.norm", config.hidden)
            done("embedding")
        self._first_norm = build.small(f"layers.{plan.layers.start}.attn_norm", config.hidden)
        if isinstance(backend, KernelBackend):
            self._layers: Sequence[Layer] = build.program(backend.planes, done).batches
        else:
            self._layers = build.layers(done)
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
        clock = self._workspace.clock
        clock.frame(len(x))
        views = self._workspace.cut(len(x))
        normalise(x, self._first_norm, self._config.eps, views.normed)
        clock.lap(WorkPart.GLUE)

    def logits(self, x: F32) -> F32:
        clock = self._workspace.clock
        clock.start()
        normed = self._head_input[: len(x)]
        config = self._config
        normalise(np.ascontiguousarray(x), self._final_norm, config.eps, normed, config.mup_divisor)
        (logits,) = self._head(normed)
        clock.lap(WorkPart.HEAD)
        return logits

    def times(self) -> WorkTimes:
        return self._workspace.clock.times()


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
        self.paging = Paging(plan.promise, plan.rewind)

    def weight(self, name: str, *shape: int) -> StoredMatrix:
        return checked_matrix(self.source, name, *shape)

    def small(self, name: str, *shape: int) -> F32:
        """A copy in memory, independent of the source."""
        return np.array(checked_tensor(self.source, name, *shape), np.float32)

    def layers(self, done: Callable[[str], None]) -> list[Layer]:
        """Layers over the backend's products."""
        result: list[Layer] = []
        for number in self.plan.layers:
            result.append(self._layer(number))
            done(f"layer {number}")
        return result

    def program(self, planes: int, done: Callable[[str], None]) -> CompiledLayers:
        """All layers as one compiled program."""
        parts: list[LayerParts] = []
        for number in self.plan.layers:
            parts.append(self._parts(number))
            done(f"layer {number}")
        storage = self.plan.storage
        steps = Steps(append_step(storage), attend_step(storage), add_row, remember_attention, remember_sum)
        work, size = self.workspace, self.plan.call_bytes
        return CompiledLayers(parts, steps, planes, work.whole.normed, None, work.clock, size)

    def _layer(self, number: int) -> InklingLayer:
        c, at = self.config, f"layers.{number}."
        return InklingLayer(
            number,
            self.backend.projections(self._inward(number), f"{at}qkvr"),
            self._attention(number),
            self.backend.projections([self._output(number)], f"{at}o"),
            self._after_attention(number),
            self._sparse(number) if c.sparse[number] else self._dense(number),
            self._after_mlp(number),
            self.workspace,
        )

    def _parts(self, number: int) -> LayerParts:
        c, at = self.config, f"layers.{number}."
        attention, after_attention = self._attention(number, alone=False), self._after_attention(number)
        after_mlp, sparse = self._after_mlp(number), c.sparse[number]
        scale = 1.0 if sparse else self._scale(at)
        return LayerParts(
            number,
            self._inward(number),
            self._output(number),
            attention.record(),
            after_attention.record(),
            after_mlp.record(),
            self._shared(at) if sparse else self._gated(at, (), c.dense_width),
            scale,
            self._routed(at) if sparse else None,
            self._router(at) if sparse else None,
            c.experts_per_token if sparse else 0,
            (attention, after_attention, after_mlp),
        )

    def _inward(self, number: int) -> list[StoredMatrix]:
        shape = self.config.attention[number]
        widths = {"q": shape.q_width, "k": shape.kv_width, "v": shape.kv_width, "r": shape.r_width}
        return [
            self.weight(f"layers.{number}.{part}", width, self.config.hidden)
            for part, width in widths.items()
        ]

    def _output(self, number: int) -> StoredMatrix:
        return self.weight(f"layers.{number}.o", self.config.hidden, self.config.attention[number].q_width)

    def _after_attention(self, number: int) -> ResidualConvolution:
        norm = self.small(f"layers.{number}.mlp_norm", self.config.hidden)
        return self._convolution(number, "attn_conv", norm)

    def _after_mlp(self, number: int) -> ResidualConvolution:
        following = None
        if number + 1 in self.plan.layers:
            following = self.small(f"layers.{number + 1}.attn_norm", self.config.hidden)
        return self._convolution(number, "mlp_conv", following)

    def head(self) -> Projections:
        weight = self.weight("head.weight", self.config.vocab_valid, self.config.hidden)
        return self.backend.projections([weight], "head")

    def _attention(self, number: int, *, alone: bool = True) -> Attention:
        c, plan = self.config, self.plan
        shape, at = c.attention[number], f"layers.{number}."
        sizes = attention_sizes(c, shape)
        weights = AttentionWeights(
            self.small(f"{at}q_norm", shape.head_dim),
            self.small(f"{at}k_norm", shape.head_dim),
            self.small(f"{at}k_conv", shape.kv_width, c.conv_kernel),
            self.small(f"{at}v_conv", shape.kv_width, c.conv_kernel),
            self.small(f"{at}rel_proj", shape.d_rel, shape.extent),
        )
        scaling = None
        if shape.kind == "global" and c.log_scaling_floor is not None:
            scaling = (c.log_scaling_floor, c.log_scaling_alpha)
        pool = self.paging.pool(shape.window)
        attention = Attention(
            sizes, weights, pool.table, plan.rewind, c.eps, scaling, plan.storage, alone, pool.blocks
        )
        for history in attention.histories:
            self.paging.add_history(history, c.conv_kernel - 1)
        return attention

    def _convolution(self, number: int, name: str, norm: F32 | None) -> ResidualConvolution:
        c, plan = self.config, self.plan
        weight = self.small(f"layers.{number}.{name}", c.hidden, c.conv_kernel)
        convolution = ResidualConvolution(weight, plan.promise.slots, plan.rewind, norm, c.eps, number)
        self.paging.add_history(convolution.history, c.conv_kernel - 1)
        return convolution

    def _dense(self, number: int) -> Mlp:
        at, attenuation = f"layers.{number}.", self.plan.attenuation.get(number, 0)
        weights = self._gated(at, (), self.config.dense_width)
        scale = self._scale(at)
        return DenseMlp(self.backend.gated_mlp(weights, scale, f"{at}mlp", attenuation), self.workspace.clock)

    def _sparse(self, number: int) -> Mlp:
        at, attenuation = f"layers.{number}.", self.plan.attenuation.get(number, 0)
        chosen = self.config.experts_per_token
        experts = self.backend.experts(
            self._routed(at), self._shared(at), chosen, f"{at}experts", attenuation
        )
        return SparseMlp(self._router(at), experts, self.workspace.clock)

    def _scale(self, at: str) -> float:
        return float(self.small(f"{at}global_scale", 1)[0])

    def _router(self, at: str) -> Router:
        c = self.config
        return Router(
            self.small(f"{at}router", c.experts + c.shared_experts, c.hidden),
            self.small(f"{at}router_bias", c.experts),
            c.route_scale * self._scale(at),
            self.plan.promise.rows,
        )

    def _routed(self, at: str) -> GatedWeights:
        return self._gated(f"{at}experts.", (self.config.experts,), self.config.expert_width)

    def _shared(self, at: str) -> GatedWeights:
        return self._gated(f"{at}shared.", (self.config.shared_experts,), self.config.expert_width)

    def _gated(self, at: str, stack: tuple[int, ...], inner: int) -> GatedWeights:
        hidden = self.config.hidden
        return GatedWeights(
            self.weight(f"{at}gate", *stack, inner, hidden),
            self.weight(f"{at}up", *stack, inner, hidden),
            self.weight(f"{at}down", *stack, hidden, inner),
        )
