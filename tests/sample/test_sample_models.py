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
from cascadia_p2p.sample.nvfp4 import Nvfp4, quantise
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


def test_quantised_numbers_are_near_the_original_and_every_code_is_used() -> None:
    stack = dict(tensors(find_recipe("tiny12"), 0))["layers.3.experts.gate"]
    pairs = np.repeat(stack, 2, axis=1)
    pairs[:, 1::2] *= 3.0
    for form in (Nvfp4("scale2"), Nvfp4("global_scale", two_factors=True)):
        found = quantise(pairs, form, paired=True)
        assert found.factors.shape == ((12, 2) if form.two_factors else (12,))
        assert set(np.unique(found.codes)) == set(range(16))
        # Half of the widest step, 4 to 6, of a group whose largest number is 6; the scale adds 1 in 16.
        groups = np.abs(pairs).reshape(12, 64, 4, 16).max(axis=3)
        error = np.abs(found.values - pairs).reshape(12, 64, 4, 16).max(axis=3)
        assert (error <= groups * (1 / 6 + 1 / 15)).all()
    assert (found.factors[:, 0] > 2.5 * found.factors[:, 1]).all(), "as reciprocals"


def test_a_stack_of_zeros_stays_zero() -> None:
    found = quantise(np.zeros((2, 4, 32), np.float32), Nvfp4("global_scale"), paired=True)
    assert not found.values.any()
    assert np.isfinite(found.factors).all()


def test_a_quantised_checkpoint_has_the_published_parts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "tiny12", spelling="A", encoding="BF16", nvfp4=Nvfp4(plain_layers=(2,)))
    at = "model.llm.layers.3.mlp.experts.w13_weight"
    with Checkpoint(tmp_path) as checkpoint:
        parts = {
            name: (checkpoint.tensor(name).dtype, checkpoint.shape(name))
            for name in checkpoint.names
            if name.startswith(at)
        }
        assert parts == {
            at: ("U8", (12, 64, 32)),
            f"{at}.scale": ("F8_E4M3", (12, 64, 4)),
            f"{at}.scale2": ("F32", (12,)),
            f"{at}.input_amax": ("BF16", (1,)),
            f"{at}.original_shape": ("I64", (3,)),
        }
        assert checkpoint.tensor("model.llm.layers.2.mlp.experts.w13_weight").dtype == "BF16"
        shared = "model.llm.layers.3.mlp.shared_experts.shared_w13_weight"
        assert checkpoint.tensor(shared).dtype == "BF16"
    excluded = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert "model.llm.layers.2.mlp.experts" in excluded
    assert "model.llm.layers.3.mlp.experts" not in excluded
