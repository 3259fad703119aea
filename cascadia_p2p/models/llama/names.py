"""The names under which checkpoints of the Llama family keep their tensors: transformers' and GGUF's."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.layout import ModelLayout, TensorPlan, TensorRole, names_in_words
from cascadia_p2p.models.llama.config import LlamaConfig


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to name tensors; those of a layer follow `layer` with the layer's number put in.

    Args:
        unused: tensors that some checkpoints have and that hold nothing which is not computed anyway.
    """

    embed: str
    final_norm: str
    head: str
    layer: str
    parts: dict[str, str]
    unused: re.Pattern[str]


TRANSFORMERS = Spelling(
    embed="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers.{}.",
    parts={
        "attn_norm": "input_layernorm.weight",
        "q": "self_attn.q_proj.weight",
        "k": "self_attn.k_proj.weight",
        "v": "self_attn.v_proj.weight",
        "o": "self_attn.o_proj.weight",
        "q_bias": "self_attn.q_proj.bias",
        "k_bias": "self_attn.k_proj.bias",
        "v_bias": "self_attn.v_proj.bias",
        "o_bias": "self_attn.o_proj.bias",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
    },
    # A tied head may be stored all the same, and old versions stored the frequencies.
    unused=re.compile(r"lm_head\.weight|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
)

GGUF = Spelling(
    embed="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    layer="blk.{}.",
    parts={
        "attn_norm": "attn_norm.weight",
        "q": "attn_q.weight",
        "k": "attn_k.weight",
        "v": "attn_v.weight",
        "o": "attn_output.weight",
        "q_bias": "attn_q.bias",
        "k_bias": "attn_k.bias",
        "v_bias": "attn_v.bias",
        "o_bias": "attn_output.bias",
        "q_norm": "attn_q_norm.weight",
        "k_norm": "attn_k_norm.weight",
        "mlp_norm": "ffn_norm.weight",
        "gate": "ffn_gate.weight",
        "up": "ffn_up.weight",
        "down": "ffn_down.weight",
    },
    # The divisors of rotary frequencies are part of the config.
    unused=re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight"),
)


def plan_tensors(
    config: LlamaConfig, spelling: Spelling = TRANSFORMERS, *, paired: bool = False
) -> ModelLayout:
    """Say which tensors the model has and how a checkpoint in this spelling keeps each.

    Args:
        config: of the model.
        spelling: of the names.
        paired: whether query and key rows stand in pairs within each head, as in GGUF's `llama`.
    """
    naming = _Naming(config, spelling, paired)
    layers = tuple(naming.layer(number) for number in range(config.layers))
    return ModelLayout(naming.embed(), layers, naming.head())


def layout(
    config: LlamaConfig, names: Collection[str], spelling: Spelling = TRANSFORMERS, *, paired: bool = False
) -> ModelLayout:
    """The same for a checkpoint with these tensor names.

    Raises:
        CheckpointError: tensors are missing, or there are some that would change the result.
    """
    plans = plan_tensors(config, spelling, paired=paired)
    needed, present = {plan.source for plan in plans.tensors()}, set(names)
    if missing := needed - present:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of {len(needed)} tensors that its config asks for: "
            f"{names_in_words(missing)}"
        )
    unknown = sorted(name for name in present - needed if not spelling.unused.fullmatch(name))
    inside = tuple(spelling.layer.format(number) for number in range(config.layers))
    if odd := [name for name in unknown if name.startswith(inside)]:
        raise CheckpointError(
            f"the checkpoint has {len(odd)} tensors in its layers that this family does not compute with "
            f"({names_in_words(odd)}): it is a model of another kind"
        )
    return ModelLayout(plans.embed, plans.layers, plans.head, unknown=tuple(unknown))


class _Naming:
    """Plans of single tensors, for one config and one spelling."""

    def __init__(self, config: LlamaConfig, spelling: Spelling, paired: bool) -> None:
        self.config = config
        self.spelling = spelling
        self.paired = config.head_dim if paired else 0

    def embed(self) -> tuple[TensorPlan, ...]:
        shape = (self.config.vocab, self.config.hidden)
        return (TensorPlan("embed.weight", shape, TensorRole.EMBEDDING, self.spelling.embed, (shape,)),)

    def head(self) -> tuple[TensorPlan, ...]:
        c, s = self.config, self.spelling
        shape = (c.vocab, c.hidden)
        source = s.embed if c.tied else s.head
        return (
            TensorPlan("final_norm", (c.hidden,), TensorRole.SMALL, s.final_norm, ((c.hidden,),)),
            TensorPlan("head.weight", shape, TensorRole.HEAD, source, (shape,)),
        )

    def layer(self, number: int) -> tuple[TensorPlan, ...]:
        c, projections = self.config, TensorRole.PROJECTIONS
        plans = [
            self._plan(number, "attn_norm", (c.hidden,)),
            self._plan(number, "q", (c.q_width, c.hidden), projections, self.paired),
            self._plan(number, "k", (c.kv_width, c.hidden), projections, self.paired),
            self._plan(number, "v", (c.kv_width, c.hidden), projections),
            self._plan(number, "o", (c.hidden, c.q_width), projections),
        ]
        if c.qkv_bias:
            plans += [
                self._plan(number, "q_bias", (c.q_width,), paired=self.paired),
                self._plan(number, "k_bias", (c.kv_width,), paired=self.paired),
                self._plan(number, "v_bias", (c.kv_width,)),
            ]
        if c.o_bias:
            plans.append(self._plan(number, "o_bias", (c.hidden,)))
        if c.qk_norm:
            plans += [self._plan(number, part, (c.head_dim,)) for part in ("q_norm", "k_norm")]
        return (
            *plans,
            self._plan(number, "mlp_norm", (c.hidden,)),
            self._plan(number, "gate", (c.width, c.hidden), TensorRole.DENSE),
            self._plan(number, "up", (c.width, c.hidden), TensorRole.DENSE),
            self._plan(number, "down", (c.hidden, c.width), TensorRole.DENSE),
        )

    def _plan(
        self,
        number: int,
        part: str,
        shape: tuple[int, ...],
        role: TensorRole = TensorRole.SMALL,
        paired: int = 0,
    ) -> TensorPlan:
        source = self.spelling.layer.format(number) + self.spelling.parts[part]
        return TensorPlan(f"layers.{number}.{part}", shape, role, source, (shape,), paired=paired)
