"""Tokens from a checkpoint in the published form, NVFP4 in many files, are those of the decoded weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_world import PROMISE, Ring, SampleWeights
from fixtures.exports import exact_export as export

from cascadia_p2p.models.inkling.names import Spelling
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.nvfp4 import Nvfp4
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.shards.reader import ShardReader

RECIPE = Recipe("published", layers=7, dense_layers=2)
SPLIT = (3, 4)


def exported(source: Path, out: Path) -> SampleWeights:
    """All tensors of an export, each shard exported on its own."""
    weights = SampleWeights.__new__(SampleWeights)
    weights.tensors = {}
    for shard in range(len(SPLIT)):
        export(source, out / str(shard), split=SPLIT, only=[shard])
        reader = ShardReader(out / str(shard))
        weights.tensors |= {name: reader.tensor(name) for name in reader.names}
    return weights


@pytest.mark.parametrize(
    "form",
    [Nvfp4("scale2", plain_layers=(2,)), Nvfp4("global_scale", two_factors=True)],
    ids=["published", "reciprocal"],
)
def test_tokens_of_the_published_form_are_those_of_its_decoded_weights(tmp_path: Path, form: Nvfp4) -> None:
    prompt = np.random.default_rng(3).integers(0, RECIPE.vocab_valid, 60).tolist()
    answers = []
    for spelling, files in ((Spelling.A, 109), (Spelling.B, 1)):
        source = make_checkpoint(
            tmp_path / spelling, RECIPE, spelling=spelling, encoding="BF16", files=files, nvfp4=form
        )
        ring = Ring(RECIPE, SPLIT, PROMISE, exported(source, tmp_path / f"out-{spelling}"))
        ring.start(1)
        answers.append((ring.prefill(1, prompt, 20), ring.generate(2, prompt, 16, 20, slot=1)))
    (logits, tokens), (plain_logits, plain_tokens) = answers
    assert tokens == plain_tokens
    assert logits.tobytes() == plain_logits.tobytes()
    # The rounding is there: these are not the tokens' scores before it.
    ring = Ring(RECIPE, SPLIT, PROMISE)
    ring.start(1)
    assert not np.allclose(ring.prefill(1, prompt, 20), logits, rtol=1e-3)
