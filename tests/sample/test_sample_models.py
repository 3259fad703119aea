"""Sample models: the same from one seed everywhere, and complete checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from cascadia_p2p.errors import UsageError
from cascadia_p2p.models.inkling.config import InklingConfig
from cascadia_p2p.models.inkling.names import Spelling
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import PRESETS, Recipe, find_recipe
from cascadia_p2p.sample.tokenizer import special_tokens
from cascadia_p2p.sample.weights import tensors
from cascadia_p2p.shards.safetensors import Checkpoint

# Fixtures were made with these.
FINAL_NORM = [0.8637719750404358, 0.7998366355895996, 0.8088846206665039]
ROUTER = [-0.28662109375, -0.28076171875, 0.11669921875]


@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
def test_both_spellings_of_a_config_mean_the_same(recipe: Recipe) -> None:
    generation = recipe.generation_json()
    spelled = [InklingConfig.from_json(recipe.config_json(spelling), generation) for spelling in Spelling]
    assert spelled[0] == spelled[1] == recipe.config()


def test_numbers_follow_from_the_seed() -> None:
    first, again, other = (dict(tensors(find_recipe("tiny12"), seed)) for seed in (0, 0, 1))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in first)
    assert first["final_norm"][:3].tolist() == FINAL_NORM
    assert first["layers.5.router"][0, :3].tolist() == ROUTER


def test_no_expert_is_left_out_and_no_class_is_written() -> None:
    found = dict(tensors(find_recipe("tiny12"), 0))
    for name, values in found.items():
        assert np.isfinite(values).all()
        if name.endswith((".o", "down")):
            assert not values[..., :8, :].any()
            assert values[..., 8:, :].any()
        else:
            assert values.any(), name


def test_tensors_of_a_layer_are_scattered_over_the_files(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "tiny12", files=4)
    with Checkpoint(tmp_path) as checkpoint:
        layer = [name for name in checkpoint.names if ".layers.5." in name]
        assert len({checkpoint.file_of(name) for name in layer}) == 4


def test_the_tokenizer_covers_every_valid_id(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "tiny12")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    recipe = find_recipe("tiny12")
    assert tokenizer.get_vocab_size(with_added_tokens=True) == recipe.vocab_valid
    text = "Grüße, 世界!\n\t~ \x00"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    framed = "<|message_user|><|content_text|>Hi<|end_message|><|message_model|>"
    names = special_tokens(recipe.vocab_valid)
    expected = [names["<|message_user|>"], names["<|content_text|>"], *b"Hi", names["<|end_message|>"]]
    assert tokenizer.encode(framed).ids == [*expected, names["<|message_model|>"]]
    assert [names[f"<|{name}|>"] for name in ("content_model_end_sampling", "endoftext")] == list(recipe.eos)


def test_the_variant_without_an_end_id_writes_null(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "tiny12-noeos", spelling="A")
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["eos_token_id"] is None
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] is None


def test_an_unknown_preset_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="there is no sample model 'huge': choose one of tiny66, tiny42, tiny12"
    ):
        make_checkpoint(tmp_path, "huge")
