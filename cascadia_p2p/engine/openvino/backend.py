"""The OpenVINO side of the seam: one compiled model a callable, made, checked and warmed while loading.

On a device that computes in FP16 the callables guard its range (`guards`); on all others a call is the
model's own result, and a row's result is bitwise the same in any company (measured on the CPU for 1 to 64
rows on widths from 64 to 24,576).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from cascadia_p2p.engine.matrix import F32, Experts, GatedWeights, MatrixBackend, Projections, RowMap
from cascadia_p2p.engine.openvino import arrange
from cascadia_p2p.engine.openvino.calls import (
    PlainExperts,
    PlainMlp,
    PlainProjections,
    SlicedMlp,
    StackedExperts,
)
from cascadia_p2p.engine.openvino.device import DeviceKind, DeviceRules, core, known_device, rules_of
from cascadia_p2p.engine.openvino.graphs import Gated, Graph
from cascadia_p2p.engine.openvino.guards import (
    GuardedExperts,
    GuardedProjections,
    GuardedRowMap,
    Recomputed,
)
from cascadia_p2p.engine.openvino.memory import DeviceMemory
from cascadia_p2p.engine.openvino.nodes import Compiled, Expected, require_nodes, wrong_nodes
from cascadia_p2p.engine.openvino.row_major import Element, RowMajor
from cascadia_p2p.engine.openvino.runner import Port, Runner
from cascadia_p2p.engine.openvino.verify import (
    require_right,
    sample_experts,
    sample_mlp,
    sample_projection,
)
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.matrices.encoding import StoredMatrix

_LEAST_EXPERTS: Final = 2


class OpenVINOBackend:
    """A `MatrixBackend` on one OpenVINO device.

    Args:
        device: as OpenVINO names it, such as CPU, GPU or GPU.1.
        threads: of the CPU. With one, products run in the calling thread and no pool is made.
        rows: most rows a call.
        fallback: computes rows again that leave FP16's range, from the same stored matrices; asked for a
            callable only when the first such row comes. None leaves them not finite.
        rules: in place of the device's own.

    Raises:
        UsageError: OpenVINO does not list the device.
    """

    def __init__(
        self,
        device: str,
        threads: int,
        rows: int,
        *,
        fallback: MatrixBackend | None = None,
        rules: DeviceRules | None = None,
    ) -> None:
        self._rules = rules or rules_of(known_device(device), threads, rows)
        self._rows = self._rules.warmed(rows)[-1]
        self._fallback = fallback
        self._recomputed = Recomputed()
        self._memory = DeviceMemory.of(self._rules)

    @property
    def device(self) -> str:
        return self._rules.device

    @property
    def memory_limit(self) -> int | None:
        """Bytes that the device may take of this PC's memory, where it has a limit of its own."""
        return None if self._memory is None else self._memory.limit

    @property
    def recomputed(self) -> int:
        """Rows that left FP16's range in a layer and were computed again."""
        return self._recomputed.rows

    @property
    def recomputed_by_layer(self) -> Mapping[str, int]:
        """The same, for each layer that had such rows."""
        return MappingProxyType(self._recomputed.layers)

    def projections(self, weights: Sequence[StoredMatrix], name: str) -> Projections:
        device = PlainProjections(self._projections_runner(weights, name))
        if not self._rules.half:
            self._require_right_projections(device, weights, name)
            return device
        widths = [weight.outputs for weight in weights]

        def guarded(fallback: Callable[[], Projections] | None) -> GuardedProjections:
            return GuardedProjections(device, widths, self._rows, fallback, self._recomputed, name)

        self._require_right_projections(guarded(None), weights, name)
        if self._fallback is None:
            return guarded(None)
        return guarded(partial(self._fallback.projections, weights, name))

    def gated_mlp(self, weights: GatedWeights, scale: float, name: str, attenuation: int = 0) -> RowMap:
        if not self._rules.half:
            exact = PlainMlp(self._mlp_runner(weights, 0, name), scale)
            self._require_right_mlp(exact, weights, scale, name)
            return exact
        device: PlainMlp | SlicedMlp
        if self._rules.one_operation and arrange.one_encoding(weights.gate, weights.up, weights.down):
            device = self._sliced_mlp(weights, name, attenuation)
        else:
            device = PlainMlp(self._mlp_runner(weights, attenuation, name))
        factor = scale * device.factor * 2.0**attenuation

        def guarded(fallback: Callable[[], RowMap] | None) -> GuardedRowMap:
            width = weights.down.outputs
            return GuardedRowMap(device, width, self._rows, factor, fallback, self._recomputed, name)

        self._require_right_mlp(guarded(None), weights, scale, name)
        if self._fallback is None:
            return guarded(None)
        return guarded(partial(self._fallback.gated_mlp, weights, scale, name))

    def experts(
        self, routed: GatedWeights, shared: GatedWeights, chosen: int, name: str, attenuation: int = 0
    ) -> Experts:
        stored = routed.gate.encoding
        if self._rules.kind is DeviceKind.GPU and not arrange.one_encoding(
            routed.gate, routed.up, routed.down
        ):
            raise CascadiaError(
                f"{name}: {self.device} takes experts in 4 or 8 bits, all in one encoding, and these are "
                f"{stored}, {routed.up.encoding} and {routed.down.encoding}: export with --experts int4"
            )
        attenuation = attenuation if self._rules.half else 0
        matrices = [m for w in (routed, shared) for m in (w.gate, w.up, w.down)]
        if self._rules.one_operation and arrange.one_encoding(*matrices):
            device: StackedExperts | PlainExperts = self._stacked_experts(
                routed, shared, chosen, name, attenuation
            )
        else:
            device = PlainExperts(self._experts_runner(routed, shared, chosen, name, attenuation))
        if not self._rules.half:
            self._require_right_experts(device, routed, shared, chosen, name)
            return device

        def guarded(fallback: Callable[[], Experts] | None) -> GuardedExperts:
            width = routed.down.outputs
            return GuardedExperts(device, width, self._rows, attenuation, fallback, self._recomputed, name)

        self._require_right_experts(guarded(None), routed, shared, chosen, name)
        if self._fallback is None:
            return guarded(None)
        return guarded(partial(self._fallback.experts, routed, shared, chosen, name))

    def _projections_runner(self, weights: Sequence[StoredMatrix], name: str) -> Runner:
        matrices = arrange.projections(weights, self._rules.half)

        def build(half_edges: bool) -> Graph:
            graph = Graph(name, half_edges)
            x = graph.rows(matrices[0].shape[1])
            for matrix in matrices:
                graph.result(graph.product(x, matrix))
            return graph

        ports = [Port(weights[0].inputs)]
        return self._runner(build, ports, [weight.outputs for weight in weights], _expected(matrices), name)

    def _mlp_runner(self, weights: GatedWeights, attenuation: int, name: str) -> Runner:
        stack = arrange.plain_mlp(weights, arrange.Form(self._rules.half, attenuation))

        def build(half_edges: bool) -> Graph:
            graph = Graph(name, half_edges)
            graph.result(graph.mlp(graph.rows(stack.gate.shape[1]), stack))
            return graph

        ports = [Port(weights.gate.inputs)]
        return self._runner(build, ports, [weights.down.outputs], _expected(stack.matrices), name)

    def _sliced_mlp(self, weights: GatedWeights, name: str, attenuation: int) -> SlicedMlp:
        stack = arrange.sliced_mlp(weights, arrange.Form(self._rules.half, attenuation))
        count = len(stack.gate.codes)
        runner = self._stack_runner(stack, count, weights, name)
        return SlicedMlp(runner, count, self._rows)

    def _stacked_experts(
        self, routed: GatedWeights, shared: GatedWeights, chosen: int, name: str, attenuation: int
    ) -> StackedExperts:
        form = arrange.Form(self._rules.half, attenuation)
        count, always = routed.gate.shape[0], shared.gate.shape[0]
        width = arrange.expert_width(routed, shared)
        stack = arrange.expert_stack((routed, shared), width, _LEAST_EXPERTS, form)
        runner = self._stack_runner(stack, chosen + always, routed, name)
        return StackedExperts(runner, count, chosen, always, self._rows)

    def _stack_runner(self, stack: Gated, chosen: int, weights: GatedWeights, name: str) -> Runner:
        def build(half_edges: bool) -> Graph:
            graph = Graph(name, half_edges)
            x, (ids, shares) = graph.rows(stack.gate.shape[2]), graph.routing(chosen)
            graph.result(graph.experts(x, ids, shares, stack))
            return graph

        ports = [Port(weights.gate.inputs), Port(chosen), Port(chosen, empty=True)]
        expected = _expected(stack.matrices, sparse=True, alone=True)
        return self._runner(build, ports, [weights.down.outputs], expected, name)

    def _experts_runner(
        self, routed: GatedWeights, shared: GatedWeights, chosen: int, name: str, attenuation: int
    ) -> Runner:
        form = arrange.Form(self._rules.half, attenuation)
        width, always = arrange.expert_width(routed, shared), shared.gate.shape[0]
        exact = not arrange.one_encoding(routed.gate, routed.up, routed.down)
        stack = arrange.expert_stack((routed,), width, 0 if exact else _LEAST_EXPERTS, form)
        both, downs = arrange.shared_mlp(shared, width, form)

        def build(half_edges: bool) -> Graph:
            graph = Graph(name, half_edges)
            x, (ids, shares) = graph.rows(width), graph.routing(chosen)
            gammas = graph.weights(always)
            beside = graph.shared_experts(x, gammas, both, downs)
            graph.result(ops.add(graph.experts(x, ids, shares, stack), beside))
            return graph

        width_in = routed.gate.inputs
        ports = [Port(width_in), Port(chosen), Port(chosen, empty=True), Port(always, empty=True)]
        # One expert alone runs dense, which is as it should be.
        expected = _expected((*stack.matrices, *both), sparse=len(stack.gate.codes) > 1)
        return self._runner(build, ports, [routed.down.outputs], expected, name)

    def _runner(
        self,
        build: Callable[[bool], Graph],
        ports: Sequence[Port],
        widths: Sequence[int],
        expected: Expected,
        name: str,
    ) -> Runner:
        """Compile, look at what came of it, and call it once with every number of rows that costs time."""
        before = self._memory.used() if self._memory else 0
        graph, compiled = self._compiled(build, expected, name)
        runner = Runner(compiled, ports, widths, self._rules, self._rows)
        runner.warm(name)
        if self._memory:
            weights = sum(source.nbytes for source in graph.sources)
            self._memory.require_growth(before, weights, name)
        # Float32 is read where it lies at every call. Packed codes of experts are given back.
        plain = 2 if self._rules.rereads_plain else 0
        runner.keep([s for s in graph.sources if s.dtype == np.float32 or s.ndim == plain])
        return runner

    def _compiled(
        self, build: Callable[[bool], Graph], expected: Expected, name: str
    ) -> tuple[Graph, Compiled]:
        rules = self._rules
        if rules.half_edges:
            graph, compiled = self._compile(build(True), name)
            if not wrong_nodes(compiled, rules, expected):
                return graph, compiled
            del graph, compiled
        graph, compiled = self._compile(build(False), name)
        require_nodes(compiled, rules, expected, name)
        return graph, compiled

    def _compile(self, graph: Graph, name: str) -> tuple[Graph, Compiled]:
        if self._memory:
            self._memory.require([source.nbytes for source in graph.sources], name)
        try:
            compiled = core().compile_model(graph.model(), self._rules.device, dict(self._rules.properties))
        except RuntimeError as error:
            raise CascadiaError(
                f"{name}: OpenVINO {ov.__version__} does not compile it for {self._rules.device}: {error}"
            ) from error
        return graph, compiled

    def _require_right_projections(
        self, call: Callable[[F32], tuple[F32, ...]], weights: Sequence[StoredMatrix], name: str
    ) -> None:
        for index, weight in enumerate(weights):
            if self._checked(weight):
                run = partial(_nth, call, index)
                require_right(run, sample_projection(weight), self._rules, self._rows, name)

    def _require_right_mlp(self, call: RowMap, weights: GatedWeights, scale: float, name: str) -> None:
        if self._checked(weights.gate):
            require_right(call, sample_mlp(weights, scale), self._rules, self._rows, name)

    def _require_right_experts(
        self, call: Experts, routed: GatedWeights, shared: GatedWeights, chosen: int, name: str
    ) -> None:
        if not self._checked(routed.gate):
            return
        count, always = routed.gate.shape[0], shared.gate.shape[0]
        ids = np.linspace(0, count - 1, chosen).astype(np.int32)
        # The first experts, and the last ones, where offsets would overflow: each costs a second of float64.
        weights = np.zeros(chosen, np.float32)
        weights[0], weights[-1] = 0.5, 1.0
        gammas = np.linspace(1.0, 0.5, always, dtype=np.float32)

        def run(x: F32) -> F32:
            each = (len(x), 1)
            return call(x, np.tile(ids, each), np.tile(weights, each), np.tile(gammas, each))

        sample = sample_experts(routed, shared, ids, weights, gammas)
        require_right(run, sample, self._rules, self._rows, name)

    def _checked(self, weights: StoredMatrix) -> bool:
        """Whether results are compared at load: everywhere but for float32 on the CPU, which is as it is."""
        return self._rules.half or weights.encoding.block_bytes is not None


def _expected(matrices: Sequence[RowMajor], sparse: bool = False, alone: bool = False) -> Expected:
    elements = {matrix.element for matrix in matrices}
    element = Element.F32 if Element.F32 in elements else matrices[0].element
    return Expected(element, frozenset(matrix.shape for matrix in matrices), sparse, alone)


def _nth(call: Callable[[F32], tuple[F32, ...]], index: int, x: F32) -> F32:
    return call(x)[index]
