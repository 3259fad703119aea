"""Compressed weights: the same numbers as float64 on what they stand for, in the CPU's forms and the GPU's.

The GPU's graphs run on the CPU here, by the GPU's rules but for the device: shared experts as ids, dense
layers as slices, calls filled up to buckets, rows crossing in FP16.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from stored_world import INTEGER, drawn_ids, experts, gated, mlp, stored

from cascadia_p2p.engine.matrix import F32, GatedWeights
from cascadia_p2p.engine.openvino import backend as backend_room
from cascadia_p2p.engine.openvino.arrange import Form, sliced_mlp, slices_of
from cascadia_p2p.engine.openvino.backend import OpenVINOBackend
from cascadia_p2p.engine.openvino.device import (
    CPU_EXPERTS,
    DeviceRules,
    cpu_properties,
    row_buckets,
    rules_of,
)
from cascadia_p2p.engine.openvino.graphs import Graph
from cascadia_p2p.engine.openvino.nodes import Compiled, node_kinds
from cascadia_p2p.engine.openvino.runner import Runner
from cascadia_p2p.matrices.encoding import Encoding, StoredMatrix
from cascadia_p2p.matrices.packing import dense

ROWS = 40
FORMS = ("cpu", "gpu", "gpu-half")
TOLERANCE = {"cpu": 3e-6, "gpu": 1e-3, "gpu-half": 3e-3}
"""The GPU's forms round scales of 8 bits to FP16, and rows where those cross in it."""


def rules(form: str, threads: int = 1) -> DeviceRules:
    if form == "cpu":
        return rules_of("CPU", threads, ROWS)
    return replace(
        rules_of("GPU", threads, ROWS),
        device="CPU",
        properties=cpu_properties(threads),
        experts=CPU_EXPERTS,
        half_edges=form == "gpu-half",
    )


def backend(form: str, threads: int = 1) -> OpenVINOBackend:
    return OpenVINOBackend("CPU", threads, ROWS, rules=rules(form, threads))


def draw(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def same_bits(call: Callable[[slice], F32]) -> F32:
    """The result for all rows, once calls of other numbers of rows have given the same bits."""
    everything = call(slice(0, ROWS)).copy()
    for count in (1, 2, 3, 8, 17, 33, 1):
        parts = [call(slice(at, at + count)).copy() for at in range(0, ROWS, count)]
        assert np.array_equal(np.concatenate(parts), everything), f"{count} rows a call give other bits"
    return everything


def error(got: F32, expected: npt.NDArray[np.float64]) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("encoding", [*INTEGER, Encoding.INT4_AFFINE, Encoding.BF16])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(64, (64, 32, 32, 16)), (32, (5,)), (100, (7, 1)), (1, (3,)), (1536, (700, 130))]
)
def test_projections(form: str, encoding: Encoding, inputs: int, outputs: tuple[int, ...]) -> None:
    weights = [stored(encoding, n, width, inputs) for n, width in enumerate(outputs)]
    project = backend(form).projections(weights, "p")
    x = draw(9, ROWS, inputs)
    got = same_bits(lambda rows: np.concatenate(project(x[rows]), axis=1))
    expected = x.astype(np.float64) @ np.concatenate([dense(weight) for weight in weights]).T
    assert error(got, expected) < TOLERANCE[form]
    assert all(part.dtype == np.float32 and part.flags.c_contiguous for part in project(x[:1]))


def test_projections_of_several_encodings_share_their_rows() -> None:
    kinds = (Encoding.INT8, Encoding.INT4, Encoding.F32, Encoding.INT8_GROUPED)
    weights = [stored(encoding, n, 20 + n, 72) for n, encoding in enumerate(kinds)]
    x = draw(9, ROWS, 72)
    for got, weight in zip(backend("cpu").projections(weights, "p")(x), weights, strict=True):
        assert error(got, x.astype(np.float64) @ dense(weight).T) < 3e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("encoding", [*INTEGER, Encoding.INT4_AFFINE])
@pytest.mark.parametrize(
    ("width", "inner"), [(64, 128), (40, 72), (32, 32), (100, 1), (96, 200), (128, 3136)]
)
def test_gated_mlp(form: str, encoding: Encoding, width: int, inner: int) -> None:
    weights = gated(encoding, 1, width, inner)
    call = backend(form).gated_mlp(weights, 0.75, "m", attenuation=3)
    x = draw(9, ROWS, width)
    got = same_bits(lambda rows: call(x[rows]))
    assert error(got, 0.75 * mlp(weights, x)) < TOLERANCE[form]


@pytest.mark.parametrize("encoding", INTEGER)
def test_an_attenuation_that_fp16_scales_can_not_hold(encoding: Encoding) -> None:
    """All scales of the layer become float32 then: a fused node wants them of one type."""
    weights = gated(encoding, 1, 64, 128)
    stack = sliced_mlp(weights, Form(half=True, attenuation=16))
    assert [matrix.scales.dtype for matrix in stack.matrices if matrix.scales is not None] == [np.float32] * 3
    x = draw(9, ROWS, 64)
    call = backend("gpu").gated_mlp(weights, 1.0, "m", attenuation=16)
    assert error(call(x), mlp(weights, x)) < TOLERANCE["gpu"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("encoding", INTEGER)
@pytest.mark.parametrize(
    ("width", "inner", "count", "chosen", "shared"),
    [(64, 64, 12, 3, 2), (96, 40, 2, 2, 1), (40, 24, 3, 1, 3), (256, 128, 8, 6, 2), (64, 32, 1, 1, 1)],
)
def test_experts(
    form: str, encoding: Encoding, width: int, inner: int, count: int, chosen: int, shared: int
) -> None:
    routed, always = gated(encoding, 1, width, inner, count), gated(encoding, 5, width, inner, shared)
    call = backend(form, threads=2).experts(routed, always, chosen, "e", attenuation=2)
    x, ids = draw(9, ROWS, width), drawn_ids(3, ROWS, count, chosen)
    weights, gammas = np.abs(draw(4, ROWS, chosen)) + 0.1, np.abs(draw(5, ROWS, shared)) + 0.1
    got = same_bits(lambda rows: call(x[rows], ids[rows], weights[rows], gammas[rows]))
    assert error(got, experts(routed, always, x, ids, weights, gammas)) < TOLERANCE[form]


def test_shared_experts_of_another_encoding_ride_outside() -> None:
    routed, always = gated(Encoding.INT4, 1, 72, 64, 6), gated(Encoding.INT8, 5, 72, 64, 2)
    x, ids = draw(9, ROWS, 72), drawn_ids(3, ROWS, 6, 2)
    weights, gammas = np.abs(draw(4, ROWS, 2)), np.abs(draw(5, ROWS, 2))
    for form in FORMS:
        call = backend(form).experts(routed, always, 2, "e")
        expected = experts(routed, always, x, ids, weights, gammas)
        assert error(call(x, ids, weights, gammas), expected) < TOLERANCE[form]


def test_experts_of_codes_with_offsets_are_taken_as_numbers() -> None:
    """No sparse node has offsets that are not whole codes."""
    kind = Encoding.INT4_AFFINE
    routed, always = gated(kind, 1, 72, 40, 6), gated(kind, 5, 72, 40, 2)
    x, ids = draw(9, ROWS, 72), drawn_ids(3, ROWS, 6, 2)
    weights, gammas = np.abs(draw(4, ROWS, 2)), np.abs(draw(5, ROWS, 2))
    call = backend("cpu").experts(routed, always, 2, "e")
    got = call(x, ids, weights, gammas)
    assert error(got, experts(routed, always, x, ids, weights, gammas)) < 3e-6


def compiled_kinds(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[OpenVINOBackend], object], form: str
) -> tuple[dict[str, int], Graph]:
    found: list[tuple[dict[str, int], Graph]] = []
    real = OpenVINOBackend._compile

    def note(self: OpenVINOBackend, graph: Graph, name: str) -> tuple[Graph, Compiled]:
        graph, compiled = real(self, graph, name)
        found.append((node_kinds(compiled), graph))
        return graph, compiled

    monkeypatch.setattr(backend_room.OpenVINOBackend, "_compile", note)
    make(backend(form))
    assert len(found) == 1
    return found[0]


def test_on_the_gpu_shared_experts_are_two_more_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sparse block and nothing beside it; on the CPU a plain MLP stands beside it."""
    routed, always = gated(Encoding.INT4, 1, 64, 64, 6), gated(Encoding.INT4, 5, 64, 64, 2)

    def make(backend: OpenVINOBackend) -> object:
        return backend.experts(routed, always, 3, "e")

    with monkeypatch.context() as patch:
        kinds, graph = compiled_kinds(patch, make, "gpu")
    assert kinds["GatherMatmul"] == 3
    assert "FullyConnected" not in kinds
    assert [source.shape for source in graph.sources] == [(8, 64, 32)] * 3
    assert [node.get_partial_shape()[1].get_length() for node in graph.inputs] == [64, 5, 5]
    with monkeypatch.context() as patch:
        kinds, graph = compiled_kinds(patch, make, "cpu")
    assert kinds["GatherMatmul"] == 3
    # Gate, up and down of both shared experts at once.
    assert kinds["FullyConnected"] == 3


def test_on_the_gpu_dense_layers_are_slices_cut_between_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = gated(Encoding.INT4, 1, 64, 6144)
    kinds, graph = compiled_kinds(monkeypatch, lambda backend: backend.gated_mlp(weights, 1.0, "m"), "gpu")
    assert kinds["GatherMatmul"] == 3
    assert "FullyConnected" not in kinds
    assert [source.shape for source in graph.sources] == [(2, 3072, 32), (2, 3072, 32), (2, 64, 1536)]
    assert slices_of(24576) == 8


@pytest.mark.parametrize("encoding", INTEGER)
def test_experts_are_not_read_where_they_were_once_they_are_packed(
    encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory behind their constants is given back, so what lies there later must not matter."""
    sources: list[npt.NDArray[np.uint8]] = []
    real = OpenVINOBackend._compile

    def note(self: OpenVINOBackend, graph: Graph, name: str) -> tuple[Graph, Compiled]:
        sources.extend(graph.sources)
        return real(self, graph, name)

    monkeypatch.setattr(OpenVINOBackend, "_compile", note)
    routed, always = gated(encoding, 1, 96, 64, 6), gated(encoding, 5, 96, 64, 2)
    call = backend("cpu", threads=2).experts(routed, always, 2, "e")
    stacks = [source for source in sources if source.ndim == 3]
    assert len(stacks) == 3
    for source in stacks:
        source.fill(0x55)
    x, ids = draw(9, ROWS, 96), drawn_ids(3, ROWS, 6, 2)
    weights, gammas = np.abs(draw(4, ROWS, 2)), np.abs(draw(5, ROWS, 2))
    expected = experts(routed, always, x, ids, weights, gammas)
    for count in range(1, ROWS + 1):
        assert error(call(x[:count], ids[:count], weights[:count], gammas[:count]), expected[:count]) < 3e-6


@pytest.mark.parametrize("encoding", INTEGER)
def test_plain_products_may_be_called_with_any_number_of_rows(encoding: Encoding) -> None:
    """They pack anew for some numbers of rows, from memory that has to be kept for that."""
    matrix = stored(encoding, 8, 64, 96)
    project = backend("cpu", threads=2).projections([matrix], "p")
    gc.collect()
    filler = [np.full((64, 96 // 2), 0x55, np.uint8) for _ in range(64)]
    x = draw(9, ROWS, 96)
    expected = x.astype(np.float64) @ dense(matrix).T
    for count in range(1, ROWS + 1):
        assert error(project(x[:count])[0], expected[:count]) < 3e-6
    assert len(filler) == 64


@pytest.mark.parametrize(
    ("rows", "buckets"),
    [(1, (2,)), (2, (2,)), (3, (2, 3)), (8, (2, 8)), (64, (2, 8, 16, 24, 32, 64)), (20, (2, 8, 16, 20))],
)
def test_row_buckets(rows: int, buckets: tuple[int, ...]) -> None:
    assert row_buckets(rows) == buckets


def test_many_rows_have_few_buckets() -> None:
    buckets = row_buckets(600)
    assert buckets == (2, 8, 16, 24, 32, 64, 96, 128, 256, 384, 512, 600)


def test_calls_are_filled_up_with_row_0_and_without_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU reads each distinct expert once: rows that fill up bring none of their own."""
    seen: list[tuple[npt.NDArray[np.generic], ...]] = []
    real = Runner._bind

    def note(self: Runner, inputs: tuple[npt.NDArray[np.generic], ...], staged: object) -> None:
        seen.append(tuple(array.copy() for array in inputs))
        real(self, inputs, staged)  # type: ignore[arg-type]

    routed, always = gated(Encoding.INT4, 1, 64, 64, 6), gated(Encoding.INT4, 5, 64, 64, 2)
    call = backend("gpu").experts(routed, always, 2, "e")
    monkeypatch.setattr(Runner, "_bind", note)
    ids = np.array([[1, 4], [2, 5], [0, 3]], np.int32)
    call(draw(1, 3, 64), ids, np.full((3, 2), 0.25, np.float32), np.full((3, 2), 0.25, np.float32))
    x, all_ids, weights = seen[-1]
    assert len(x) == 8
    assert np.array_equal(x[3:], np.repeat(x[:1], 5, axis=0))
    assert all_ids.tolist() == [[1, 4, 6, 7], [2, 5, 6, 7], [0, 3, 6, 7], *[[1, 4, 6, 7]] * 5]
    assert (weights[:3] == 0.25).all()
    assert not weights[3:].any()
    assert len(seen) == 1


def test_every_bucket_is_called_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: set[int] = set()
    real = Runner._bind

    def note(self: Runner, inputs: tuple[npt.NDArray[np.generic], ...], staged: object) -> None:
        counts.add(len(inputs[0]))
        real(self, inputs, staged)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "_bind", note)
    backend("gpu").gated_mlp(gated(Encoding.INT4, 1, 64, 64), 1.0, "m")
    assert counts == {2, 8, 16, 24, 32, 40}


def test_stored_matrices_may_be_read_only() -> None:
    matrix = stored(Encoding.INT4, 1, 32, 64)
    codes = matrix.codes.copy()
    codes.flags.writeable = False
    frozen = StoredMatrix(matrix.encoding, matrix.shape, codes)
    x = draw(1, 2, 64)
    got = backend("cpu").projections([frozen], "p")(x)[0]
    assert error(got, x.astype(np.float64) @ dense(matrix).T) < 3e-6


def test_gated_weights_of_several_encodings() -> None:
    weights = GatedWeights(
        stored(Encoding.INT4, 1, 72, 40), stored(Encoding.INT8, 2, 72, 40), stored(Encoding.F32, 3, 40, 72)
    )
    x = draw(9, ROWS, 40)
    for form in FORMS:
        call = backend(form).gated_mlp(weights, 1.0, "m")
        assert error(call(x), mlp(weights, x)) < TOLERANCE[form]
