"""Which tensors an Inkling checkpoint must hold, and what the exported model makes of them."""

from __future__ import annotations

import pytest

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.inkling.config import InklingConfig
from cascadia_p2p.models.inkling.names import Spelling, find_spelling, layout
from cascadia_p2p.models.layout import Pick

CONFIG = InklingConfig.from_json(
    {
        "model_type": "inkling_text",
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["hybrid", "hybrid_sliding"],
        "hidden_size": 32,
        "vocab_size": 64,
        "unpadded_vocab_size": 60,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "sliding_window_size": 5,
        "rel_extent": 7,
        "d_rel": 3,
        "intermediate_size": 20,
        "moe_intermediate_size": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    }
)

NAMES_B = [
    "model.embed_tokens.weight",
    "model.embed_tokens.embed_norm.weight",
    "model.norm.weight",
    "lm_head.weight",
    *(
        f"model.layers.{layer}.{name}"
        for layer in (0, 1)
        for name in (
            *(f"self_attn.{part}_proj.weight" for part in "qkvro"),
            *(f"self_attn.{part}_norm.weight" for part in "qk"),
            *(f"self_attn.{part}_sconv.conv1d.weight" for part in "kv"),
            "self_attn.rel_logits_proj.proj",
            "attn_sconv.conv1d.weight",
            "mlp_sconv.conv1d.weight",
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
        )
    ),
    *(f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "model.layers.0.mlp.global_scale",
    *(f"model.layers.1.mlp.gate.{part}" for part in ("weight", "global_scale", "e_score_correction_bias")),
    "model.layers.1.mlp.experts.gate_up_proj",
    "model.layers.1.mlp.experts.down_proj",
    *(f"model.layers.1.mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")),
]

NAMES_A = [
    "model.llm.embed.weight",
    "model.llm.embed_norm.weight",
    "model.llm.norm.weight",
    "model.llm.unembed.weight",
    *(
        f"model.llm.layers.{layer}.{name}"
        for layer in (0, 1)
        for name in (
            *(f"attn.{part}.weight" for part in ("wq_du", "wk_dv", "wv_dv", "wr_du", "wo_ud")),
            *(f"attn.{part}.weight" for part in ("q_norm", "k_norm", "k_sconv", "v_sconv")),
            "attn.rel_logits_proj.proj",
            *(f"{part}.weight" for part in ("attn_norm", "mlp_norm", "attn_sconv", "mlp_sconv")),
        )
    ),
    *(f"model.llm.layers.0.mlp.{part}" for part in ("w13_dn.weight", "w2_md.weight", "global_scale")),
    *(f"model.llm.layers.1.mlp.gate.{part}" for part in ("weight", "bias", "global_scale")),
    *(f"model.llm.layers.1.mlp.experts.{part}" for part in ("w13_weight", "w2_weight")),
    *(f"model.llm.layers.1.mlp.shared_experts.shared_{part}" for part in ("w13_weight", "w2_weight")),
]

SHAPES = {
    "embed.weight": (64, 32),
    "embed.norm": (32,),
    "layers.0.q": (32, 32),
    "layers.0.k": (16, 32),
    "layers.0.r": (12, 32),
    "layers.0.o": (32, 32),
    "layers.0.q_norm": (8,),
    "layers.0.k_conv": (16, 4),
    "layers.0.attn_conv": (32, 4),
    "layers.0.rel_proj": (3, 7),
    "layers.0.gate": (20, 32),
    "layers.0.up": (20, 32),
    "layers.0.down": (32, 20),
    "layers.0.global_scale": (1,),
    "layers.1.k": (16, 32),
    "layers.1.r": (6, 32),
    "layers.1.k_norm": (16,),
    "layers.1.rel_proj": (3, 5),
    "layers.1.router": (10, 32),
    "layers.1.router_bias": (8,),
    "layers.1.experts.gate": (8, 6, 32),
    "layers.1.experts.down": (8, 32, 6),
    "layers.1.shared.up": (2, 6, 32),
    "layers.1.shared.down": (2, 32, 6),
    "final_norm": (32,),
    "head.weight": (60, 32),
}


@pytest.mark.parametrize("names", [NAMES_A, NAMES_B], ids=["A", "B"])
def test_both_spellings_give_the_same_tensors(names: list[str]) -> None:
    found = {plan.name: plan.shape for plan in layout(CONFIG, names).tensors()}
    other = layout(CONFIG, NAMES_B if names is NAMES_A else NAMES_A)
    assert found == {plan.name: plan.shape for plan in other.tensors()}
    assert {name: found.get(name) for name in SHAPES} == SHAPES


@pytest.mark.parametrize("names", [NAMES_A, NAMES_B], ids=["A", "B"])
def test_every_source_tensor_is_used(names: list[str]) -> None:
    plans = layout(CONFIG, names)
    assert {plan.source for plan in plans.tensors()} == set(names)
    assert plans.unknown == ()
    assert plans.skipped == {}


def test_gate_and_up_rows_alternate_in_spelling_a_and_follow_each_other_in_b() -> None:
    picks_a = {plan.name: plan.pick for plan in layout(CONFIG, NAMES_A).tensors()}
    assert picks_a["layers.0.gate"] == Pick(0, 0, 2, 20)
    assert picks_a["layers.0.up"] == Pick(0, 1, 2, 20)
    assert picks_a["layers.1.experts.up"] == Pick(1, 1, 2, 6)
    assert picks_a["layers.1.shared.gate"] == Pick(1, 0, 2, 6)
    picks_b = {plan.name: plan.pick for plan in layout(CONFIG, NAMES_B).tensors()}
    assert picks_b["layers.1.experts.gate"] == Pick(1, 0, 1, 6)
    assert picks_b["layers.1.experts.up"] == Pick(1, 6, 1, 6)
    assert picks_b["layers.0.up"] is None


def test_the_head_may_lack_its_padding() -> None:
    head = layout(CONFIG, NAMES_B).head[-1]
    assert head.source_shapes == ((64, 32), (60, 32))


def test_parts_beside_the_text_model_are_left_out_and_the_rest_is_unknown() -> None:
    extra = [
        "model.mtp.layers.0.hidden_norm.weight",
        "model.visual.final_norm.weight",
        "model.audio.encoder.weight",
        "model.llm.layers.1.mlp.experts.w13_weight.input_amax",
        "model.llm.layers.1.mlp.experts.w2_weight.original_shape",
        "model.llm.layers.1.mlp.experts.w2_input_scale",
        "model.llm.layers.1.mlp.experts.w13_weight.input_global_scale",
        "model.llm.layers.9.attn_norm.weight",
        "stranger",
    ]
    plans = layout(CONFIG, [*NAMES_A, *extra])
    assert plans.skipped == {
        "multi-token prediction": (extra[0],),
        "vision": (extra[1],),
        "audio": (extra[2],),
        "notes of quantisation": tuple(sorted(extra[3:7])),
    }
    assert plans.unknown == (extra[7], "stranger")


def test_missing_tensors_are_counted_and_named() -> None:
    names = [name for name in NAMES_B if "k_norm" not in name]
    with pytest.raises(
        CheckpointError, match=r"lacks 2 of \d+ tensors .*layers\.0\.self_attn\.k_norm\.weight"
    ):
        layout(CONFIG, names)


def test_the_embedding_tells_the_spelling() -> None:
    assert find_spelling(NAMES_A) is Spelling.A
    assert find_spelling(NAMES_B) is Spelling.B
    with pytest.raises(CheckpointError, match=r"it has transformer\.wte\.weight"):
        find_spelling(["transformer.wte.weight"])
    with pytest.raises(CheckpointError, match="it has no tensors"):
        find_spelling([])
    with pytest.raises(CheckpointError, match="both are there"):
        find_spelling([*NAMES_A, *NAMES_B])
