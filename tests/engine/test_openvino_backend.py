"""Matrix products: right numbers, and the same bits for a row in any company."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
from openvino import opset15 as ops

from cascadia_p2p.engine.matrix import GatedWeights
from cascadia_p2p.engine.openvino import nodes
from cascadia_p2p.engine.openvino.backend import OpenVINOBackend
from cascadia_p2p.engine.openvino.device import available_devices
from cascadia_p2p.engine.openvino.graphs import Graph
from cascadia_p2p.engine.openvino.nodes import node_kinds
from cascadia_p2p.errors import CascadiaError, UsageError
from cascadia_p2p.matrices.encoding import StoredMatrix

F32 = npt.NDArray[np.float32]
ROWS = 64


def draw(seed: int, *shape: int) -> F32:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def gated(seed: int, width: int, inner: int, *stack: int) -> GatedWeights:
    return GatedWeights(
        StoredMatrix.of(draw(seed, *stack, inner, width)),
        StoredMatrix.of(draw(seed + 1, *stack, inner, width)),
        StoredMatrix.of(draw(seed + 2, *stack, width, inner)),
    )


def wide(weights: GatedWeights, x: F32, index: tuple[int, ...] = ()) -> npt.NDArray[np.float64]:
    """The gated MLP in float64."""
    parts = (weights.gate, weights.up, weights.down)
    gate, up, down = (part.codes[index].astype(np.float64) for part in parts)
    z = x @ gate.T
    return (z / (1 + np.exp(-z)) * (x @ up.T)) @ down.T


def in_windows(call: Callable[[slice], F32], rows: int) -> F32:
    return np.concatenate([call(slice(at, at + rows)).copy() for at in range(0, ROWS, rows)])


def same_bits(call: Callable[[slice], F32]) -> F32:
    """The result for all rows, once calls of 1, 2, 3, 8, 16, 33 and 64 rows have given the same bits."""
    everything = in_windows(call, ROWS)
    for rows in (1, 8, 2, 33, 3, 16, 1):
        assert np.array_equal(in_windows(call, rows), everything), f"{rows} rows a call give other bits"
    return everything


def error(got: F32, expected: npt.NDArray[np.float64]) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


THREADS = pytest.mark.parametrize("threads", [1, 2])


@THREADS
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(64, (64, 32, 32, 16)), (100, (7, 1)), (1536, (700, 130)), (6144, (512,))]
)
def test_projections(threads: int, inputs: int, outputs: tuple[int, ...]) -> None:
    weights = [draw(n, width, inputs) for n, width in enumerate(outputs)]
    project = OpenVINOBackend("CPU", threads, ROWS).projections([*map(StoredMatrix.of, weights)], "p")
    x = draw(9, ROWS, inputs)
    got = same_bits(lambda rows: np.concatenate(project(x[rows]), axis=1))
    assert error(got, x.astype(np.float64) @ np.concatenate(weights).T) < 3e-6
    assert all(part.dtype == np.float32 and part.flags.c_contiguous for part in project(x[:1]))


@THREADS
@pytest.mark.parametrize(("width", "inner"), [(64, 128), (40, 72), (256, 3000)])
def test_gated_mlp(threads: int, width: int, inner: int) -> None:
    weights = gated(1, width, inner)
    mlp = OpenVINOBackend("CPU", threads, ROWS).gated_mlp(weights, 0.75, "m")
    x = draw(9, ROWS, width)
    assert error(same_bits(lambda rows: mlp(x[rows])), 0.75 * wide(weights, x)) < 3e-6


@THREADS
@pytest.mark.parametrize(
    ("width", "inner", "experts", "chosen", "shared"),
    [(64, 32, 12, 3, 2), (96, 40, 2, 2, 1), (40, 24, 3, 1, 3), (512, 128, 24, 6, 2), (64, 32, 1, 1, 1)],
)
def test_experts(threads: int, width: int, inner: int, experts: int, chosen: int, shared: int) -> None:
    routed, always = gated(1, width, inner, experts), gated(5, width, inner, shared)
    call = OpenVINOBackend("CPU", threads, ROWS).experts(routed, always, chosen, "e")
    rng = np.random.default_rng(3)
    x = draw(9, ROWS, width)
    ids = np.stack([np.sort(rng.permutation(experts)[:chosen]) for _ in range(ROWS)]).astype(np.int32)
    weights, gammas = (rng.random((ROWS, n), np.float32) for n in (chosen, shared))
    got = same_bits(lambda rows: call(x[rows], ids[rows], weights[rows], gammas[rows]))
    expected = np.zeros((ROWS, width))
    for row in range(ROWS):
        for place, expert in enumerate(ids[row]):
            expected[row] += weights[row, place] * wide(routed, x[row], (expert,))
        for expert in range(shared):
            expected[row] += gammas[row, expert] * wide(always, x[row], (expert,))
    assert error(got, expected) < 3e-6


def test_float32_experts_stay_sparse_on_cpu() -> None:
    """The runtime model holds three GatherMatmul and no product that runs over all experts."""
    backend = OpenVINOBackend("CPU", 1, ROWS)
    found: list[dict[str, int]] = []
    real = nodes.node_kinds

    def note(compiled: object) -> dict[str, int]:
        found.append(real(compiled))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "node_kinds", note)
        backend.experts(gated(1, 64, 32, 12), gated(5, 64, 32, 2), 3, "layers.2.experts")
    assert found[0]["GatherMatmul"] == 3
    # Gate and up of all shared experts at once, and a down for each.
    assert found[0]["FullyConnected"] == 4
    assert "MatMul" not in found[0]


def test_experts_that_would_run_dense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the two-input Swish of the opset helpers the CPU plugin computes every expert for every row."""

    def two_inputs(self: Graph, gate: object, up: object) -> object:
        return ops.multiply(ops.swish(gate), up)

    monkeypatch.setattr(Graph, "gated", two_inputs)
    with pytest.raises(
        CascadiaError, match=r"layers\.4\.experts: .* every expert for every row.*0 of 3 Gather"
    ):
        OpenVINOBackend("CPU", 1, ROWS).experts(
            gated(1, 64, 32, 12), gated(5, 64, 32, 2), 3, "layers.4.experts"
        )


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    assert "CPU" in available_devices()
    with pytest.raises(UsageError, match=r"--device NPU\.7: OpenVINO finds no such device.*CPU"):
        OpenVINOBackend("NPU.7", 1, 4)
    assert OpenVINOBackend(" cpu", 1, 4).device == "CPU"


def test_weights_outlive_their_owner() -> None:
    """OpenVINO reads a constant's memory long after compiling, and does not keep it alive."""
    x = draw(9, ROWS, 512)
    weights = draw(1, 1024, 512)
    expected = x.astype(np.float64) @ weights.T
    project = OpenVINOBackend("CPU", 1, ROWS).projections([StoredMatrix.of(weights)], "p")
    del weights
    gc.collect()
    filler = [np.full((1024, 512), np.nan, np.float32) for _ in range(8)]
    assert error(project(x)[0], expected) < 3e-6
    assert len(filler) == 8


def test_results_hold_until_the_next_call_and_inputs_are_read_anew_each_time() -> None:
    weights = draw(1, 16, 64)
    project = OpenVINOBackend("CPU", 1, ROWS).projections([StoredMatrix.of(weights)], "p")
    x = draw(2, 4, 64)
    first = project(x)[0].copy()
    x *= 2
    assert np.array_equal(project(x)[0], 2 * first)
    assert np.array_equal(project(x[:2].copy())[0], 2 * first[:2])
    assert np.array_equal(project(x)[0], 2 * first)


def test_node_kinds_counts_nodes_as_the_device_runs_them() -> None:
    x = ops.parameter([-1, 8], np.float32)
    compiled = ov.Core().compile_model(
        ov.Model([ops.matmul(x, np.ones((4, 8), np.float32), False, True)], [x], "m"), "CPU"
    )
    assert node_kinds(compiled)["FullyConnected"] == 1
