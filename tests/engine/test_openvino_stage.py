"""A whole compressed model by the GPU's rules: the tokens of the exact engine, and none from an overflow."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from engine_world import NO_OPERATIONS, SampleWeights, Window, operations, sample_weights, segments
from test_openvino_encodings import error

from cascadia_p2p.engine.matrix import F32, MatrixBackend
from cascadia_p2p.engine.model import StagePlan
from cascadia_p2p.engine.openvino.backend import OpenVINOBackend
from cascadia_p2p.engine.openvino.device import CPU_EXPERTS, DeviceRules, cpu_properties, rules_of
from cascadia_p2p.engine.openvino.runner import Runner
from cascadia_p2p.engine.stage import Stage
from cascadia_p2p.matrices.encoding import GROUP, Encoding, StoredMatrix
from cascadia_p2p.matrices.packing import pack
from cascadia_p2p.models.stages import stage_builder
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import OperationKind, SegmentError

RECIPE = Recipe("openvino", layers=6)
PROMISE = Promise(slots=2, context=64, rows=16)
IDS = tuple(range(40, 56))


class Compressed(SampleWeights):
    """A sample model with experts and dense layers in INT4 and all other matrices in INT8."""

    def __init__(self, recipe: Recipe) -> None:
        self.tensors = sample_weights(recipe).tensors
        self.stored: dict[str, StoredMatrix] = {}

    def matrix(self, name: str) -> StoredMatrix:
        if name not in self.stored:
            values = self.tensors[name]
            if name.startswith("embed."):
                return StoredMatrix.of(values)
            four = name.split(".")[-1] in ("gate", "up", "down")
            self.stored[name] = in_groups(values) if four else by_outputs(values)
        return self.stored[name]


def in_groups(values: F32) -> StoredMatrix:
    *high, inputs = values.shape
    groups = values.reshape(*high, inputs // GROUP, GROUP)
    scales = np.maximum(np.abs(groups).max(axis=-1) / 7, 1e-6).astype(np.float16)
    codes = np.rint(groups / scales.astype(np.float32)[..., None]).clip(-8, 7).astype(np.int8)
    return pack(Encoding.INT4, values.shape, codes.reshape(values.shape), scales.astype(np.float32))


def by_outputs(values: F32) -> StoredMatrix:
    scales = np.maximum(np.abs(values).max(axis=-1) / 127, 1e-9).astype(np.float32)
    codes = np.rint(values / scales[..., None]).clip(-127, 127).astype(np.int8)
    return pack(Encoding.INT8, values.shape, codes, scales)


@cache
def weights() -> Compressed:
    return Compressed(RECIPE)


def gpu_rules(half_edges: bool = True) -> DeviceRules:
    return replace(
        rules_of("GPU", 1, PROMISE.rows),
        device="CPU",
        properties=cpu_properties(1),
        experts=CPU_EXPERTS,
        half_edges=half_edges,
    )


def exact() -> OpenVINOBackend:
    return OpenVINOBackend("CPU", 1, PROMISE.rows)


def stage_of(backend: MatrixBackend) -> Stage:
    build = stage_builder(RECIPE.config())
    plan = StagePlan(range(RECIPE.layers), PROMISE, 4)
    return Stage(build(plan, weights(), backend, None), PROMISE, 4)


def logits(stage: Stage, window: int) -> F32:
    parts = []
    stage.reset()
    table = operations((OperationKind.START, 1, 0))
    for at in range(0, len(IDS), window):
        part = IDS[at : at + window]
        marked = segments(Window(1, at, part))
        rows = stage.apply(marked, table, np.array(part, np.int32), lambda: None)
        assert (marked["error"] == SegmentError.NONE).all()
        parts.append(stage.logits(rows))
        table = NO_OPERATIONS
    return np.concatenate(parts)


def test_a_compressed_model_by_the_gpus_rules_agrees_with_the_exact_engine() -> None:
    stage = stage_of(exact())
    expected = logits(stage, len(IDS))
    assert np.array_equal(logits(stage, 1), expected), "windows do not matter on the CPU"
    for half_edges in (False, True):
        backend = OpenVINOBackend("CPU", 1, PROMISE.rows, rules=gpu_rules(half_edges))
        stage = stage_of(backend)
        for window in (1, 5, len(IDS)):
            got = logits(stage, window)
            assert error(got, expected.astype(np.float64)) < 1e-2
            assert (got.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.9
        assert backend.recomputed == 0


@pytest.mark.parametrize("with_fallback", [False, True])
def test_a_layer_that_overflows_gives_no_token_or_the_right_one(
    with_fallback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(stage_of(exact()), len(IDS))
    backend = OpenVINOBackend(
        "CPU", 1, PROMISE.rows, rules=gpu_rules(), fallback=exact() if with_fallback else None
    )
    stage = stage_of(backend)
    real = Runner.__call__

    def overflowing(self: Runner, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        results = real(self, inputs)
        if len(inputs) == 3 and inputs[1].shape[1] == RECIPE.chosen + RECIPE.shared and len(inputs[0]) == 2:
            results[0][1, 3] = np.inf
        return results

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "__call__", overflowing)
        windows = (Window(1, 0, IDS[:1], 0, want=True), Window(2, 0, IDS[:1], 1, want=True))
        marked = segments(*windows)
        table = operations((OperationKind.START, 1, 0), (OperationKind.START, 2, 1))
        rows = stage.apply(marked, table, np.array(IDS[:1] * 2, np.int32), lambda: None)
        records, _ = stage.tokens(marked, rows)
    right = int(expected[0].argmax())
    if with_fallback:
        assert records["token"].tolist() == [right, right]
        sparse = RECIPE.layers - RECIPE.dense_layers
        assert backend.recomputed == sparse
        assert backend.recomputed_by_layer == {
            f"layers.{layer}.experts": 1 for layer in range(RECIPE.dense_layers, RECIPE.layers)
        }
    else:
        assert marked["error"].tolist() == [SegmentError.NONE, SegmentError.NON_FINITE]
        assert records["token"].tolist() == [right, -1]
        assert backend.recomputed == 0
