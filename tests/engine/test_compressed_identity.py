"""What a stream gets from compressed weights is the same to the bit in any company, in every precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
from engine_world import F32, Stages, Window, operations
from fixtures.compressed import ExportedWeights, config_of, export_sample, valid_ids
from fixtures.reference import relative_error

from cascadia_p2p.compiled import compiling
from cascadia_p2p.engine.load import PRECISIONS
from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import OperationKind

NAMES = ("inkling", "llama")
CACHES = (Encoding.F32, Encoding.BF16)
PROMISE = Promise(slots=3, context=256, rows=80)
LENGTH = 170
"""More positions than the sample models' windows and blocks of keys hold."""

everywhere = pytest.mark.parametrize(
    ("name", "precision", "kept"),
    [(name, precision, kept) for name in NAMES for precision in PRECISIONS for kept in CACHES],
)


class World:
    """A compressed sample model, cut as asked, and what its long stream gets by itself."""

    def __init__(self, name: str, weights: ExportedWeights) -> None:
        rng = np.random.default_rng(11)
        self.weights = weights
        self.layers = config_of(name).layers
        self.long, self.other, self.third = rng.integers(0, valid_ids(name), (3, LENGTH)).tolist()
        self.whole = cache(self._whole)
        self.alone = cache(self._alone)

    def stages(self, split: tuple[int, ...], precision: str, kept: Encoding, threads: int = 1) -> Stages:
        return Stages(
            self.weights.config, split, self.weights, PROMISE, threads, precision=precision, cache=kept
        )

    def _whole(self, precision: str, kept: Encoding) -> Stages:
        return self.stages((self.layers,), precision, kept)

    def _alone(self, precision: str, kept: Encoding) -> F32:
        """Logits of the long stream on one stage in windows of 64, by itself, on one thread."""
        ring = self.whole(precision, kept)
        ring.start(1)
        logits = ring.prefill(1, self.long, 64)
        assert np.isfinite(logits).all()
        assert len(np.unique(logits.argmax(1))) > 10
        return logits


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    @cache
    def make(name: str) -> World:
        model = export_sample(name, tmp_path_factory.mktemp(name), (config_of(name).layers,))
        return World(name, ExportedWeights(model))

    return make


Worlds = Callable[[str], World]


@pytest.fixture
def two_threads() -> Iterator[None]:
    compiling.set_threads(2)
    if compiling.threads() == 1:
        pytest.skip("one core only")
    compiling.warm_up()
    yield
    compiling.set_threads(1)


@everywhere
def test_windows_change_no_bit(world: Worlds, name: str, precision: str, kept: Encoding) -> None:
    here = world(name)
    ring = here.whole(precision, kept)
    for size in (1, 8, 13):
        ring.start(1, slot=2)
        assert np.array_equal(ring.prefill(1, here.long, size, slot=2), here.alone(precision, kept)), size


@everywhere
@pytest.mark.parametrize("window", [1, 8, 64])
def test_company_changes_no_bit(
    world: Worlds, name: str, precision: str, kept: Encoding, window: int
) -> None:
    """Two more streams in the same frames: one of single rows, and one of as many as there is room for."""
    here = world(name)
    ring = here.whole(precision, kept)
    for stream, slot in ((1, 1), (2, 0), (3, 2)):
        ring.start(stream, slot)
    got: list[F32] = []
    for frame, at in enumerate(range(0, LENGTH, window)):
        mine = Window(1, at, here.long[at : at + window], 1)
        others = [Window(2, frame, here.other[frame : frame + 1], 0)]
        if frame < LENGTH // 15:
            others.append(Window(3, 15 * frame, here.third[15 * frame : 15 * (frame + 1)], 2))
        logits = ring.logits([others[0], mine, *others[1:]])
        got.append(logits[1 : 1 + len(mine.ids)])
    assert np.array_equal(np.concatenate(got), here.alone(precision, kept))


@everywhere
def test_stages_change_no_bit(world: Worlds, name: str, precision: str, kept: Encoding) -> None:
    here = world(name)
    for split in ((2, here.layers - 2), (1,) * here.layers):
        ring = here.stages(split, precision, kept)
        ring.start(1)
        assert np.array_equal(ring.prefill(1, here.long, 64), here.alone(precision, kept)), split


@everywhere
@pytest.mark.usefixtures("two_threads")
def test_threads_change_no_bit(world: Worlds, name: str, precision: str, kept: Encoding) -> None:
    here = world(name)
    ring = here.stages((here.layers,), precision, kept, threads=2)
    alone = here.alone(precision, kept)
    for size in (1, 8, 64):
        ring.start(1)
        assert np.array_equal(ring.prefill(1, here.long, size), alone), size


@everywhere
def test_a_stream_that_went_back_has_the_bits_of_one_that_did_not(
    world: Worlds, name: str, precision: str, kept: Encoding
) -> None:
    here = world(name)
    ring = here.whole(precision, kept)
    for length, back in ((64, 1), (130, 16)):
        ring.start(1, slot=1)
        ring.prefill(1, here.long[:length], 64, slot=1)
        ring.logits([Window(1, length, here.other[:back], 1)])
        goal = operations((OperationKind.REWIND, 1, 1, length))
        logits = ring.logits([Window(1, length, here.long[length : length + 20], 1)], goal)
        assert np.array_equal(logits, here.alone(precision, kept)[length : length + 20])


@everywhere
def test_tokens_of_streams_that_decode_together_are_those_of_each_alone(
    world: Worlds, name: str, precision: str, kept: Encoding
) -> None:
    """Three streams that answer in the same frames, against the records of each by itself."""
    here = world(name)
    ring = here.whole(precision, kept)
    prompts = [here.long[:40], here.other[:9], here.third[:70]]
    alone = [ring.generate(5, prompt, 24, 64) for prompt in prompts]
    for stream, prompt in enumerate(prompts):
        ring.start(stream, stream)
        ring.prefill(stream, prompt[:-1], 64, slot=stream)
    ids = [list(prompt) for prompt in prompts]
    for _ in range(24):
        marked, rows = ring.send(
            [Window(n, len(each) - 1, each[-1:], n, want=True) for n, each in enumerate(ids)]
        )
        for each, record in zip(ids, ring.stages[-1].tokens(marked, rows)[0], strict=True):
            each.append(int(record["token"]))
    assert [tuple(each[-24:]) for each in ids] == alone


@pytest.mark.parametrize("name", NAMES)
def test_precisions_and_caches_have_bits_of_their_own(world: Worlds, name: str) -> None:
    """Otherwise the tests above would compare one path with itself."""
    here = world(name)
    exact = here.alone("exact", Encoding.F32)
    errors = {
        (precision, kept): relative_error(here.alone(precision, kept), exact)
        for precision in PRECISIONS
        for kept in CACHES
    }
    assert errors["exact", Encoding.F32] == 0.0
    assert 0.0 < errors["fine", Encoding.F32] < 2e-3 < errors["fast", Encoding.F32] < 0.25
    assert 1e-4 < errors["exact", Encoding.BF16] < 0.1
    assert len({here.alone(*key).tobytes() for key in errors}) == len(errors)
