"""Reading an Inkling config in both spellings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.inkling.config import AttentionShape, InklingConfig

SMALL: dict[str, object] = {
    "model_type": "inkling_text",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "vocab_size": 320,
    "unpadded_vocab_size": 300,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 8,
    "sliding_window_size": 32,
    "rel_extent": 48,
    "d_rel": 4,
    "eos_token_id": 5,
}


def read(generation: dict[str, object] | None = None, /, **changes: object) -> InklingConfig:
    return InklingConfig.from_json({**SMALL, **changes}, generation)


def test_a_text_only_config_gives_both_attention_shapes() -> None:
    config = read()
    sliding = AttentionShape("sliding", 8, 4, 8, 32, 32, 4)
    assert config.attention == (*[sliding] * 5, AttentionShape("global", 4, 2, 16, None, 48, 4))
    assert config.sparse == (True,) * 6
    assert (config.vocab, config.vocab_valid, config.layers) == (320, 300, 6)
    assert (sliding.q_width, sliding.kv_width, sliding.r_width) == (64, 32, 32)


def test_the_published_config_nests_its_text_config_and_uses_other_names() -> None:
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "local_layer_ids": [0, 2],
        "dense_mlp_idx": 2,
        "sconv_kernel_size": 3,
        "model_max_length": 1048576,
        "intermediate_size": 96,
        "dense_intermediate_size": 768,
        "embedding_multiplier": 12.0,
        "num_local_experts": 32,
        "sliding_window": 128,
    }
    config = InklingConfig.from_json({"model_type": "inkling_mm_model", "text_config": text})
    assert [shape.kind for shape in config.attention] == ["sliding", "global", "sliding"]
    assert config.sparse == (False, False, True)
    assert (config.dense_width, config.expert_width) == (768, 96)
    assert (config.conv_kernel, config.context, config.mup_divisor, config.experts) == (3, 1048576, 12.0, 32)
    assert config.attention[0].window == config.attention[0].extent == 128


def test_without_a_dense_width_the_intermediate_size_is_the_dense_one() -> None:
    config = read(intermediate_size=96, moe_intermediate_size=24, dense_mlp_idx=None)
    assert (config.dense_width, config.expert_width) == (96, 24)
    assert all(config.sparse)


def test_absent_keys_have_the_defaults_of_the_config_class() -> None:
    config = InklingConfig.from_json({"model_type": "inkling_text"})
    assert config.layers == 66
    assert config.hidden == 6144
    assert config.vocab == config.vocab_valid == 201024
    assert config.attention[5] == AttentionShape("global", 64, 8, 128, None, 1024, 16)
    assert config.attention[6] == AttentionShape("sliding", 64, 16, 128, 512, 512, 16)
    assert (config.experts, config.experts_per_token, config.shared_experts) == (256, 6, 2)
    assert (config.eps, config.route_scale, config.mup_divisor) == (1e-6, 8.0, 24.0)
    assert (config.log_scaling_floor, config.log_scaling_alpha, config.context) == (None, 0.1, 131072)


@pytest.mark.parametrize(
    ("generation", "own", "expected"),
    [
        (None, 5, (5,)),
        (None, None, ()),
        ({"eos_token_id": 7}, 5, (7,)),
        ({"eos_token_id": [7, 8]}, None, (7, 8)),
        ({"eos_token_id": None}, 5, ()),
        ({}, 5, ()),
        ({"eos_token_id": []}, 5, ()),
    ],
)
def test_end_ids_are_those_at_which_transformers_stops(
    generation: dict[str, object] | None, own: int | None, expected: tuple[int, ...]
) -> None:
    assert read(generation, eos_token_id=own).eos_ids == expected


@pytest.mark.parametrize(
    ("outer", "inner", "expected"), [(None, 5, (5,)), (4, 5, (4,)), (4, None, (4,)), (None, None, ())]
)
def test_the_outer_end_id_of_a_published_config_comes_first(
    outer: int | None, inner: int | None, expected: tuple[int, ...]
) -> None:
    text = {"eos_token_id": inner, "num_hidden_layers": 2}
    config = {"model_type": "inkling_mm_model", "text_config": text, "eos_token_id": outer}
    assert InklingConfig.from_json(config).eos_ids == expected


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "llama"}, r"model_type 'llama': expected one of inkling_mm_model, inkling_text"),
        ({"model_type": "inkling_mm_model"}, r"no 'text_config' object"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers = 0: expected a whole number, 1 to"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers = 1000000000"),
        ({"hidden_size": "64"}, r"hidden_size = '64'"),
        ({"hidden_size": True}, r"hidden_size = True"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps = 0.0: expected a number above 0"),
        ({"route_scale": float("nan")}, r"route_scale = nan: expected a number"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads = 3: the second must divide the first"),
        ({"num_experts_per_tok": 7, "n_routed_experts": 6}, r"can not pass more experts than there are"),
        ({"layer_types": ["hybrid"]}, r"layer_types with 1 entries: expected one for each of the 6 layers"),
        ({"layer_types": ["full"] * 6}, r"layer_types\[0\] = 'full': expected 'hybrid_sliding' or 'hybrid'"),
        ({"mlp_layer_types": "dense"}, r"mlp_layer_types with 'dense'"),
        ({"local_layer_ids": [6]}, r"names layer 6 in local_layer_ids, but has 6 layers"),
        ({"dense_mlp_idx": 7}, r"dense_mlp_idx = 7: expected 0 to 6"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu'"),
        ({"q_bias": True}, r"q_bias True: Inkling layers are computed with False only"),
        ({"gate_activation": "softmax"}, r"gate_activation 'softmax': .* 'sigmoid' only"),
        ({"norm_after_topk": False}, r"norm_after_topk False: .* True only"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping 30\.0: .* None only"),
        ({"n_shared_experts": 0}, r"n_shared_experts = 0"),
        ({"eos_token_id": "stop"}, r"eos_token_id = 'stop'"),
        ({"sliding_window": 64}, r"sliding_window_size = 32 and sliding_window = 64"),
    ],
)
def test_what_is_impossible_is_named(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        read(**changes)


@given(
    layers=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=9),
    floor=st.none() | st.integers(1, 10**6),
    eos=st.lists(st.integers(0, 2**31 - 1), max_size=3, unique=True),
    scale=st.floats(1e-3, 1e3),
)
def test_to_json_keeps_everything(
    layers: list[tuple[bool, bool]], floor: int | None, eos: list[int], scale: float
) -> None:
    config = read(
        {"eos_token_id": eos},
        num_hidden_layers=len(layers),
        layer_types=["hybrid" if kind else "hybrid_sliding" for kind, _ in layers],
        mlp_layer_types=["sparse" if sparse else "dense" for _, sparse in layers],
        log_scaling_n_floor=floor,
        route_scale=scale,
    )
    assert InklingConfig.from_json(config.to_json()) == config
