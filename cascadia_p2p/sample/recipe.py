"""What a sample model is made to: its sizes, and the `config.json` that says so in either spelling."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cascadia_p2p.errors import UsageError
from cascadia_p2p.models.inkling.config import InklingConfig
from cascadia_p2p.models.inkling.names import Spelling
from cascadia_p2p.sample.tokenizer import BYTES, special_tokens

CLASSES = 8
"""Leading columns of the residual that tell a token's class; layers read them and never write them."""

VISION = {"hidden_size": 8, "n_layers": 1, "num_attention_heads": 2, "patch_size": 2}
AUDIO = {"n_mel_bins": 4, "mel_vocab_size": 4}
"""Configs of the parts beside the text model, as small as the reference accepts; nothing here reads them."""

_SPECIAL = special_tokens(BYTES + 16)
END_OF_TEXT = _SPECIAL["<|endoftext|>"]
END_SAMPLING = _SPECIAL["<|content_model_end_sampling|>"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sizes of a sample model; every field is the value of the config key that its name suggests.

    Args:
        name: of the preset, or what the sizes are for.
        layers: decoder layers; every sixth is global.
        eos: ids for `eos_token_id` and `generation_config.json`; empty writes null in both.
    """

    name: str
    layers: int = 12
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    sliding_heads: int = 4
    sliding_kv_heads: int = 4
    sliding_head_dim: int = 16
    window: int = 16
    extent: int = 40
    d_rel: int = 4
    dense_layers: int = 2
    dense_width: int = 128
    experts: int = 12
    chosen: int = 3
    shared: int = 2
    expert_width: int = 32
    vocab: int = 288
    vocab_valid: int = 280
    route_scale: float = 2.5
    mup_divisor: float = 4.0
    log_scaling_floor: int | None = None
    log_scaling_alpha: float = 0.1
    context: int = 4096
    eos: tuple[int, ...] = (END_SAMPLING, END_OF_TEXT)

    def config(self) -> InklingConfig:
        """The config of the sample model."""
        return InklingConfig.from_json(self.config_json(Spelling.B), self.generation_json())

    def generation_json(self) -> dict[str, object]:
        """The object for `generation_config.json`."""
        return {"eos_token_id": list(self.eos) or None, "do_sample": False}

    def config_json(self, spelling: Spelling) -> dict[str, object]:
        """The object for `config.json`, with the key names that writers of the spelling use."""
        common: dict[str, object] = {
            "vocab_size": self.vocab,
            "unpadded_vocab_size": self.vocab_valid,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "swa_num_attention_heads": self.sliding_heads,
            "swa_num_key_value_heads": self.sliding_kv_heads,
            "swa_head_dim": self.sliding_head_dim,
            "sliding_window_size": self.window,
            "d_rel": self.d_rel,
            "rel_extent": self.extent,
            "log_scaling_n_floor": self.log_scaling_floor,
            "log_scaling_alpha": self.log_scaling_alpha,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "n_shared_experts": self.shared,
            "route_scale": self.route_scale,
            "logits_mup_width_multiplier": self.mup_divisor,
            "bos_token_id": None,
            "pad_token_id": None,
            "eos_token_id": self.eos[0] if self.eos else None,
        }
        return self._published(common) if spelling is Spelling.A else self._text_only(common)

    def _text_only(self, common: dict[str, object]) -> dict[str, object]:
        sliding = [bool((layer + 1) % 6) for layer in range(self.layers)]
        dense = [layer < self.dense_layers for layer in range(self.layers)]
        return {
            "architectures": ["InklingForCausalLM"],
            "model_type": "inkling_text",
            **common,
            "layer_types": ["hybrid_sliding" if local else "hybrid" for local in sliding],
            "mlp_layer_types": ["dense" if is_dense else "sparse" for is_dense in dense],
            "intermediate_size": self.dense_width,
            "moe_intermediate_size": self.expert_width,
            "conv_kernel_size": 4,
            "max_position_embeddings": self.context,
        }

    def _published(self, common: dict[str, object]) -> dict[str, object]:
        text = {
            **common,
            "local_layer_ids": [layer for layer in range(self.layers) if (layer + 1) % 6],
            "dense_mlp_idx": self.dense_layers,
            "intermediate_size": self.expert_width,
            "dense_intermediate_size": self.dense_width,
            "sconv_kernel_size": 4,
            "model_max_length": self.context,
            "q_bias": False,
            "o_bias": False,
            "use_sconv": True,
            "use_embed_norm": True,
            "use_gate_bias": True,
            "use_global_scale": True,
            "gate_activation": "sigmoid",
            "norm_after_topk": True,
            "shared_expert_sink": True,
            "final_logit_softcapping": None,
        }
        return {
            "architectures": ["InklingForConditionalGeneration"],
            "model_type": "inkling_mm_model",
            "text_config": text,
            "vision_config": VISION,
            "audio_config": AUDIO,
            "mtp_config": {"num_nextn_predict_layers": 1},
        }


_TINY12 = Recipe("tiny12")

PRESETS = {
    recipe.name: recipe
    for recipe in (
        Recipe("tiny66", layers=66, window=32, extent=64),
        Recipe("tiny42", layers=42, sliding_kv_heads=2),
        _TINY12,
        replace(_TINY12, name="tiny12-log", log_scaling_floor=12, log_scaling_alpha=0.4),
        replace(_TINY12, name="tiny12-heads", sliding_heads=6, sliding_kv_heads=3, sliding_head_dim=8),
        replace(_TINY12, name="tiny12-noeos", eos=()),
    )
}
"""Ready sizes by name: the layers of both published models, and twelve layers in several variants."""


def find_recipe(name: str) -> Recipe:
    """The preset of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in PRESETS:
        raise UsageError(f"there is no sample model '{name}': choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
