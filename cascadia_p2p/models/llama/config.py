"""What a model of the Llama family is, read from its `config.json` or from an export's manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.fields import MOST_LAYERS, Fields
from cascadia_p2p.models.llama.rotary import Rotary, read_rotary

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """A dense decoder with rotary attention, independent of what its checkpoint calls it.

    Args:
        hidden: numbers a row.
        vocab: rows of the embedding and of the head.
        layers: decoder layers.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: numbers a head; scores are divided by its root.
        width: inner width of the MLP.
        windows: one a layer: positions that a row sees, its own among them; None sees all.
        rotary: how queries and keys turn.
        eps: of every RMS norm.
        qkv_bias: whether queries, keys and values have biases.
        o_bias: whether attention's output has one.
        qk_norm: whether queries and keys are normalised a head, before they turn.
        tied: whether the head's matrix is the embedding.
        context: positions that the model was made for.
        eos_ids: generation ends after one of these; may be empty.
    """

    hidden: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    windows: tuple[int | None, ...]
    rotary: Rotary
    eps: float
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    tied: bool
    context: int
    eos_ids: tuple[int, ...]

    @property
    def vocab_valid(self) -> int:
        """Token ids that exist: all."""
        return self.vocab

    @property
    def q_width(self) -> int:
        """Columns of the query projection's result."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key projection's result, and of the value projection's."""
        return self.kv_heads * self.head_dim

    @classmethod
    def from_json(
        cls, config: Mapping[str, object], generation_config: Mapping[str, object] | None = None
    ) -> LlamaConfig:
        """Read a `config.json` of one of `MODEL_TYPES`.

        A key that is absent has the default of transformers' config class.

        Args:
            config: the object in `config.json`.
            generation_config: the object in `generation_config.json`; None when there is no such file.

        Raises:
            CheckpointError: another model type, or a value that is impossible or not computed here.
        """
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            raise CheckpointError(
                f"config.json has model_type {kind!r}: expected one of {', '.join(MODEL_TYPES)}"
            )
        fields = Fields(config)
        _refuse_what_differs(fields)
        layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
        hidden = fields.integer("hidden_size")
        heads = fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", _default_kv_heads(str(kind), fields, heads))
        head_dim = fields.integer("head_dim", 128 if kind == "qwen3" else hidden // heads)
        context = fields.integer("max_position_embeddings")
        biased = fields.flag("attention_bias", False) and kind in ("llama", "qwen3")
        return check(
            cls(
                hidden=hidden,
                vocab=fields.integer("vocab_size"),
                layers=layers,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                width=fields.integer("intermediate_size"),
                windows=_windows(str(kind), fields, layers, context),
                rotary=read_rotary(fields, head_dim, context),
                eps=fields.positive("rms_norm_eps", 1e-6),
                qkv_bias=biased or kind == "qwen2",
                o_bias=biased,
                qk_norm=kind == "qwen3",
                tied=fields.flag("tie_word_embeddings", False),
                context=context,
                eos_ids=_eos_ids(str(kind), fields, generation_config),
            )
        )

    def to_json(self) -> dict[str, object]:
        """Every value, for `from_export` to give an equal config back."""
        return {
            "hidden_size": self.hidden,
            "vocab_size": self.vocab,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.width,
            "sliding_windows": list(self.windows),
            "rotary_dims": self.rotary.dims,
            "rope_theta": self.rotary.theta,
            "rope_divisors": None if self.rotary.divisors is None else list(self.rotary.divisors),
            "rms_norm_eps": self.eps,
            "qkv_bias": self.qkv_bias,
            "o_bias": self.o_bias,
            "qk_norm": self.qk_norm,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.context,
            "eos_token_id": list(self.eos_ids),
        }

    @classmethod
    def from_export(cls, values: Mapping[str, object]) -> LlamaConfig:
        """What `to_json` gave.

        Raises:
            CheckpointError: a value is missing or impossible.
        """
        fields = Fields(values, "the manifest's config")
        layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
        return check(
            cls(
                hidden=fields.integer("hidden_size"),
                vocab=fields.integer("vocab_size"),
                layers=layers,
                heads=fields.integer("num_attention_heads"),
                kv_heads=fields.integer("num_key_value_heads"),
                head_dim=fields.integer("head_dim"),
                width=fields.integer("intermediate_size"),
                windows=_exported_windows(fields, layers),
                rotary=Rotary(
                    fields.integer("rotary_dims"),
                    fields.positive("rope_theta", 0.0),
                    _exported_divisors(fields),
                ),
                eps=fields.positive("rms_norm_eps", 0.0),
                qkv_bias=fields.flag("qkv_bias", False),
                o_bias=fields.flag("o_bias", False),
                qk_norm=fields.flag("qk_norm", False),
                tied=fields.flag("tie_word_embeddings", False),
                context=fields.integer("max_position_embeddings"),
                eos_ids=fields.ids("eos_token_id"),
            )
        )


def check(config: LlamaConfig) -> LlamaConfig:
    """The same config, if its numbers fit together.

    Raises:
        CheckpointError: they do not.
    """
    if config.heads % config.kv_heads:
        raise CheckpointError(
            f"the model has {config.heads} query heads and {config.kv_heads} key and value heads: "
            "the second must divide the first"
        )
    rotary = config.rotary
    if rotary.dims % 2 or rotary.dims > config.head_dim:
        raise CheckpointError(
            f"the model turns {rotary.dims} of the {config.head_dim} numbers of a head: "
            f"expected an even number, 2 to {config.head_dim}"
        )
    if rotary.divisors is not None and len(rotary.divisors) != rotary.dims // 2:
        raise CheckpointError(
            f"the model scales {len(rotary.divisors)} frequencies of rotary attention: "
            f"expected {rotary.dims // 2}, one a pair"
        )
    if len(config.windows) != config.layers:
        raise CheckpointError(
            f"the model has {len(config.windows)} windows for {config.layers} layers: expected one a layer"
        )
    return config


def _refuse_what_differs(fields: Fields) -> None:
    """Refuse what would change the arithmetic and is not computed here."""
    for name in ("hidden_act", "hidden_activation"):
        if fields.value(name) not in (None, "silu"):
            raise fields.wrong(name, "'silu', the only activation that this family is computed with")
    if fields.flag("mlp_bias", False):
        raise fields.wrong("mlp_bias", "false: MLPs with biases are not computed here")
    if (quantised := fields.value("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        raise CheckpointError(
            f"the checkpoint is quantised ({method or 'quantization_config is set'}): export from the "
            "checkpoint that it was made from, or from a GGUF file"
        )


def _default_kv_heads(kind: str, fields: Fields, heads: int) -> int:
    """What transformers takes where the key is absent, which is not the same as null."""
    if fields.has("num_key_value_heads"):
        return heads
    return {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(kind, heads)


def _windows(kind: str, fields: Fields, layers: int, context: int) -> tuple[int | None, ...]:
    if kind == "llama":
        return (None,) * layers
    window = fields.optional_integer("sliding_window")
    if window is None and not fields.has("sliding_window"):
        window = 4096
    if kind != "mistral" and not fields.flag("use_sliding_window", False):
        window = None
    if window is None or window >= context:
        return (None,) * layers
    if kind == "mistral":
        return (window,) * layers
    words = fields.words("layer_types", layers, (_FULL, _SLIDING))
    if words is None:
        first = fields.number("max_window_layers", 28)
        words = [_SLIDING if layer >= first else _FULL for layer in range(layers)]
    return tuple(window if word == _SLIDING else None for word in words)


def _eos_ids(kind: str, fields: Fields, generation_config: Mapping[str, object] | None) -> tuple[int, ...]:
    """The ids at which transformers' `generate` stops: a `generation_config.json` decides alone."""
    if generation_config is not None:
        return Fields(generation_config, "generation_config.json").ids("eos_token_id")
    if not fields.has("eos_token_id") and kind in ("llama", "mistral"):
        return (2,)
    return fields.ids("eos_token_id")


def _exported_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    value = fields.value("sliding_windows")
    good = isinstance(value, list) and all(each is None or (type(each) is int and each > 0) for each in value)
    if not isinstance(value, list) or not good:
        raise fields.wrong("sliding_windows", f"{layers} whole numbers or nulls")
    return tuple(value)


def _exported_divisors(fields: Fields) -> tuple[float, ...] | None:
    value = fields.value("rope_divisors")
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(each, int | float) and each > 0 for each in value):
        raise fields.wrong("rope_divisors", "numbers above 0")
    return tuple(float(each) for each in value)
