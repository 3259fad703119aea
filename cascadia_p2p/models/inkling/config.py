"""What an Inkling model is, read from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.fields import LARGEST, MOST_LAYERS, Fields

MODEL_TYPES = ("inkling_mm_model", "inkling_text")

AttentionKind = Literal["global", "sliding"]

_SLIDING, _GLOBAL = "hybrid_sliding", "hybrid"
_SPARSE, _DENSE = "sparse", "dense"

# The second name is what some checkpoints write instead of the first.
_OTHER_NAMES = {
    "logits_mup_width_multiplier": "embedding_multiplier",
    "sliding_window_size": "sliding_window",
    "n_routed_experts": "num_local_experts",
    "conv_kernel_size": "sconv_kernel_size",
    "max_position_embeddings": "model_max_length",
}

# What the published config says of the arithmetic, and the only value that it is written for.
_SWITCHES = {
    "hidden_act": "silu",
    "q_bias": False,
    "o_bias": False,
    "use_sconv": True,
    "use_embed_norm": True,
    "use_gate_bias": True,
    "use_global_scale": True,
    "gate_activation": "sigmoid",
    "norm_after_topk": True,
    "final_logit_softcapping": None,
}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of one layer's attention.

    Args:
        kind: a global layer sees all earlier positions, a sliding one the last `window`.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: numbers a head; scores are scaled by one over it, not over its root.
        window: positions a sliding layer sees, the row's own among them; None on global layers.
        extent: distances 0 to extent - 1 have a relative bias, farther ones have none.
        d_rel: numbers a head from which the bias is mixed.
    """

    kind: AttentionKind
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    extent: int
    d_rel: int

    @property
    def q_width(self) -> int:
        """Columns of the query projection's result."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key projection's result, and of the value projection's."""
        return self.kv_heads * self.head_dim

    @property
    def r_width(self) -> int:
        """Columns of the relative projection's result."""
        return self.heads * self.d_rel


@dataclass(frozen=True, slots=True)
class InklingConfig:
    """An Inkling text model, independent of how its checkpoint spells it.

    Args:
        hidden: numbers a row.
        vocab: rows of the embedding.
        vocab_valid: token ids that exist; the head gives logits for these only.
        attention: one shape a layer.
        sparse: one a layer; True where experts stand in place of the dense MLP.
        dense_width: inner width of the dense MLP.
        expert_width: inner width of one expert, routed or shared.
        experts: routed experts a layer.
        experts_per_token: routed experts chosen for a row.
        shared_experts: experts that every row passes; the router scores them after the routed ones.
        conv_kernel: taps of the short convolutions; a stream keeps `conv_kernel - 1` inputs of each.
        eps: of every RMS norm.
        route_scale: factor of the routing weights, beside each layer's global scale.
        mup_divisor: the final rows are divided by it before the head.
        log_scaling_floor: positions from which global layers scale queries and bias; None: never.
        log_scaling_alpha: strength of that scaling.
        context: positions that the model was made for.
        eos_ids: generation ends after one of these; may be empty.
    """

    hidden: int
    vocab: int
    vocab_valid: int
    attention: tuple[AttentionShape, ...]
    sparse: tuple[bool, ...]
    dense_width: int
    expert_width: int
    experts: int
    experts_per_token: int
    shared_experts: int
    conv_kernel: int
    eps: float
    route_scale: float
    mup_divisor: float
    log_scaling_floor: float | None
    log_scaling_alpha: float
    context: int
    eos_ids: tuple[int, ...]

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.attention)

    @classmethod
    def from_json(
        cls, config: Mapping[str, object], generation_config: Mapping[str, object] | None = None
    ) -> InklingConfig:
        """Read a `config.json`, either the published one with a `text_config` or a text-only one.

        A key that is absent has the default of transformers' `InklingTextConfig`.

        Args:
            config: the object in `config.json`.
            generation_config: the object in `generation_config.json`; None when there is no such file.

        Raises:
            CheckpointError: another model type, or a value that is impossible or contradicts another.
        """
        text = _text_config(config)
        fields = _Fields(text)
        layers = fields.integer("num_hidden_layers", 66, most=MOST_LAYERS)
        shapes = _shapes(fields)
        vocab = fields.integer("vocab_size", 201024)
        dense_width, expert_width = _widths(fields)
        experts = fields.integer("n_routed_experts", 256)
        chosen = fields.integer("num_experts_per_tok", 6)
        if chosen > experts:
            raise CheckpointError(
                f"config.json chooses num_experts_per_tok = {chosen} of n_routed_experts = {experts}: "
                "a row can not pass more experts than there are"
            )
        _check_switches(text)
        return cls(
            hidden=fields.integer("hidden_size", 6144),
            vocab=vocab,
            vocab_valid=min(vocab, fields.optional_integer("unpadded_vocab_size") or vocab),
            attention=tuple(shapes[kind] for kind in _layer_kinds(fields, layers)),
            sparse=_sparse_layers(fields, layers),
            dense_width=dense_width,
            expert_width=expert_width,
            experts=experts,
            experts_per_token=chosen,
            shared_experts=fields.integer("n_shared_experts", 2),
            conv_kernel=fields.integer("conv_kernel_size", 4, most=64),
            eps=fields.positive("rms_norm_eps", 1e-6),
            route_scale=fields.positive("route_scale", 8.0),
            mup_divisor=fields.positive("logits_mup_width_multiplier", 24.0),
            log_scaling_floor=_maybe_float(fields.optional_integer("log_scaling_n_floor")),
            log_scaling_alpha=fields.number("log_scaling_alpha", 0.1),
            context=fields.integer("max_position_embeddings", 131072),
            eos_ids=_eos_ids(config, text, generation_config),
        )

    def to_json(self) -> dict[str, object]:
        """Every value in the text-only spelling, so that `from_json` gives an equal config back."""
        layer_types = [_SLIDING if shape.kind == "sliding" else _GLOBAL for shape in self.attention]
        result: dict[str, object] = {
            "model_type": "inkling_text",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "vocab_size": self.vocab,
            "unpadded_vocab_size": self.vocab_valid,
            "layer_types": layer_types,
            "mlp_layer_types": [_SPARSE if sparse else _DENSE for sparse in self.sparse],
            "d_rel": self.attention[0].d_rel,
            "intermediate_size": self.dense_width,
            "moe_intermediate_size": self.expert_width,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "n_shared_experts": self.shared_experts,
            "conv_kernel_size": self.conv_kernel,
            "rms_norm_eps": self.eps,
            "route_scale": self.route_scale,
            "logits_mup_width_multiplier": self.mup_divisor,
            "log_scaling_n_floor": None if self.log_scaling_floor is None else int(self.log_scaling_floor),
            "log_scaling_alpha": self.log_scaling_alpha,
            "max_position_embeddings": self.context,
            "eos_token_id": list(self.eos_ids) or None,
        }
        for shape in self.attention:
            swa = "swa_" if shape.kind == "sliding" else ""
            result[f"{swa}num_attention_heads"] = shape.heads
            result[f"{swa}num_key_value_heads"] = shape.kv_heads
            result[f"{swa}head_dim"] = shape.head_dim
            result["sliding_window_size" if swa else "rel_extent"] = shape.extent
        return result


class _Fields(Fields):
    """The values of one config object, some of which have a second name."""

    def value(self, name: str) -> object:
        """The value under the name or under its other name; None when absent or null."""
        value, other_name = super().value(name), _OTHER_NAMES.get(name)
        other = None if other_name is None else super().value(other_name)
        if value is not None and other is not None and value != other:
            raise CheckpointError(
                f"config.json has {name} = {value!r} and {other_name} = {other!r}: both name one value, "
                "so keep one of them"
            )
        return other if value is None else value


def _text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    model_type = config.get("model_type")
    if model_type == "inkling_text":
        return config
    if model_type != "inkling_mm_model":
        raise CheckpointError(
            f"config.json has model_type {model_type!r}: expected one of {', '.join(MODEL_TYPES)}"
        )
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(
            "config.json is of model_type 'inkling_mm_model' but has no 'text_config' object: "
            "that is where the text model's sizes stand"
        )
    return text


def _check_switches(text: Mapping[str, object]) -> None:
    for name, only in _SWITCHES.items():
        if (value := text.get(name)) is not None and value != only:
            raise CheckpointError(
                f"config.json has {name} {value!r}: Inkling layers are computed with {only!r} only"
            )


def _shapes(fields: _Fields) -> dict[AttentionKind, AttentionShape]:
    d_rel = fields.integer("d_rel", 16)
    window = fields.integer("sliding_window_size", 512)
    extent = fields.integer("rel_extent", 1024)
    result: dict[AttentionKind, AttentionShape] = {}
    for prefix, kv_default in (("", 8), ("swa_", 16)):
        heads = fields.integer(f"{prefix}num_attention_heads", 64)
        kv_heads = fields.integer(f"{prefix}num_key_value_heads", kv_default)
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json has {prefix}num_attention_heads = {heads} and {prefix}num_key_value_heads = "
                f"{kv_heads}: the second must divide the first"
            )
        head_dim = fields.integer(f"{prefix}head_dim", 128)
        if prefix:
            result["sliding"] = AttentionShape("sliding", heads, kv_heads, head_dim, window, window, d_rel)
        else:
            result["global"] = AttentionShape("global", heads, kv_heads, head_dim, None, extent, d_rel)
    return result


def _layer_kinds(fields: _Fields, layers: int) -> list[AttentionKind]:
    words = fields.words("layer_types", layers, (_SLIDING, _GLOBAL))
    if words is not None:
        return ["sliding" if word == _SLIDING else "global" for word in words]
    ids = fields.value("local_layer_ids")
    if ids is None:
        return ["sliding" if (layer + 1) % 6 else "global" for layer in range(layers)]
    local = _id_list("local_layer_ids", ids)
    if beyond := [layer for layer in local if layer >= layers]:
        raise CheckpointError(
            f"config.json names layer {beyond[0]} in local_layer_ids, but has {layers} layers"
        )
    return ["sliding" if layer in set(local) else "global" for layer in range(layers)]


def _sparse_layers(fields: _Fields, layers: int) -> tuple[bool, ...]:
    words = fields.words("mlp_layer_types", layers, (_DENSE, _SPARSE))
    if words is not None:
        return tuple(word == _SPARSE for word in words)
    # A count: the layers before it are dense.
    dense = fields.value("dense_mlp_idx")
    if dense is None:
        dense = 0
    if not isinstance(dense, int) or isinstance(dense, bool) or not 0 <= dense <= layers:
        raise CheckpointError(
            f"config.json has dense_mlp_idx = {dense!r}: expected 0 to {layers}, the layer count"
        )
    return tuple(layer >= dense for layer in range(layers))


def _widths(fields: _Fields) -> tuple[int, int]:
    """Inner widths of the dense MLP and of an expert."""
    intermediate = fields.integer("intermediate_size", 24576)
    dense = fields.optional_integer("dense_intermediate_size")
    if dense is not None:
        return dense, intermediate
    return intermediate, fields.integer("moe_intermediate_size", 3072)


def _eos_ids(
    config: Mapping[str, object], text: Mapping[str, object], generation_config: Mapping[str, object] | None
) -> tuple[int, ...]:
    """The ids at which transformers' `generate` stops for a model that it loads from the same files.

    A `generation_config.json` decides alone, even where it names no id. Without one the outer config's
    non-null id comes before that of `text_config`. No id anywhere: nothing stops the generation.
    """
    if generation_config is not None:
        return _id_list("eos_token_id", generation_config.get("eos_token_id"), "generation_config.json")
    outer = config.get("eos_token_id")
    return _id_list("eos_token_id", text.get("eos_token_id") if outer is None else outer)


def _id_list(name: str, value: object, file: str = "config.json") -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    result: list[int] = []
    for number in ids:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= LARGEST:
            raise CheckpointError(
                f"{file} has {name} = {value!r}: expected a whole number, 0 or above, or a list"
            )
        result.append(number)
    return tuple(result)


def _maybe_float(value: int | None) -> float | None:
    return None if value is None else float(value)
