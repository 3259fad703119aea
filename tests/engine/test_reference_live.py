"""The same against transformers itself, where it is installed: models that no fixture holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_world import PROMISE, Ring, sample_weights

from cascadia_p2p.models.inkling.names import Spelling
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import Recipe

BASE = Recipe("live")
RECIPES = {
    "one kv head, odd groups": replace(BASE, heads=3, kv_heads=1, sliding_heads=5, sliding_kv_heads=1),
    "all dense": replace(BASE, dense_layers=12),
    "all sparse, one shared": replace(BASE, dense_layers=0, shared=1, chosen=1),
    "long window, log scaling": replace(BASE, window=70, log_scaling_floor=5, log_scaling_alpha=0.3),
    "extent beyond the prompt": replace(BASE, extent=500, head_dim=24),
}


@pytest.mark.reference
@pytest.mark.parametrize("spelling", list(Spelling))
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_live_reference(recipe: Recipe, spelling: Spelling, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from fixtures.live import Reference
    from fixtures.reference import relative_error

    checkpoint = make_checkpoint(tmp_path / "model", recipe, seed=4, spelling=spelling)
    reference = Reference(checkpoint)
    ring = Ring(recipe, (7, 5), PROMISE, sample_weights(recipe, 4))
    prompt = np.random.default_rng(6).integers(0, recipe.vocab_valid, 150).tolist()
    answer = reference.answer(prompt, 12)
    ring.start(1)
    logits = ring.prefill(1, [*prompt, *answer.generated[:-1]], 32)
    assert relative_error(logits, answer.logits) < 1e-4
    assert ring.generate(2, prompt, len(answer.generated), 16) == answer.generated
