"""What a stage needs is known before it is loaded, and a refusal says what would fit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from fixtures.reference import load_case
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.engine.footprint import Backend, Footprint
from cascadia_p2p.engine.memory import (
    RESERVE,
    MemoryNeed,
    available_memory,
    in_words,
    require_memory,
    shard_weights,
    stage_memory,
)
from cascadia_p2p.engine.paging import Geometry
from cascadia_p2p.errors import CapacityError
from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.models.inkling.config import InklingConfig
from cascadia_p2p.models.inkling.memory import inkling_sizes, memory_need
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.types import Promise

GIB = 2**30


def need(promise: Promise) -> MemoryNeed:
    """One gibibyte of weights, a megabyte for 64 positions of a slot."""
    return MemoryNeed(GIB, promise.slots * -(-promise.context // 64) * 2**20, 10 * 2**20)


@dataclass(frozen=True)
class StoredEntry:
    encoding: Encoding
    shape: tuple[int, ...]


class Shard:
    """A shard's table, without a shard."""

    def __init__(self, entries: dict[str, StoredEntry]) -> None:
        self.names = tuple(entries)
        self.entry = entries.__getitem__


WANTED = Promise(slots=8, context=8192, rows=64)


def test_what_fits_is_granted() -> None:
    total = need(WANTED).total
    assert total == 2 * GIB + 10 * 2**20 + RESERVE
    assert require_memory(need, WANTED, total).total == total
    with pytest.raises(CapacityError):
        require_memory(need, WANTED, total - 1)


@pytest.mark.parametrize(
    ("missing_mib", "advice"),
    [
        (1, "it would fit with --slots 7 or with --context 8128"),
        (512, "it would fit with --slots 4 or with --context 4096"),
        (900, "it would fit with --context 960"),
        (1020, "it would fit with --slots 1 --context 256"),
        (1024, "no smaller promise fits; free memory, or export the model into more shards"),
    ],
)
def test_a_refusal_names_need_have_and_what_would_fit(missing_mib: int, advice: str) -> None:
    available = need(WANTED).total - missing_mib * 2**20
    with pytest.raises(CapacityError) as caught:
        require_memory(need, WANTED, available)
    text = str(caught.value)
    assert text.endswith(advice)
    assert f"needs {in_words(need(WANTED).total)} of memory and {in_words(available)} are free" in text
    assert "8 slots of 8192 positions 1.0 GiB" in text


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20), st.integers(1, 3000), st.integers(0, 3 * GIB))
def test_advice_is_true_and_nothing_larger_of_its_kind_fits(slots: int, context: int, available: int) -> None:
    wanted = Promise(slots, context, 64)
    try:
        require_memory(need, wanted, available)
    except CapacityError as refusal:
        text = str(refusal)
    else:
        return
    for way in re.findall(r"with ((?:--\w+ \d+ ?)+)", text):
        flags = dict(re.findall(r"--(\w+) (\d+)", way))
        smaller = replace(wanted, **{flag: int(number) for flag, number in flags.items()})
        assert need(smaller).total <= available
        assert smaller.slots < slots or smaller.context < context
        larger = replace(smaller, context=smaller.context + 64) if "context" in flags else None
        larger = larger or replace(smaller, slots=smaller.slots + 1)
        assert need(larger).total > available or larger.context > context


def test_a_refusal_says_what_kept_prefixes_take_and_offers_to_keep_fewer() -> None:
    def keeping(promise: Promise) -> MemoryNeed:
        plain, prefixes = need(promise), promise.kept * 100 * 2**20
        return replace(plain, caches=plain.caches + prefixes, prefixes=prefixes)

    wanted = replace(WANTED, kept=4)
    total = keeping(wanted).total
    with pytest.raises(CapacityError) as caught:
        require_memory(keeping, wanted, total - 150 * 2**20)
    text = str(caught.value)
    assert (
        "8 slots of 8192 positions 1.4 GiB with 400 MiB for 4 kept prefixes (100 MiB each), buffers" in text
    )
    assert "would fit with --prefixes 2 or with --slots 6 or with --context 6976" in text
    # Without any, and then not even all slots.
    many, few = (replace(wanted, slots=n, context=64) for n in (4096, 4))
    with pytest.raises(CapacityError, match=r"fit with --prefixes 0 --slots 4$"):
        require_memory(keeping, many, need(few).total)


def test_bytes_of_kept_prefixes_are_those_of_the_full_models_sizes() -> None:
    """Layers 6 to 11: five with a window of 512, which look back to eight blocks, and one without."""
    config = InklingConfig.from_json({"model_type": "inkling_text", "unpadded_vocab_size": 200058})
    promise = Promise(slots=2, context=4096, rows=64, kept=3)
    with_them = memory_need(config, range(6, 12), promise, 16)
    without = memory_need(config, range(6, 12), replace(promise, kept=0), 16)
    inputs = 3 * (5 * 2 * 16 * 128 + 2 * 8 * 128 + 6 * 2 * 6144)
    assert with_them.prefixes == with_them.caches - without.caches == 3 * (5 * 512 * 16384 + 4 * inputs)
    assert with_them.prefixes == 3 * 43098112
    assert with_them.total - without.total == with_them.prefixes
    half = stage_memory(
        inkling_sizes(config), range(6, 12), promise, 16, Footprint(Backend.KERNELS, cache=Encoding.BF16)
    )
    assert half.prefixes == 3 * 22126592


def test_bytes_of_the_full_model_are_those_of_its_sizes() -> None:
    """Layer 5 of the published model: global, 256 + 2 experts of width 3072 at hidden 6144."""
    config = InklingConfig.from_json({"model_type": "inkling_text", "unpadded_vocab_size": 200058})
    promise = Promise(slots=2, context=4096, rows=64)
    one = memory_need(config, range(5, 6), promise, 16)
    experts = 258 * 6144 * (3 * 3072 + 1)
    projections = 6144 * (2 * 64 * 128 + 2 * 8 * 128 + 64 * 16)
    # Norms of heads and layers, convolutions, relative projection, routing bias and scale.
    small = 2 * 128 + 4 * 2 * 8 * 128 + 16 * 1024 + 2 * 6144 + 4 * 2 * 6144 + 256 + 1
    assert one.weights == 4 * (experts + projections + small)
    # A global layer keeps 8 KiB a position, and a block that is nobody's; four histories of 19 inputs stand
    # beside that.
    assert one.caches == 64 * 8192 + 2 * (4096 * 8192 + 4 * 19 * (2 * 8 * 128 + 2 * 6144))
    sliding = memory_need(config, range(6, 7), promise, 16)
    assert sliding.caches == 64 * 16384 + 2 * (640 * 16384 + 4 * 19 * (2 * 16 * 128 + 2 * 6144))
    tail = memory_need(config, range(65, 66), promise, 16)
    assert tail.weights - one.weights == 4 * 200058 * 6144


def test_half_the_cache_is_offered_where_it_helps() -> None:
    def halved(promise: Promise) -> MemoryNeed:
        whole = need(promise)
        return replace(whole, caches=whole.caches // 2)

    total = need(WANTED).total
    with pytest.raises(CapacityError, match=r"would fit with --cache bf16 or with --slots 4 or with --con"):
        require_memory(need, WANTED, total - 2**29, halved)
    # Neither alone is enough: one slot of 64 positions takes a mebibyte, or half of one.
    least = GIB + 10 * 2**20 + RESERVE
    with pytest.raises(CapacityError, match=r"would fit with --slots 1 --context 64 --cache bf16$"):
        require_memory(need, WANTED, least + 2**19, halved)
    with pytest.raises(CapacityError, match=r"no smaller promise fits; .* more shards"):
        require_memory(need, WANTED, GIB, halved)


def test_weights_follow_the_shards_own_table() -> None:
    """What fills up blocks counts where they are mapped as they are, and does not where a copy is packed."""
    int4, int8 = StoredEntry(Encoding.INT4, (3, 40, 70)), StoredEntry(Encoding.INT8, (40, 64))
    shard = Shard({"a": int4, "b": int8, "c": StoredEntry(Encoding.F32, (7,)), "embed.weight": int8})
    blocks = 3 * 3 * 2 * 576 + 3 * 1024 + 48 * 4
    assert shard_weights(shard, Backend.KERNELS) == blocks + 28
    packed = round(3 * 40 * 70 * 18.5 / 32) + 40 * 64 + 40 * 4
    assert shard_weights(shard, Backend.OPENVINO_GPU) == packed + 28


def test_bf16_halves_keys_and_values_and_nothing_else() -> None:
    sizes = inkling_sizes(load_case("tiny12").recipe.config())
    promise, exact = Promise(slots=2, context=512, rows=16), Footprint(Backend.KERNELS)
    whole = stage_memory(sizes, range(12), promise, 16, exact)
    half = stage_memory(sizes, range(12), promise, 16, replace(exact, cache=Encoding.BF16))
    kept = sum(
        64 * Geometry.of(promise, layer.cache.window, 16).pool_blocks(promise) * layer.cache.position_bytes
        for layer in sizes.layers
    )
    assert whole.caches - half.caches == kept // 2
    assert replace(half, caches=whole.caches) == whole
    assert 0 < whole.mapped < whole.weights


def test_need_grows_with_the_promise() -> None:
    config = load_case("tiny12").recipe.config()
    base = Promise(slots=2, context=512, rows=16)
    plain = memory_need(config, range(12), base, 16)
    for larger in (
        replace(base, slots=3),
        replace(base, context=1024),
        replace(base, rows=32),
        replace(base, kept=1),
    ):
        assert memory_need(config, range(12), larger, 16).total > plain.total
    assert memory_need(config, range(6), base, 16).total < plain.total


ROOMY = Recipe(
    "roomy", layers=6, hidden=256, window=64, dense_width=1024, experts=16, expert_width=512, context=8192
)
ROOMY_PROMISE = Promise(slots=128, context=8192, rows=16)
GROWTH = """
import sys
import psutil
from cascadia_p2p.compiled import compiling
from cascadia_p2p.logs import configure_logs
configure_logs("console", "error")
from engine_world import Ring, sample_weights
from test_memory import ROOMY, ROOMY_PROMISE
sample_weights(ROOMY)
compiling.warm_up()
before = psutil.Process().memory_info().rss
ring = Ring(ROOMY, (6,), ROOMY_PROMISE, precision=sys.argv[1])
assert ring.stages[0].held(0) == 0
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.parametrize(
    ("precision", "backend"), [("exact", Backend.KERNELS), ("openvino", Backend.OPENVINO_CPU)]
)
def test_a_loaded_stage_takes_about_what_was_predicted(precision: str, backend: Backend) -> None:
    """Caches that stand out, in a process that no other test has used; weights are there before."""
    sizes = inkling_sizes(ROOMY.config())
    predicted = stage_memory(sizes, range(6), ROOMY_PROMISE, 16, Footprint(backend))
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (here, here.parent, here.parent.parent)))
    said = subprocess.run(
        [sys.executable, "-c", GROWTH, precision],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        check=True,
    )
    taken = int(said.stdout)
    wanted = predicted.total - predicted.reserve - predicted.mapped
    assert 0.6 * wanted < taken < 1.25 * wanted, (taken / 2**20, wanted / 2**20)


def test_available_memory_is_what_the_system_says() -> None:
    # Others take and give back memory between the two looks.
    assert any(
        available_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2) for _ in range(20)
    )


def test_bytes_in_words() -> None:
    assert [in_words(n) for n in (0, 300 * 2**20, 3 * GIB // 2)] == ["0 MiB", "300 MiB", "1.5 GiB"]
