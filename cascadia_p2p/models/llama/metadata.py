"""A Llama model's config from the metadata of a GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, behind the architecture's name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.fields import MOST_LAYERS, Fields
from cascadia_p2p.models.llama.config import LlamaConfig, check
from cascadia_p2p.models.llama.names import GGUF
from cascadia_p2p.models.llama.rotary import DEFAULT_THETA, Rotary

ARCHITECTURE: Final = "general.architecture"
PAIRED: Final = {"llama": True, "qwen2": False, "qwen3": False}
"""Whether an architecture's query and key rows stand in pairs within each head, by its name."""

ROTARY_DIVISORS: Final = "rope_freqs.weight"

# Where these are there and not zero, the arithmetic is another.
_MULTIPLIERS: Final = ("attention.scale", "logit_scale", "residual_scale", "embedding_scale")


def read_metadata(
    metadata: Mapping[str, object],
    names: Collection[str],
    vocab: int,
    eos_ids: tuple[int, ...],
    divisors: tuple[float, ...] | None,
) -> LlamaConfig:
    """The config that a file describes.

    Args:
        metadata: of the file.
        names: of all its tensors, which tell what the model has besides the usual.
        vocab: rows of the embedding.
        eos_ids: the ids that end an answer.
        divisors: the numbers of `rope_freqs.weight`; None when there is no such tensor.

    Raises:
        CheckpointError: another architecture, or a value that is missing, impossible or not computed here.
    """
    name = metadata.get(ARCHITECTURE)
    if name not in PAIRED:
        raise CheckpointError(
            f"the GGUF file has {ARCHITECTURE} = {name!r}: expected one of {', '.join(PAIRED)}"
        )
    fields = Fields(metadata, "the GGUF file", f"{name}.")
    _refuse_what_differs(fields)
    layers = fields.integer("block_count", most=MOST_LAYERS)
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.wrong("attention.value_length", f"{head_dim}, as of keys")
    context = fields.integer("context_length")
    window = fields.optional_integer("attention.sliding_window")
    if window is not None and window < context:
        raise fields.wrong("attention.sliding_window", "none: files do not tell which layers have windows")
    first = GGUF.layer.format(0)
    return check(
        LlamaConfig(
            hidden=hidden,
            vocab=vocab,
            layers=layers,
            heads=heads,
            kv_heads=fields.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            width=fields.integer("feed_forward_length"),
            windows=(None,) * layers,
            rotary=_rotary(fields, head_dim, divisors, paired=PAIRED[str(name)]),
            eps=fields.positive("attention.layer_norm_rms_epsilon", 1e-5),
            qkv_bias=first + GGUF.parts["q_bias"] in names,
            o_bias=first + GGUF.parts["o_bias"] in names,
            qk_norm=first + GGUF.parts["q_norm"] in names,
            tied=GGUF.head not in names,
            context=context,
            eos_ids=eos_ids,
        )
    )


def _refuse_what_differs(fields: Fields) -> None:
    if fields.number("expert_count", 0):
        raise fields.wrong("expert_count", "0: experts are not computed in this family")
    for name in _MULTIPLIERS:
        if fields.number(name, 0.0) not in (0.0, 1.0):
            raise fields.wrong(name, "1: such multipliers are not computed here")
    if not fields.flag("attention.causal", True):
        raise fields.wrong("attention.causal", "true")


def _rotary(fields: Fields, head_dim: int, divisors: tuple[float, ...] | None, *, paired: bool) -> Rotary:
    dims = fields.integer("rope.dimension_count", head_dim)
    if paired and dims != head_dim:
        raise fields.wrong("rope.dimension_count", f"{head_dim}, the whole head: its rows are in pairs")
    kind = fields.value("rope.scaling.type")
    if kind not in (None, "none", "linear"):
        raise fields.wrong("rope.scaling.type", "none or linear, the kinds that are computed here")
    factor = fields.positive("rope.scale_linear", 1.0)
    if kind == "linear":
        factor = fields.positive("rope.scaling.factor", factor)
    theta = fields.positive("rope.freq_base", DEFAULT_THETA)
    if factor == 1.0:
        return Rotary(dims, theta, divisors)
    return Rotary(dims, theta, tuple(factor * each for each in divisors or (1.0,) * (dims // 2)))
