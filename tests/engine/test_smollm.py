"""The real SmolLM2: transformers' and llama.cpp's tokens, on one stage and on three, from its GGUF file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from engine_world import F32, Stages
from fixtures.exports import exact_export as export
from fixtures.reference import relative_error
from fixtures.smollm import SmolPrompt, kept_ids, load_prompts

from cascadia_p2p.engine.load import load_stage
from cascadia_p2p.matrices.encoding import StoredMatrix
from cascadia_p2p.shards.reader import ShardReader
from cascadia_p2p.text.tokenizer import Tokenizer
from cascadia_p2p.types import Promise

PROMISE = Promise(slots=2, context=512, rows=64)
LENGTH = 32
"""New tokens that are compared."""

EIGHT_BIT_NOISE = 0.2
"""A lead, in logits, that llama.cpp's eight-bit activations can turn round."""

FLOAT_NOISE = 0.01


class Loaded(Stages):
    """Stages of an export, loaded as a node loads them."""

    def __init__(self, model: Path, shards: int) -> None:
        self.stages = [load_stage(model, shard, PROMISE, threads=1) for shard in range(shards)]


class WholeModel:
    """All shards of an export, as one `TensorSource`."""

    def __init__(self, model: Path, shards: int) -> None:
        self.readers = [ShardReader(model, shard) for shard in range(shards)]
        self.config = self.readers[0].config

    def tensor(self, name: str) -> F32:
        return next(reader for reader in self.readers if name in reader.names).tensor(name)

    def matrix(self, name: str) -> StoredMatrix:
        return StoredMatrix.of(self.tensor(name))


class Exported:
    """The real model in three shards, and what it answers."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.tokenizer = Tokenizer.load(model / "shard-00" / "tokenizer.json")

    @cached_property
    def three(self) -> Loaded:
        return Loaded(self.model, 3)

    def cut(self, split: tuple[int, ...]) -> Stages:
        """The same weights in other stages."""
        whole = WholeModel(self.model, 3)
        return Stages(whole.config, split, whole, PROMISE)

    @cached_property
    def followed(self) -> list[F32]:
        """For each prompt the logits from its last position on, along transformers' answer."""
        return [follow(self.three, prompt) for prompt in load_prompts()]


@pytest.fixture(scope="module")
def exported(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    out = tmp_path_factory.mktemp("smollm")
    export(smollm, out / "model", shards=3)
    yield Exported(out / "model")
    # Half a gigabyte that pytest would keep.
    shutil.rmtree(out)


def follow(stages: Stages, prompt: SmolPrompt) -> F32:
    stages.start(1)
    return stages.prefill(1, prompt.ids + prompt.transformers[:-1], 64)[len(prompt.ids) - 1 :]


def test_tokens_and_logits_are_those_of_transformers(exported: Exported) -> None:
    for prompt, logits in zip(load_prompts(), exported.followed, strict=True):
        assert tuple(logits.argmax(1).tolist()) == prompt.transformers
        kept = logits[[0, -1]][:, kept_ids(logits.shape[1])]
        assert relative_error(kept, prompt.logits) < 1e-3


@pytest.mark.parametrize("split", [(30,), (3,) * 10], ids=["1 stage", "10 stages"])
def test_any_number_of_stages_gives_the_bits_of_three(exported: Exported, split: tuple[int, ...]) -> None:
    stages = exported.cut(split)
    # All twenty go round whole rings of as many nodes elsewhere.
    for prompt, logits in list(zip(load_prompts(), exported.followed, strict=True))[:5]:
        assert np.array_equal(follow(stages, prompt), logits), prompt.text


def test_llama_cpp_gives_the_same_answers(exported: Exported) -> None:
    """On the same weights in float32, for at least 18 of 20 prompts; where it does not, at a near tie."""
    different = []
    for prompt, logits in zip(load_prompts(), exported.followed, strict=True):
        place = prompt.decoded.first_difference(logits.argmax(1).tolist(), LENGTH)
        if place is not None:
            different.append(prompt.text)
            assert prompt.decoded.leads[place] < FLOAT_NOISE, prompt.text
    assert len(different) <= 2, different


def test_where_llama_cpp_rounds_activations_it_differs_at_near_ties_only(exported: Exported) -> None:
    """On the file as it is llama.cpp rounds activations to eight bits."""
    for prompt, logits in zip(load_prompts(), exported.followed, strict=True):
        place = prompt.quantised.first_difference(logits.argmax(1).tolist(), LENGTH)
        assert place is None or prompt.quantised.leads[place] < EIGHT_BIT_NOISE, prompt.text


def test_a_question_gets_a_sensible_answer(exported: Exported) -> None:
    """Decoded token by token, on three stages."""
    prompt = load_prompts()[0]
    ids = exported.three.generate(7, prompt.ids, LENGTH, 64)
    assert ids == prompt.transformers[:LENGTH]
    text = exported.tokenizer.decode(ids).lower()
    assert all(word in text for word in ("sky", "blue", "light", "scatter")), text


def test_what_it_needs_is_what_its_files_hold(exported: Exported) -> None:
    """Float32 weights of all layers and the head, as exported; norms are left out."""
    assert sum(ShardReader(exported.model, shard).nbytes for shard in range(3)) == pytest.approx(
        4 * (134_515_008 + 49152 * 576), rel=1e-3
    )
