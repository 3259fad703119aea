"""The rules of devices, and what refuses to serve: dense, decompressed, elsewhere, wrong, or too large."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset15 as ops
from stored_world import gated, mlp, stored
from test_openvino_encodings import draw, error, rules

from cascadia_p2p.engine.openvino import backend as backend_room
from cascadia_p2p.engine.openvino import device, row_major
from cascadia_p2p.engine.openvino.backend import OpenVINOBackend
from cascadia_p2p.engine.openvino.device import DeviceKind, DeviceRules, core, rules_of
from cascadia_p2p.engine.openvino.environment import PLUGIN_ENVIRONMENT
from cascadia_p2p.engine.openvino.graphs import Graph
from cascadia_p2p.engine.openvino.memory import DeviceMemory, pages_limit
from cascadia_p2p.engine.openvino.nodes import Expected, wrong_nodes
from cascadia_p2p.engine.openvino.row_major import Element
from cascadia_p2p.engine.openvino.runner import Runner
from cascadia_p2p.errors import CapacityError, CascadiaError, UsageError
from cascadia_p2p.matrices.encoding import Encoding

GPU = rules_of("GPU.1", 2, 64)
GIB = 2**30


# --- rules --------------------------------------------------------------------------------------------


def test_the_gpus_options() -> None:
    assert GPU.kind is DeviceKind.GPU
    assert GPU.device == "GPU.1"
    assert GPU.properties == {
        "INFERENCE_PRECISION_HINT": "f16",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "CACHE_DIR": "",
    }
    assert GPU.half
    assert GPU.one_operation
    assert [GPU.filled(rows) for rows in (1, 2, 3, 8, 9, 33, 64)] == [2, 2, 8, 8, 16, 64, 64]
    assert GPU.warmed(64) == (2, 8, 16, 24, 32, 64)
    with pytest.raises(CascadiaError, match="65 rows: this stage was made for 64"):
        GPU.filled(65)


def test_the_cpus_options_are_exact() -> None:
    cpu = rules_of("CPU", 3, 64)
    assert cpu.kind is DeviceKind.CPU
    assert not cpu.half
    assert cpu.properties["INFERENCE_PRECISION_HINT"] == "f32"
    assert cpu.properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == "0"
    assert cpu.properties["INFERENCE_NUM_THREADS"] == 3
    assert [cpu.filled(rows) for rows in (1, 2, 3, 64)] == [2, 2, 3, 64]
    assert rules_of("NPU", 3, 64).kind is DeviceKind.OTHER


def test_the_plugins_environment_is_set_before_openvino_is_there() -> None:
    for name, value in PLUGIN_ENVIRONMENT.items():
        assert os.environ[name] == value


def test_an_old_openvino_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.ov, "__version__", "2026.2.1-21000-abc")
    with pytest.raises(CascadiaError, match=r"2026\.2\.1.* is too old.*pip install"):
        core.__wrapped__()


def test_a_gpu_that_is_not_there_is_refused_with_the_way_to_the_doctor() -> None:
    if any(name.startswith("GPU") for name in core().available_devices):
        pytest.skip("this machine has a GPU")
    with pytest.raises(UsageError, match=r"--device GPU: .*only CPU.*cascadia-p2p doctor --device GPU"):
        OpenVINOBackend("gpu", 1, 4)


# --- nodes --------------------------------------------------------------------------------------------


def test_weights_that_are_decompressed_are_refused() -> None:
    """The CPU plugin has no compressed product in FP16, and turns the weights into numbers of it."""
    if "FP16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU has no FP16 arithmetic")
    half = replace(rules("gpu"), properties={"INFERENCE_PRECISION_HINT": "f16", "NUM_STREAMS": 1})
    backend = OpenVINOBackend("CPU", 1, 4, rules=half)
    for encoding, element in ((Encoding.INT4, "i4"), (Encoding.INT8, "i8"), (Encoding.INT8_GROUPED, "i8")):
        with pytest.raises(
            CascadiaError, match=rf"layers\.7\.q: OpenVINO .* decompressed its {element} weights .*takes f16"
        ):
            backend.projections([stored(encoding, 1, 48, 96)], "layers.7.q")


@pytest.mark.parametrize("form", ["cpu", "gpu"])
def test_compressed_experts_that_would_run_dense_are_refused(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_inputs(self: Graph, gate: object, up: object) -> object:
        return ops.multiply(ops.swish(gate), up)

    monkeypatch.setattr(Graph, "gated", two_inputs)
    backend = OpenVINOBackend("CPU", 1, 4, rules=rules(form))
    with pytest.raises(CascadiaError, match=r"layers\.4\.experts: .* every expert for every row"):
        backend.experts(
            gated(Encoding.INT4, 1, 64, 64, 6), gated(Encoding.INT4, 5, 64, 64, 2), 2, "layers.4.experts"
        )
    if form == "gpu":
        with pytest.raises(CascadiaError, match=r"layers\.0\.mlp: .* every expert for every row"):
            backend.gated_mlp(gated(Encoding.INT4, 1, 64, 128), 1.0, "layers.0.mlp")


class Node:
    """A node of a runtime graph as OpenVINO gives it.

    Args:
        kind: of the node.
        inputs: element types and shapes.
    """

    def __init__(self, kind: str, *inputs: tuple[ov.Type, Sequence[int]]) -> None:
        self._kind = kind
        self._parameters = [ops.parameter(list(shape), element) for element, shape in inputs]

    def get_rt_info(self) -> Mapping[str, Any]:
        return {"layerType": np.array(self._kind)}

    def inputs(self) -> list[Any]:
        return [parameter.output(0) for parameter in self._parameters]


class Runtime:
    """A compiled model that has certain nodes."""

    def __init__(self, *nodes: Node, devices: Sequence[str] = ("GPU.1",)) -> None:
        self._nodes, self._devices = nodes, devices

    def get_runtime_model(self) -> Runtime:
        return self

    def get_ops(self) -> Sequence[Node]:
        return self._nodes

    def get_property(self, name: str) -> Sequence[str]:
        assert name == "EXECUTION_DEVICES"
        return self._devices


EXPERTS = Expected(Element.I4, frozenset({(258, 96, 128), (258, 128, 96)}), sparse=True, alone=True)
FUSED = Node(
    "moe_3gemm_fused_compressed",
    (ov.Type.f16, (-1, 128)),
    (ov.Type.i4, (258, 96, 128)),
    (ov.Type.f16, (258, 96, 4)),
)


def test_on_the_gpu_experts_are_one_fused_node() -> None:
    assert wrong_nodes(Runtime(Node("reorder"), FUSED), GPU, EXPERTS) == ""


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([Node("gather_matmul")] * 3, "every expert for every row.*0 of 1 moe_3gemm.*3 gather_matmul"),
        ([Node("gemm")] * 3, "every expert for every row.*0 of 1 moe_3gemm.*3 gemm"),
        ([FUSED, Node("fully_connected")], "left fully_connected beside the experts"),
        ([FUSED, FUSED], "2 of 1 moe_3gemm"),
        (
            [FUSED, Node("eltwise", (ov.Type.f16, (258, 96, 4, 32)))],
            r"decompressed its i4 weights \(a eltwise node takes f16 \[258, 96, 4, 32\]",
        ),
    ],
)
def test_on_the_gpu_other_nodes_are_refused(nodes: list[Node], found: str) -> None:
    import re

    assert re.search(found, wrong_nodes(Runtime(*nodes), GPU, EXPERTS))


@pytest.mark.parametrize("devices", [["CPU"], ["GPU.1", "CPU"], ["(CPU)"]])
def test_a_model_on_another_device_is_refused(devices: list[str]) -> None:
    assert "would compute it on" in wrong_nodes(Runtime(FUSED, devices=devices), GPU, EXPERTS)


def test_edges_become_float32_where_fp16_ones_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []
    real = OpenVINOBackend._compile

    def note(self: OpenVINOBackend, graph: Graph, name: str) -> object:
        tried.append(graph.half_edges)
        return real(self, graph, name)

    def wrong(compiled: object, rules: DeviceRules, expected: Expected) -> str:
        return "runs dense" if tried[-1] else ""

    monkeypatch.setattr(OpenVINOBackend, "_compile", note)
    monkeypatch.setattr(backend_room, "wrong_nodes", wrong)
    weights = gated(Encoding.INT4, 1, 64, 128)
    call = OpenVINOBackend("CPU", 1, 4, rules=rules("gpu-half")).gated_mlp(weights, 1.0, "m")
    assert tried == [True, False]
    x = draw(1, 4, 64)
    assert error(call(x), mlp(weights, x)) < 1e-3


def test_experts_in_float32_are_refused_by_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMemory, "of", lambda rules: None)
    backend = OpenVINOBackend("GPU", 1, 4, rules=GPU)
    with pytest.raises(CascadiaError, match=r"e: GPU\.1 takes experts in 4 or 8 bits.*--experts int4"):
        backend.experts(gated(Encoding.F32, 1, 64, 64, 6), gated(Encoding.F32, 5, 64, 64, 2), 2, "e")


# --- wrong results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["cpu", "gpu"])
def test_results_that_are_wrong_are_refused_at_load(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the constants are wrong; a driver's bug would look the same."""
    monkeypatch.setattr(row_major, "_interleave_nibbles", lambda words: None)
    backend = OpenVINOBackend("CPU", 1, 8, rules=rules(form))
    makers: list[Callable[[], object]] = [
        lambda: backend.projections([stored(Encoding.INT4, 1, 48, 96)], "layers.1.part"),
        lambda: backend.gated_mlp(gated(Encoding.INT4, 1, 64, 128), 1.0, "layers.1.part"),
        lambda: backend.experts(
            gated(Encoding.INT4, 1, 64, 64, 6), gated(Encoding.INT4, 5, 64, 64, 2), 2, "layers.1.part"
        ),
    ]
    for make in makers:
        with pytest.raises(CascadiaError, match=r"layers\.1\.part: .* computes it wrongly at 1 rows"):
            make()


def test_every_bucket_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Runner.__call__

    def wrong_at_16(self: Runner, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        results = real(self, inputs)
        return tuple(result * np.float32(1.5) if len(result) == 16 else result for result in results)

    monkeypatch.setattr(Runner, "__call__", wrong_at_16)
    with pytest.raises(CascadiaError, match=r"m: .* computes it wrongly at 16 rows \(error 5\.0e-01"):
        OpenVINOBackend("CPU", 1, 40, rules=rules("gpu")).gated_mlp(
            gated(Encoding.INT4, 1, 64, 128), 1.0, "m"
        )


def test_a_device_that_fails_at_a_row_count_is_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Runner._bind

    def fail_at_8(self: Runner, inputs: tuple[Any, ...], staged: Any) -> None:
        if len(inputs[0]) == 8:
            raise RuntimeError("Exception from core.cpp:\nUnable to cast reference from base to derived type")
        real(self, inputs, staged)

    monkeypatch.setattr(Runner, "_bind", fail_at_8)
    with pytest.raises(CascadiaError, match=r"layers\.2\.mlp: .* fails at 8 rows \(Unable to cast"):
        OpenVINOBackend("CPU", 1, 40, rules=rules("gpu")).gated_mlp(
            gated(Encoding.INT4, 1, 64, 128), 1.0, "layers.2.mlp"
        )


# --- memory -------------------------------------------------------------------------------------------


def memory(cap: int | None = None, **answers: object) -> DeviceMemory:
    return DeviceMemory(GPU, answers.get, cap)


def test_weights_are_counted_before_they_are_compiled() -> None:
    held = {"usm_host": 40 * GIB, "usm_device": 0}
    found = memory(52 * GIB, GPU_DEVICE_TOTAL_MEM_SIZE=61 * GIB, GPU_MEMORY_STATISTICS=held)
    assert found.limit == 52 * GIB
    assert found.used() == 40 * GIB
    found.require([3 * GIB] * 4, "layers.5.experts")
    with pytest.raises(
        CapacityError,
        match=r"layers\.5\.experts: its weights of 15\.0 GiB .* 40\.0 GiB .* may take 52\.0 GiB",
    ):
        found.require([3 * GIB] * 5, "layers.5.experts")


def test_a_constant_beyond_one_allocation_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"head: GPU\.1 takes 4\.0 GiB in one piece .* 4\.6 GiB"):
        memory().require([4_940_000_000], "head")
    small = memory(GPU_DEVICE_MAX_ALLOC_MEM_SIZE=GIB)
    with pytest.raises(CapacityError, match=r"takes 1\.0 GiB in one piece"):
        small.require([GIB + 1], "head")


def test_a_model_that_takes_much_more_than_its_weights_was_decompressed() -> None:
    held = {"usm_host": 5 * GIB}
    found = memory(GPU_MEMORY_STATISTICS=held)
    found.require_growth(4 * GIB, GIB, "q")
    with pytest.raises(CascadiaError, match=r"q: its weights of 1\.0 GiB take 4\.0 GiB .* decompressed"):
        found.require_growth(GIB, GIB, "q")


def test_what_is_not_known_limits_nothing(tmp_path: Path) -> None:
    found = memory()
    assert found.limit is None
    assert found.used() == 0
    found.require([GIB], "q")
    assert pages_limit(tmp_path / "none") is None
    (tmp_path / "limit").write_text("13631488\n")
    assert pages_limit(tmp_path / "limit") == 52 * GIB
    assert DeviceMemory.of(rules_of("CPU", 1, 4)) is None
