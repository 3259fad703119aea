"""The two published Inkling models by their own configs: sizes to the byte, and the names in an index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from cascadia_p2p.models.inkling.config import InklingConfig
from cascadia_p2p.models.inkling.names import Spelling, layout, plan_tensors
from cascadia_p2p.models.layout import TensorPlan
from cascadia_p2p.shards.nvfp4 import find_parts

LARGE: dict[str, object] = {
    "model_max_length": 1048576,
    "hidden_size": 6144,
    "num_hidden_layers": 66,
    "vocab_size": 201024,
    "unpadded_vocab_size": 200058,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "d_rel": 16,
    "rel_extent": 1024,
    "q_bias": False,
    "o_bias": False,
    "log_scaling_n_floor": 128000,
    "log_scaling_alpha": 0.1,
    "rms_norm_eps": 1e-6,
    "use_embed_norm": True,
    "local_layer_ids": [layer for layer in range(66) if (layer + 1) % 6],
    "dense_mlp_idx": 2,
    "use_sconv": True,
    "sconv_kernel_size": 4,
    "logits_mup_width_multiplier": 24.0,
    "final_logit_softcapping": None,
    "swa_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 16,
    "sliding_window_size": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "dense_intermediate_size": 24576,
    "intermediate_size": 3072,
    "route_scale": 8.0,
    "use_gate_bias": True,
    "gate_activation": "sigmoid",
    "norm_after_topk": True,
    "use_global_scale": True,
}
SMALL = {
    **LARGE,
    "hidden_size": 4096,
    "num_hidden_layers": 42,
    "num_attention_heads": 32,
    "local_layer_ids": [layer for layer in range(42) if (layer + 1) % 6],
    "logits_mup_width_multiplier": 16.0,
    "swa_num_attention_heads": 32,
    "swa_num_key_value_heads": 8,
    "dense_intermediate_size": 16384,
    "intermediate_size": 2048,
}

BF16_BYTES = 1_904_604_285_204
NVFP4_BYTES = 591_854_374_368
"""Tensors of the published checkpoints of the large model."""


def read(text: dict[str, object]) -> InklingConfig:
    config = {"model_type": "inkling_mm_model", "text_config": text, "eos_token_id": 200006}
    return InklingConfig.from_json(config)


def stored_bytes(plans: Sequence[TensorPlan], quantised: Callable[[TensorPlan], bool]) -> int:
    """Bytes of the tensors that these plans are cut from; half a byte a number and scales if quantised."""
    found: dict[str, int] = {}
    for plan in plans:
        shape = plan.source_shapes[0]
        count = math.prod(shape)
        if quantised(plan):
            found[plan.source] = count // 2 + count // 16 + 4 * shape[0]
        else:
            found[plan.source] = count * (4 if plan.name.endswith(("router_bias", "global_scale")) else 2)
    return sum(found.values())


def never(_: TensorPlan) -> bool:
    return False


def from_layer_three(plan: TensorPlan) -> bool:
    return ".experts." in plan.name and int(plan.name.split(".")[1]) >= 3


def test_the_large_model_has_the_published_size_in_both_encodings() -> None:
    plans = plan_tensors(read(LARGE), Spelling.A).tensors()
    drafts = {**LARGE, "num_hidden_layers": 8, "local_layer_ids": [0, 2, 4, 5, 6, 7], "dense_mlp_idx": 8}
    draft_layers = [plan for layer in plan_tensors(read(drafts), Spelling.A).layers for plan in layer]
    # Each of the eight has two norms and a projection of two rows side by side before its layer.
    drafting = stored_bytes(draft_layers, never) + 8 * 2 * (2 * 6144 + 6144 * 2 * 6144)
    rest = BF16_BYTES - stored_bytes(plans, never) - drafting
    rest_nvfp4 = NVFP4_BYTES - stored_bytes(plans, from_layer_three) - drafting
    # Vision and audio, the same in both; beside each quantised weight a BF16 number and three of 8 bytes.
    assert rest_nvfp4 - rest == 2 * 63 * (2 + 3 * 8)
    assert 32e6 < rest < 33e6


@pytest.mark.parametrize(
    ("text", "layers", "parameters"), [(LARGE, 66, 975e9), (SMALL, 42, 276e9)], ids=["975B", "Small"]
)
def test_both_models_are_read_by_the_same_code(
    text: dict[str, object], layers: int, parameters: float
) -> None:
    config = read(text)
    assert config.layers == layers
    assert config.sparse == (False, False, *[True] * (layers - 2))
    assert [index for index, shape in enumerate(config.attention) if shape.kind == "global"] == list(
        range(5, layers, 6)
    )
    assert (config.dense_width, config.expert_width) == (
        text["dense_intermediate_size"],
        text["intermediate_size"],
    )
    assert (config.context, config.eos_ids, config.vocab_valid) == (1048576, (200006,), 200058)
    assert InklingConfig.from_json(config.to_json()) == config
    # The names of the models round upwards, and count drafting, vision and audio.
    count = sum(math.prod(plan.shape) for plan in plan_tensors(config, Spelling.A).tensors())
    assert count == pytest.approx(parameters, rel=0.05)
    assert plan_tensors(config, Spelling.A).head[-1].source_shapes == (
        (201024, config.hidden),
        (200058, config.hidden),
    )


@pytest.mark.parametrize("text", [LARGE, SMALL], ids=["975B", "Small"])
def test_the_names_of_a_published_index_are_all_known(text: dict[str, object]) -> None:
    config = read(text)
    plain = {plan.source for plan in plan_tensors(config, Spelling.A).tensors()}
    names = set(plain)
    for layer in range(3, config.layers):
        for weight in ("w13_weight", "w2_weight"):
            base = f"model.llm.layers.{layer}.mlp.experts.{weight}"
            names |= {f"{base}{end}" for end in (".scale", ".scale2", ".input_amax", ".original_shape")}
    names |= {
        "model.mtp.layers.7.transformer_block.attn.wq_du.weight",
        "model.mtp.chain_norm.weight",
        "model.visual.layers.linear_0.weight",
        "model.audio.encoder.weight",
    }
    parts = find_parts(names)
    assert len(parts) == 2 * (config.layers - 3)
    hidden = {name for part in parts.values() for name in part.names}
    found = layout(config, (names - hidden) | parts.keys())
    assert found.unknown == ()
    assert {part: len(skipped) for part, skipped in found.skipped.items()} == {
        "multi-token prediction": 2,
        "vision": 1,
        "audio": 1,
        "notes of quantisation": 4 * (config.layers - 3),
    }
    assert {plan.source for plan in found.tensors()} == plain
