"""Builds the part of a Llama model that one stage holds, from weights and a matrix backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cascadia_p2p.engine.compiled_layers import CompiledLayers, LayerParts, Steps
from cascadia_p2p.engine.kernel_backend import KernelBackend
from cascadia_p2p.engine.kernels.llama_steps import add_row, append_step, attend_step
from cascadia_p2p.engine.kernels.norms import look_up, normalise
from cascadia_p2p.engine.kernels.residual import ResidualSum
from cascadia_p2p.engine.kernels.rotary_attention import RotaryAttention, RotarySizes, RotaryWeights
from cascadia_p2p.engine.kernels.rows import RowTable
from cascadia_p2p.engine.matrix import F32, I32, GatedWeights, MatrixBackend
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
from cascadia_p2p.models.llama.config import LlamaConfig
from cascadia_p2p.models.llama.layer import LlamaLayer, Workspace


class LlamaStageModel:
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
        config: LlamaConfig,
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
            done("embedding")
        self._first_norm = build.small(f"layers.{plan.layers.start}.attn_norm", config.hidden)
        if isinstance(backend, KernelBackend):
            self._layers: Sequence[Layer] = build.program(backend.planes, done).batches
        else:
            self._layers = build.layers(done)
        if self.last:
            self._final_norm = build.small("final_norm", config.hidden)
            weight = checked_matrix(source, "head.weight", config.vocab, config.hidden)
            self._head = backend.projections([weight], "head")
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
        look_up(ids, self._embedding, x)

    def enter(self, rows: RowTable, x: F32) -> None:
        clock = self._workspace.clock
        clock.frame(len(x))
        views = self._workspace.cut(rows)
        normalise(x, self._first_norm, self._config.eps, views.normed)
        clock.lap(WorkPart.GLUE)

    def logits(self, x: F32) -> F32:
        clock = self._workspace.clock
        clock.start()
        normed = self._head_input[: len(x)]
        normalise(np.ascontiguousarray(x), self._final_norm, self._config.eps, normed)
        (logits,) = self._head(normed)
        clock.lap(WorkPart.HEAD)
        return logits

    def times(self) -> WorkTimes:
        return self._workspace.clock.times()


class _Builder:
    """Makes the parts of one stage."""

    def __init__(
        self, config: LlamaConfig, plan: StagePlan, source: TensorSource, backend: MatrixBackend
    ) -> None:
        self.config, self.plan, self.source, self.backend = config, plan, source, backend
        frequencies = config.rotary.frequencies()
        self.workspace = Workspace(plan.promise.rows, config.hidden, config.q_width, frequencies)
        self.paging = Paging(plan.promise, plan.rewind)

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
        storage, whole = self.plan.storage, self.workspace.whole
        steps = Steps(append_step(storage), attend_step(storage), add_row)
        angles = (whole.cosines, whole.sines)
        clock, size = self.workspace.clock, self.plan.call_bytes
        return CompiledLayers(parts, steps, planes, whole.normed, angles, clock, size)

    def _layer(self, number: int) -> LlamaLayer:
        at = f"layers.{number}."
        after_attention, after_mlp = self._sums(number)
        return LlamaLayer(
            number,
            self.backend.projections(self._inward(number), f"{at}qkv"),
            self._attention(number, at),
            self.backend.projections([self._output(number)], f"{at}o"),
            after_attention,
            self.backend.gated_mlp(self._mlp(number), 1.0, f"{at}mlp", self.plan.attenuation.get(number, 0)),
            after_mlp,
            self.workspace,
        )

    def _parts(self, number: int) -> LayerParts:
        attention = self._attention(number, f"layers.{number}.", alone=False)
        sums = self._sums(number)
        return LayerParts(
            number,
            self._inward(number),
            self._output(number),
            attention.record(),
            sums[0].record(),
            sums[1].record(),
            always=self._mlp(number),
            kept=(attention, *sums),
        )

    def _inward(self, number: int) -> list[StoredMatrix]:
        c = self.config
        widths = {"q": c.q_width, "k": c.kv_width, "v": c.kv_width}
        return [self._weight(f"layers.{number}.{part}", width, c.hidden) for part, width in widths.items()]

    def _output(self, number: int) -> StoredMatrix:
        return self._weight(f"layers.{number}.o", self.config.hidden, self.config.q_width)

    def _mlp(self, number: int) -> GatedWeights:
        c, at = self.config, f"layers.{number}."
        return GatedWeights(
            self._weight(f"{at}gate", c.width, c.hidden),
            self._weight(f"{at}up", c.width, c.hidden),
            self._weight(f"{at}down", c.hidden, c.width),
        )

    def _sums(self, number: int) -> tuple[ResidualSum, ResidualSum]:
        c, at = self.config, f"layers.{number}."
        o_bias = self.small(f"{at}o_bias", c.hidden) if c.o_bias else None
        following = None
        if number + 1 in self.plan.layers:
            following = self.small(f"layers.{number + 1}.attn_norm", c.hidden)
        return (
            ResidualSum(c.hidden, o_bias, self.small(f"{at}mlp_norm", c.hidden), c.eps, number),
            ResidualSum(c.hidden, None, following, c.eps, number),
        )

    def _weight(self, name: str, *shape: int) -> StoredMatrix:
        return checked_matrix(self.source, name, *shape)

    def _attention(self, number: int, at: str, *, alone: bool = True) -> RotaryAttention:
        c, plan = self.config, self.plan
        window = c.windows[number]
        sizes = RotarySizes(c.heads, c.kv_heads, c.head_dim, c.rotary.dims // 2, window)
        weights = RotaryWeights(
            self._maybe(c.qkv_bias, f"{at}q_bias", c.q_width),
            self._maybe(c.qkv_bias, f"{at}k_bias", c.kv_width),
            self._maybe(c.qkv_bias, f"{at}v_bias", c.kv_width),
            self._maybe(c.qk_norm, f"{at}q_norm", c.head_dim),
            self._maybe(c.qk_norm, f"{at}k_norm", c.head_dim),
        )
        pool = self.paging.pool(window)
        return RotaryAttention(sizes, weights, pool.table, c.eps, plan.storage, alone, pool.blocks)

    def _maybe(self, there: bool, name: str, width: int) -> F32:
        return self.small(name, width) if there else np.empty(0, np.float32)
