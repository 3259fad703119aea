"""Threads that go through phases together: nothing twice, nothing left out, whoever comes late or never."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numba
import numpy as np
import pytest
from engine_world import Ring, SampleWeights, Stages, Window, sample_weights
from fixtures.dense import MODELS, dense_tensors
from stored_world import Coded, drawn_ids, gated, stored

from cascadia_p2p.compiled import compiling
from cascadia_p2p.compiled.addresses import I64, fetch_add, load_acquire, longs
from cascadia_p2p.engine.kernel_backend import KernelBackend
from cascadia_p2p.engine.kernels.team import STRIDE, announce, announced, claim, done, new_counters, wait
from cascadia_p2p.engine.matrix import F32
from cascadia_p2p.engine.openvino.backend import OpenVINOBackend
from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.types import Promise

RECIPE = Recipe("team", layers=7, dense_layers=2)
IDS = np.random.default_rng(1).integers(0, RECIPE.vocab_valid, 40).tolist()


@pytest.fixture
def two_threads() -> Iterator[None]:
    if compiling.set_threads(2) < 2:
        compiling.set_threads(1)
        pytest.skip("one core")
    compiling.warm_up()
    yield
    compiling.set_threads(1)


@cache
def worker() -> Callable[[int, int, int, int, int], None]:
    """Goes through phases of which each says in its first chunk how many chunks the next one has."""

    @numba.njit("(int64, int64, int64, int64, int64)", nogil=True)  # type: ignore[untyped-decorator]
    def run(counters: int, log: int, phases: int, most: int, spin: int) -> None:
        count = 3
        for phase in range(phases):
            while True:
                chunk = claim(counters, phase, count)
                if chunk < 0:
                    break
                # All of the phase before has to be done by now.
                if phase > 0:
                    for before in range(announced(counters, phase - 1) if phase > 1 else 3):
                        if load_acquire(log + 8 * ((phase - 1) * most + before)) != 1:
                            fetch_add(log + 8 * (phases * most), 1)
                for _ in range(chunk * spin):
                    load_acquire(log)
                if chunk == 0:
                    announce(counters, phase + 1, (count * 5 + phase) % most)
                fetch_add(log + 8 * (phase * most + chunk), 1)
                done(counters, phase)
            wait(counters, phase, count)
            # A phase of no chunks says nothing of the next.
            if count == 0:
                longs(counters + 8 * STRIDE * (phase + 1), 2)[1] = 2
            count = announced(counters, phase + 1)

    found: Callable[[int, int, int, int, int], None] = run
    return found


def passed(log: I64, phases: int, most: int) -> bool:
    """Every chunk of every phase once, in order of phases, and no other."""
    count, right = 3, log[-1] == 0
    for phase in range(phases):
        right = right and (log[phase * most : phase * most + count] == 1).all()
        right = right and not log[phase * most + count : (phase + 1) * most].any()
        count = (count * 5 + phase) % most if count else 2
    return bool(right)


@pytest.mark.parametrize("seed", range(12))
def test_every_chunk_is_done_once_whoever_comes_late(seed: int) -> None:
    rng, phases, most = np.random.default_rng(seed), 60, 11
    counters = new_counters(phases + 1)
    for _ in range(4):
        log = np.zeros(phases * most + 1, np.int64)
        counters[:] = 0
        begun = threading.Barrier(3)

        def go(delay: float, spin: int, begun: threading.Barrier = begun, log: I64 = log) -> None:
            begun.wait()
            time.sleep(delay)
            worker()(counters.ctypes.data, log.ctypes.data, phases, most, spin)

        pauses = [0.0, *rng.choice([0.0, 1e-4, 1e-3, 2e-2], 2)]
        team = [threading.Thread(target=go, args=(pause, int(rng.integers(0, 400)))) for pause in pauses]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join(30)
        assert not any(thread.is_alive() for thread in team)
        assert passed(log, phases, most)
        # Who comes when all is done finds nothing to do.
        before = log.copy()
        worker()(counters.ctypes.data, log.ctypes.data, phases, most, 0)
        assert np.array_equal(log, before)


def test_one_thread_goes_through_alone() -> None:
    log, counters = np.zeros(20 * 7 + 1, np.int64), new_counters(21)
    worker()(counters.ctypes.data, log.ctypes.data, 20, 7, 0)
    assert passed(log, 20, 7)


def test_counters_lie_a_cache_line_apart() -> None:
    for phases in (1, 3, 50):
        counters = new_counters(phases)
        assert len(counters) == phases * STRIDE
        assert counters.ctypes.data % (8 * STRIDE) == 0
        assert not counters.any()


def inkling(precision: str) -> Stages:
    source = Coded(sample_weights(RECIPE).tensors)
    return Stages(RECIPE.config(), (7,), source, Promise(1, 64, 20), compiling.threads(), 0, precision)


def llama(precision: str) -> Stages:
    model = MODELS["qwen3"]
    source = Coded(dense_tensors(model))
    config = model.read()
    split = (config.layers,)
    return Stages(config, split, source, Promise(1, 64, 20), compiling.threads(), 0, precision)


def run(stages: Stages) -> F32:
    stages.start(1)
    return stages.prefill(1, [i % 200 for i in IDS], 20)


@pytest.mark.parametrize("make", [inkling, llama])
@pytest.mark.parametrize("precision", ["exact", "fine", "fast"])
def test_whoever_shares_a_stages_work_gets_the_same_bits(
    make: Callable[[str], Stages], precision: str, two_threads: None
) -> None:
    together = make(precision)
    assert together.stages[0].model.layers
    shared = run(together)
    # Threads that run one after the other: the first finds all the work, the second none.
    compiling.set_threads(1)
    assert np.array_equal(run(together), shared)
    assert np.array_equal(run(make(precision)), shared)


def mixture_call(seed: int, threads: int) -> Callable[[], F32]:
    layer = KernelBackend("fast", 12, threads).experts(
        gated(Encoding.INT4, seed, 96, 64, 6), gated(Encoding.INT8, seed, 96, 64, 1), 2, "test"
    )
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((12, 96)).astype(np.float32)
    ids, ones = drawn_ids(seed, 12, 6, 2), np.ones((12, 2), np.float32)
    return lambda: layer(x, ids, ones, ones[:, :1]).copy()


def projection_call(seed: int, threads: int) -> Callable[[], F32]:
    matrix = stored(Encoding.INT4, seed, 4000, 256)
    project = KernelBackend("fine", 12, threads).projections([matrix], "test")
    x = np.random.default_rng(seed).standard_normal((12, 256)).astype(np.float32)
    return lambda: project(x)[0].copy()


def openvino_call(seed: int, threads: int) -> Callable[[], F32]:
    matrix = stored(Encoding.F32, seed, 400, 256)
    project = OpenVINOBackend("CPU", threads, 12).projections([matrix], "test")
    x = np.random.default_rng(seed).standard_normal((12, 256)).astype(np.float32)
    return lambda: project(x)[0].copy()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("make", [mixture_call, projection_call])
def test_threads_one_after_the_other(make: Callable[[int, int], Callable[[], F32]], threads: int) -> None:
    call = make(3, threads)
    expected = make(3, 1)()
    for _ in range(3):
        assert np.array_equal(call(), expected)


def test_two_hundred_calls_of_two_threads_give_the_same_bits(two_threads: None) -> None:
    stages = inkling("fast")
    expected = run(stages)
    for _ in range(100):
        assert np.array_equal(run(stages), expected)
    call = mixture_call(4, 2)
    first = call()
    for _ in range(200):
        assert np.array_equal(call(), first)


def repeat(calls: list[Callable[[], F32]], times: int) -> None:
    """Each call in a thread of its own, all at once; every result has to be the first one again."""
    expected = [call() for call in calls]
    wrong: list[Any] = []

    def go(call: Callable[[], F32], right: F32) -> None:
        try:
            for _ in range(times):
                if not np.array_equal(call(), right):
                    wrong.append("other bits")
        except Exception as error:
            wrong.append(error)

    team = [threading.Thread(target=go, args=pair, daemon=True) for pair in zip(calls, expected, strict=True)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join(60)
    assert not any(thread.is_alive() for thread in team), "a thread waits for ever"
    assert not wrong


def test_two_python_threads_have_a_team_each(two_threads: None) -> None:
    repeat([mixture_call(5, 2), projection_call(6, 2)], 60)


def test_a_team_beside_openvino(two_threads: None) -> None:
    repeat([projection_call(7, 2), openvino_call(8, 2)], 60)
    # And in turns, on one thread.
    kernel, graph = mixture_call(9, 2), openvino_call(10, 2)
    expected = kernel(), graph()
    for _ in range(40):
        assert np.array_equal(kernel(), expected[0])
        assert np.array_equal(graph(), expected[1])


def test_stages_of_a_ring_share_the_pool(two_threads: None) -> None:
    weights: SampleWeights = sample_weights(RECIPE)
    parts = Ring(RECIPE, (3, 4), Promise(1, 64, 20), weights, threads=2, precision="fine")
    whole = Ring(RECIPE, (7,), Promise(1, 64, 20), weights, threads=2, precision="fine")
    for ring in (parts, whole):
        ring.start(1)
    windows = [Window(1, 0, IDS[:20])]
    assert np.array_equal(parts.logits(windows), whole.logits(windows))
