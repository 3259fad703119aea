"""FP16's range: layers that overflow it are wrong without the guards and right with them.

The device is emulated in numpy: FP16 rows in and out, FP16 weights, float32 sums inside a product, FP16
between products. Where this machine's CPU computes in FP16 itself, it does so as a second device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from stored_world import aligned, drawn_ids, experts, gated, mlp, stored
from test_openvino_row_major import numbers

from cascadia_p2p.engine.kernel_backend import KernelBackend
from cascadia_p2p.engine.kernels.instructions import instructions
from cascadia_p2p.engine.matrix import F32, GatedWeights
from cascadia_p2p.engine.openvino.backend import OpenVINOBackend
from cascadia_p2p.engine.openvino.device import core, cpu_properties, rules_of
from cascadia_p2p.engine.openvino.graphs import Gated
from cascadia_p2p.engine.openvino.guards import (
    GuardedProjections,
    Recomputed,
    input_factors,
    out_of_range,
    power_above,
    restore,
    routing_factors,
)
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.matrices.encoding import Encoding, StoredMatrix

ROWS, WIDTH, INNER, COUNT, CHOSEN, SHARED = 8, 128, 96, 6, 3, 2
WEIGHTED, UNWEIGHTED = 173_194.0, -94_909.0
"""The largest expert outputs of the large model, at layers 40 and 8."""

RULES = replace(rules_of("GPU", 1, ROWS), device="CPU", properties=cpu_properties(1))


class Fp16Device:
    """The fused operation on a stack of experts, as a device with FP16 between its products computes it."""

    def __init__(self, stack: Gated) -> None:
        parts = (numbers(part).astype(np.float16).astype(np.float32) for part in stack.matrices)
        self.gate, self.up, self.down = parts

    def __call__(self, inputs: Sequence[npt.NDArray[np.generic]]) -> tuple[npt.NDArray[np.float16]]:
        x, ids, weights = inputs
        out = np.zeros(x.shape, np.float16)
        with np.errstate(over="ignore", invalid="ignore"):
            for row, rows in enumerate(x.astype(np.float16).astype(np.float32)):
                terms = np.zeros(x.shape[1], np.float32)
                for expert, weight in zip(ids[row], weights[row], strict=True):
                    gate, up = (half(part[expert] @ rows) for part in (self.gate, self.up))
                    hidden = half(gate / (1 + np.exp(-gate)) * up)
                    terms += np.float32(weight) * half(self.down[expert] @ hidden)
                out[row] = terms.astype(np.float16)
        return (out,)


def half(values: F32) -> F32:
    return values.astype(np.float16).astype(np.float32)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[Fp16Device]:
    """Every stack of a backend runs on an emulated device; those that were made."""
    made: list[Fp16Device] = []

    def stack_runner(self: OpenVINOBackend, stack: Gated, *_: object) -> Fp16Device:
        made.append(Fp16Device(stack))
        return made[-1]

    monkeypatch.setattr(OpenVINOBackend, "_stack_runner", stack_runner)
    return made


def times(matrix: StoredMatrix, factor: float) -> StoredMatrix:
    """The matrix with its FP16 scales multiplied."""
    codes = matrix.codes.copy()
    scales = np.ascontiguousarray(codes[..., :64]).view("<f2") * np.float16(factor)
    codes[..., :64] = scales.astype("<f2").view(np.uint8)
    return aligned(replace(matrix, codes=codes))


def largest_is(weights: GatedWeights, x: F32, target: float) -> GatedWeights:
    """A stack whose largest output of its first matrix for the first row is `target`."""
    found = np.abs(mlp(weights, x[0].astype(np.float64), (0,))).max()
    # Both by the same: neither inner nor outer numbers leave FP16 before the result does.
    root = float(np.sqrt(abs(target) / found))
    return GatedWeights(weights.gate, times(weights.up, root), times(weights.down, root))


def draw(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stacks() -> tuple[GatedWeights, GatedWeights]:
    return gated(Encoding.INT4, 1, WIDTH, INNER, COUNT), gated(Encoding.INT4, 5, WIDTH, INNER, SHARED)


def error(got: F32, expected: npt.NDArray[np.float64]) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def test_a_weighted_sum_beyond_fp16_is_right_by_the_rows_own_power_of_two(
    emulated: list[Fp16Device],
) -> None:
    routed, shared = stacks()
    x, ids = draw(1, ROWS, WIDTH), drawn_ids(2, ROWS, COUNT, CHOSEN)
    ids[0] = (0, 2, 4)
    weights, gammas = np.full((ROWS, CHOSEN), 0.3, np.float32), np.full((ROWS, SHARED), 0.2, np.float32)
    weights[0, 0] = 98.0
    routed = largest_is(routed, x, WEIGHTED / 98.0)
    backend = OpenVINOBackend("CPU", 1, ROWS, rules=RULES)
    call = backend.experts(routed, shared, CHOSEN, "layers.40.experts")
    expected = experts(routed, shared, x, ids, weights, gammas)
    assert np.abs(expected[0]).max() > 0.9 * WEIGHTED
    plain = emulated[0]((x, ids, weights))[0]
    assert not np.isfinite(plain[0]).all(), "without the guard it overflows"
    got = call(x, ids, weights, gammas)
    for row in range(ROWS):
        assert error(got[row], expected[row]) < 4e-3
    assert backend.recomputed == 0


@pytest.mark.parametrize("attenuation", [0, 4])
def test_an_experts_own_output_beyond_fp16_needs_the_layers_attenuation(
    emulated: list[Fp16Device], attenuation: int
) -> None:
    routed, shared = stacks()
    x, ids = draw(1, ROWS, WIDTH), drawn_ids(2, ROWS, COUNT, CHOSEN)
    x[1:] *= 0.25
    weights, gammas = np.full((ROWS, CHOSEN), 0.1, np.float32), np.full((ROWS, SHARED), 0.1, np.float32)
    shared = largest_is(shared, x, UNWEIGHTED)
    backend = OpenVINOBackend("CPU", 1, ROWS, rules=RULES)
    call = backend.experts(routed, shared, CHOSEN, "layers.8.experts", attenuation=attenuation)
    expected = experts(routed, shared, x, ids, weights, gammas)
    # What is summed fits into FP16; the term on the way does not.
    assert np.abs(expected).max() < 65_000
    got = call(x, ids, weights, gammas)
    for row in range(1, ROWS):
        assert error(got[row], expected[row]) < 4e-3
    if attenuation:
        assert error(got[0], expected[0]) < 4e-3
    else:
        assert np.isnan(got[0]).all(), "a row that is wrong in one place is not to be used at all"
    assert backend.recomputed == 0


@pytest.mark.parametrize("kind", ["openvino", "kernels"])
def test_rows_that_overflow_are_computed_again_and_counted(emulated: list[Fp16Device], kind: str) -> None:
    routed, shared = stacks()
    x, ids = draw(1, ROWS, WIDTH), drawn_ids(2, ROWS, COUNT, CHOSEN)
    x[1:] *= 0.25
    weights, gammas = np.full((ROWS, CHOSEN), 0.1, np.float32), np.full((ROWS, SHARED), 0.1, np.float32)
    shared = largest_is(shared, x, UNWEIGHTED)
    if kind == "kernels" and instructions() is None:
        pytest.skip("this processor can not run the kernels")
    fallback = KernelBackend("exact", ROWS, 1) if kind == "kernels" else OpenVINOBackend("CPU", 1, ROWS)
    backend = OpenVINOBackend("CPU", 1, ROWS, rules=RULES, fallback=fallback)
    call = backend.experts(routed, shared, CHOSEN, "layers.8.experts")
    alone = call(x[1:], ids[1:], weights[1:], gammas[1:]).copy()
    assert backend.recomputed == 0
    got = call(x, ids, weights, gammas)
    assert error(got[0], experts(routed, shared, x, ids, weights, gammas)[0]) < 1e-5
    assert np.array_equal(got[1:], alone)
    call(x[:1], ids[:1], weights[:1], gammas[:1])
    assert backend.recomputed == 2
    assert backend.recomputed_by_layer == {"layers.8.experts": 2}
    x[0, 5] = np.nan
    assert np.isnan(call(x, ids, weights, gammas)[0]).all()
    assert backend.recomputed == 2, "a row that failed in an earlier layer is not computed again"


def test_a_layer_that_is_wrong_on_the_device_is_not_hidden_by_the_fallback(
    emulated: list[Fp16Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Fp16Device, "__call__", lambda self, inputs: (np.full((len(inputs[0]), WIDTH), np.inf),)
    )
    backend = OpenVINOBackend("CPU", 1, ROWS, rules=RULES, fallback=OpenVINOBackend("CPU", 1, ROWS))
    with pytest.raises(CascadiaError, match=r"layers\.3\.experts: .* computes it wrongly at 1 rows"):
        backend.experts(*stacks(), CHOSEN, "layers.3.experts")


def test_slices_of_a_dense_layer_are_summed_within_range(emulated: list[Fp16Device]) -> None:
    """Each slice fits into FP16 and their sum does not."""
    weights = gated(Encoding.INT4, 1, WIDTH, 192)
    x = draw(1, ROWS, WIDTH)
    found = np.abs(mlp(weights, x.astype(np.float64))).max()
    root = float(np.sqrt(90_000 / found))
    weights = GatedWeights(weights.gate, times(weights.up, root), times(weights.down, root))
    backend = OpenVINOBackend("CPU", 1, ROWS, rules=RULES)
    call = backend.gated_mlp(weights, 1.5, "layers.0.mlp", attenuation=1)
    expected = 1.5 * mlp(weights, x)
    assert np.abs(expected).max() > 130_000
    assert error(call(x), expected) < 6e-3


@pytest.mark.parametrize("attenuation", [0, 4])
def test_a_cpu_that_computes_in_fp16_agrees(attenuation: int) -> None:
    if "FP16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU has no FP16 arithmetic")
    properties = {"INFERENCE_PRECISION_HINT": "f16", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    rules = replace(RULES, properties=properties, one_operation=False)
    weights = gated(Encoding.F32, 1, WIDTH, 256)
    x = draw(1, ROWS, WIDTH)
    x[1:] *= 0.25
    root = float(np.sqrt(-UNWEIGHTED / np.abs(mlp(weights, x[:1].astype(np.float64))).max()))
    up, down = (StoredMatrix.of(part.codes * np.float32(root)) for part in (weights.up, weights.down))
    weights = GatedWeights(weights.gate, up, down)
    expected = mlp(weights, x)
    exact = OpenVINOBackend("CPU", 1, ROWS)
    for fallback, counted in ((None, 0), (exact, 1)):
        backend = OpenVINOBackend("CPU", 1, ROWS, rules=rules, fallback=fallback)
        got = backend.gated_mlp(weights, 1.0, "layers.0.mlp", attenuation=attenuation)(x)
        assert max(error(got[row], expected[row]) for row in range(1, ROWS)) < 4e-3
        if attenuation or fallback:
            assert error(got[0], expected[0]) < 4e-3
        else:
            assert np.isnan(got[0]).all()
        assert backend.recomputed == (0 if attenuation else counted)


def test_projections_of_large_rows_stay_in_range() -> None:
    """Rows are scaled into -1 to 1 before they are FP16, and back behind the product."""
    matrix = stored(Encoding.F32, 1, 24, WIDTH)
    x = draw(1, ROWS, WIDTH) * np.float32(3e5)

    def device(rows: F32) -> list[npt.NDArray[np.float16]]:
        with np.errstate(over="ignore", invalid="ignore"):
            return [half(half(rows) @ matrix.codes.T).astype(np.float16)]

    call = GuardedProjections(device, [24], ROWS, None, Recomputed(), "p")
    assert not np.isfinite(device(x)[0]).all()
    assert error(call(x)[0], x.astype(np.float64) @ matrix.codes.T.astype(np.float64)) < 2e-3


FLOATS = st.floats(0, 2.0**100, width=32)


@given(arrays.arrays(np.float32, st.integers(1, 9), elements=FLOATS))
def test_power_above_is_the_least_power_of_two(values: F32) -> None:
    powers = power_above(values)
    mantissas, _ = np.frexp(powers)
    assert (mantissas == 0.5).all()
    assert (powers >= np.maximum(values, 1)).all()
    assert ((powers / 2 < values) | (powers == 1)).all()


def test_power_above_of_what_is_not_finite_is_one() -> None:
    assert power_above(np.array([np.nan, np.inf, -np.inf, 0], np.float32)).tolist() == [1, 1, 1, 1]


@given(
    arrays.arrays(np.float32, (4, 3), elements=st.floats(-105, 105, width=32)),
    arrays.arrays(np.float32, (4, 2), elements=st.floats(-105, 105, width=32)),
)
def test_routing_factors_bound_the_sum_and_restore_exactly(weights: F32, shared: F32) -> None:
    factors = routing_factors(weights, shared)
    scaled = weights / factors
    total = np.abs(scaled).sum(axis=1) + np.abs(shared / factors).sum(axis=1)
    assert (total <= 1.000001).all()
    normal = np.abs(weights) > 1e-30
    assert np.array_equal((scaled * factors)[normal], weights[normal])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65504.0, -65504.0])
def test_a_row_at_the_end_of_the_range_counts_as_outside(value: float) -> None:
    """A device may stop at the largest number in place of infinity."""
    results = np.ones((3, 4), np.float16)
    results[1, 2] = value
    out = np.zeros((3, 4), np.float32)
    assert restore(results, np.full((3, 1), 4, np.float32), out).tolist() == [False, True, False]
    assert (out[0] == 4).all()


def test_rows_that_fp16_can_not_hold() -> None:
    x = np.array([[1, 65504], [65520, 0], [np.nan, 0], [-np.inf, 0]], np.float32)
    assert out_of_range(x).tolist() == [False, True, True, True]
    assert input_factors(x[:2]).tolist() == [[65536], [65536]]
