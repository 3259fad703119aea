"""Models of the Llama family: tokens and logits against what transformers gave."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from engine_world import F32, PROMISE, Stages, Window, operations
from fixtures.dense import MODELS, Dense, dense_tensors, load_dense
from fixtures.reference import relative_error

from cascadia_p2p.engine.memory import stage_memory
from cascadia_p2p.matrices.encoding import StoredMatrix
from cascadia_p2p.models.sizing import model_sizes
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import OperationKind

WINDOWS = (1, 8, 64)
SPLITS = {"1 stage": (5,), "3 stages": (2, 1, 2)}


class DenseWeights:
    """A sample model's tensors, as a `TensorSource`."""

    def __init__(self, model: Dense) -> None:
        self.tensors = dense_tensors(model)

    def tensor(self, name: str) -> F32:
        return self.tensors[name]

    def matrix(self, name: str) -> StoredMatrix:
        return StoredMatrix.of(self.tensors[name])


@cache
def stages(name: str, split: tuple[int, ...], threads: int = 1) -> Stages:
    model = MODELS[name]
    return Stages(model.read(), split, DenseWeights(model), PROMISE, threads)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_split_and_window_gives_the_reference_tokens(
    name: str, split: tuple[int, ...], window: int
) -> None:
    ring = stages(name, split)
    for prompt in load_dense(name).prompts:
        ring.start(stream=9)
        logits = ring.prefill(9, prompt.ids + prompt.generated[:-1], window)
        assert relative_error(logits[list(prompt.positions)], prompt.logits) < 1e-4
        assert tuple(logits[len(prompt.ids) - 1 :].argmax(1).tolist()) == prompt.generated
        assert ring.generate(10, prompt.ids, len(prompt.generated), window) == prompt.generated


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
def test_windows_and_company_change_no_bit(name: str) -> None:
    ring = stages(name, (5,))
    one, other = (prompt.ids for prompt in load_dense(name).prompts[1:])
    ring.start(1)
    alone = ring.prefill(1, one, 1)
    for size in (3, 8, 20):
        ring.start(1)
        assert np.array_equal(ring.prefill(1, one, size), alone)
    ring.start(1)
    ring.start(2, slot=1)
    ring.prefill(2, other[:100], 64, slot=1)
    together = ring.logits([Window(2, 100, other[100:120], 1), Window(1, 0, one)])
    assert np.array_equal(together[20:], alone)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_a_stream_that_went_back_goes_on_as_if_it_had_never_been_ahead(name: str) -> None:
    ring = stages(name, (5,))
    ids = load_dense(name).prompts[2].ids
    ring.start(1)
    straight = ring.prefill(1, ids[:110], 16)
    ring.start(1)
    ring.prefill(1, ids[:100], 16)
    wrong = [(token + 1) % 320 for token in ids[100:110]]
    ring.logits([Window(1, 100, wrong)])
    back = operations((OperationKind.REWIND, 1, 0, 100))
    again = ring.logits([Window(1, 100, ids[100:110])], back)
    assert np.array_equal(again, straight[100:])


def test_memory_of_a_known_model_is_that_of_its_sizes() -> None:
    """Two layers and the head of the model `llama`: 6 + 2 + 2 heads of 8, hidden 48, inner 96."""
    promise = Promise(slots=3, context=400, rows=64)
    two = stage_memory(model_sizes(MODELS["llama"].read()), range(3, 5), promise, 16)
    assert two.weights == 4 * (2 * (48 * (48 + 2 * 16) + 48 * 48 + 3 * 48 * 96) + 320 * 48)
    # Values of 8 numbers are stored as 16; 400 positions take seven blocks of 64, and one is nobody's.
    assert two.caches == 2 * (1 + 3 * 7) * 64 * 2 * 4 * (8 + 16)
    windowed = stage_memory(model_sizes(MODELS["mistral-window"].read()), range(1), promise, 16)
    # 36 seen and 64 new positions may touch three blocks.
    assert windowed.caches == (1 + 3 * 3) * 64 * 2 * 4 * (8 + 16)
