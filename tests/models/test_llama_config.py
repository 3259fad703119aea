"""Configs of the Llama family: every model type's defaults, what is refused, and what an export keeps."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from fixtures.dense import MODELS
from hypothesis import given
from hypothesis import strategies as st

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.family import read_config, read_exported, read_source
from cascadia_p2p.models.llama.config import MODEL_TYPES, LlamaConfig
from cascadia_p2p.models.llama.names import GGUF, TRANSFORMERS, layout, plan_tensors
from cascadia_p2p.models.llama.rotary import Rotary

PLAIN = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def read(**changes: object) -> LlamaConfig:
    """A config; None takes a key away, `null` is None within a list."""
    merged = {key: value for key, value in (PLAIN | changes).items() if value is not None}
    return LlamaConfig.from_json({key: None if value == "null" else value for key, value in merged.items()})


def test_each_model_type_has_its_own_parts() -> None:
    found = {
        kind: (config.qkv_bias, config.o_bias, config.qk_norm)
        for kind in MODEL_TYPES
        for config in [read(model_type=kind, sliding_window="null")]
    }
    assert found == {
        "llama": (False, False, False),
        "mistral": (False, False, False),
        "qwen2": (True, False, False),
        "qwen3": (False, False, True),
    }
    assert (read(attention_bias=True).qkv_bias, read(attention_bias=True).o_bias) == (True, True)
    biased = read(model_type="qwen3", attention_bias=True)
    assert (biased.qkv_bias, biased.o_bias, biased.qk_norm) == (True, True, True)


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    assert read().head_dim == 64
    assert read(head_dim=128).head_dim == 128
    assert read(model_type="qwen3").head_dim == 128
    assert read(num_key_value_heads=None).kv_heads == 32
    assert read(model_type="mistral", num_key_value_heads=None).kv_heads == 8
    assert read(model_type="qwen2", num_key_value_heads=None).kv_heads == 32
    assert (read().eps, read().rotary, read().tied) == (1e-6, Rotary(64, 10_000.0), False)
    assert read().eos_ids == (2,)
    assert read(eos_token_id="null").eos_ids == ()
    assert read(model_type="qwen2").eos_ids == ()


def test_dll_06_every_end_of_turn_of_the_models_files_counts() -> None:
    config = PLAIN | {"eos_token_id": 128009}
    assert LlamaConfig.from_json(config).eos_ids == (128009,)
    several = {"eos_token_id": [128001, 128008, 128009]}
    assert LlamaConfig.from_json(config, several).eos_ids == (128001, 128008, 128009)
    assert LlamaConfig.from_json(config, {}).eos_ids == ()


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral"}, (4096,) * 16),
        ({"model_type": "mistral", "sliding_window": "null"}, (None,) * 16),
        ({"model_type": "mistral", "sliding_window": 131072}, (None,) * 16),
        ({"model_type": "qwen2", "sliding_window": 4096}, (None,) * 16),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 14},
            (None,) * 14 + (4096,) * 2,
        ),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0}, (4096,) * 16),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 512,
                "layer_types": ["sliding_attention", "full_attention"] * 8,
            },
            (512, None) * 8,
        ),
        ({"sliding_window": 512}, (None,) * 16),
    ],
)
def test_windows(changes: dict[str, object], windows: tuple[int | None, ...]) -> None:
    assert read(**changes).windows == windows


REFUSED = {
    "another family": ({"model_type": "gemma2"}, "model_type 'gemma2': expected one of llama, mistral"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu': expected 'silu'"),
    "MLP biases": ({"mlp_bias": True}, "mlp_bias = True: expected false"),
    "quantised": (
        {"quantization_config": {"quant_method": "gptq"}},
        r"quantised \(gptq\).*or from a GGUF file",
    ),
    "yarn": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_type 'yarn': only default, linear, llama3",
    ),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    "by layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        r"differently in each kind of layer \(full_attention\)",
    ),
    "llama3 upside down": (
        {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        "high_freq_factor = 1.0: expected more than low_freq_factor, which is 4.0",
    ),
    "odd share": ({"partial_rotary_factor": 0.05}, "turns 3 of the 64 numbers of a head"),
    "no layers": ({"num_hidden_layers": None}, "has no num_hidden_layers: expected a whole number"),
    "heads": ({"num_key_value_heads": 7}, "32 query heads and 7 key and value heads"),
    "text for a number": ({"hidden_size": "big"}, "hidden_size = 'big': expected a whole number"),
    "layer types": (
        {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
        "layer_types with 1 entries: expected one for each of the 16 layers",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_impossible_or_not_computed_here_is_refused_in_words(
    changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        read(**changes)


def test_rope_scaling_of_llama_31_is_that_of_its_formula() -> None:
    """Short wavelengths stay, long ones are divided by eight, those between by a share of it."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rotary = read(rope_theta=500000.0, rope_scaling=scaling).rotary
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    waves = 2 * math.pi / plain
    assert rotary.divisors is not None
    divisors = np.array(rotary.divisors)
    assert (divisors[waves < 8192 / 4] == 1.0).all()
    assert (divisors[waves > 8192] == 8.0).all()
    between = divisors[(waves > 8192 / 4) & (waves < 8192)]
    assert len(between) == 3
    assert (np.diff(between) > 0).all()
    assert ((between > 1.0) & (between < 8.0)).all()
    assert rotary == read(rope_parameters=scaling | {"rope_theta": 500000.0}).rotary


def test_the_spelling_of_transformers_5_comes_first() -> None:
    both = read(rope_theta=1e4, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6})
    assert both.rotary == Rotary(64, 1e6, (2.0,) * 32)
    assert read(rope_scaling="null", rope_theta=1e6).rotary == Rotary(64, 1e6)
    assert read(partial_rotary_factor=0.5).rotary == Rotary(32, 10_000.0)


@pytest.mark.parametrize("name", MODELS)
def test_an_export_keeps_every_value(name: str) -> None:
    config = replace(MODELS[name].read(), eos_ids=(3, 1))
    kept = json.loads(json.dumps(config.to_json()))
    assert read_exported("llama", kept) == config


@given(
    st.sampled_from(sorted(MODELS["qwen3"].read().to_json())),
    st.sampled_from([None, 0, -1, "x", [], {}, 0.5]),
)
def test_a_spoilt_manifest_is_refused_in_words(key: str, value: object) -> None:
    values = MODELS["qwen3"].read().to_json()
    try:
        spoilt = LlamaConfig.from_export(values | {key: value})
    except CheckpointError:
        return
    assert spoilt.layers == MODELS["qwen3"].read().layers


def test_families_are_told_by_model_type() -> None:
    assert read_config(PLAIN, None)[0] == "llama"
    with pytest.raises(CheckpointError, match=r"model_type 'mamba': expected one of inkling_mm_model.*qwen3"):
        read_config({"model_type": "mamba"}, None)
    with pytest.raises(
        CheckpointError, match="model family 'mamba' is not known: expected one of inkling, llama"
    ):
        read_exported("mamba", {})


def names(model: str) -> set[str]:
    return {plan.source for plan in plan_tensors(MODELS[model].read()).tensors()}


def test_missing_and_foreign_tensors_are_named() -> None:
    config = MODELS["llama"].config_json()
    have = names("llama")
    assert read_source(config, None, have).family == "llama"
    with pytest.raises(CheckpointError, match=r"lacks 1 of 48 tensors.*: lm_head\.weight"):
        read_source(config, None, have - {"lm_head.weight"})
    with pytest.raises(CheckpointError, match=r"2 tensors in its layers.*layers\.0\.self_attn\.q_proj\.bias"):
        read_source(config, None, have | {f"model.layers.{n}.self_attn.q_proj.bias" for n in (0, 4)})
    odd = {"model.layers.4.self_attn.rotary_emb.inv_freq", "model.vision.weight"}
    assert layout(MODELS["llama"].read(), have | odd).unknown == ("model.vision.weight",)


def test_a_tied_head_is_the_embedding_even_where_both_are_stored() -> None:
    config, have = MODELS["qwen2"].read(), names("qwen2")
    assert "lm_head.weight" not in have
    found = layout(config, have | {"lm_head.weight"})
    assert found.head[1].source == "model.embed_tokens.weight"
    assert not found.unknown


def test_only_queries_and_keys_are_paired() -> None:
    """And their biases; in GGUF's `llama` alone."""
    config = MODELS["llama-tied"].read()
    paired = {plan.name for plan in plan_tensors(config, GGUF, paired=True).layers[0] if plan.paired == 8}
    assert paired == {f"layers.0.{part}" for part in ("q", "k", "q_bias", "k_bias")}
    assert not any(plan.paired for plan in plan_tensors(config, TRANSFORMERS).tensors())
