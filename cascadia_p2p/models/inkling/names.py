"""The names under which an Inkling checkpoint keeps its tensors, in both spellings."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from enum import StrEnum

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.inkling.config import InklingConfig
from cascadia_p2p.models.layout import ModelLayout, Pick, TensorPlan, TensorRole, names_in_words


class Spelling(StrEnum):
    """Who wrote the checkpoint: the publisher (A) or transformers for a text-only model (B)."""

    A = "A"
    B = "B"


_PREFIX = {Spelling.A: "model.llm.", Spelling.B: "model."}
_EMBEDDING = {Spelling.A: "model.llm.embed.weight", Spelling.B: "model.embed_tokens.weight"}

# Canonical name: spelling A, spelling B. Those of a layer stand behind `layers.N.`.
_OUTER = {
    "embed.norm": ("model.llm.embed_norm.weight", "model.embed_tokens.embed_norm.weight"),
    "final_norm": ("model.llm.norm.weight", "model.norm.weight"),
    "head.weight": ("model.llm.unembed.weight", "lm_head.weight"),
}
_LAYER = {
    "attn_norm": ("attn_norm.weight", "input_layernorm.weight"),
    "q": ("attn.wq_du.weight", "self_attn.q_proj.weight"),
    "k": ("attn.wk_dv.weight", "self_attn.k_proj.weight"),
    "v": ("attn.wv_dv.weight", "self_attn.v_proj.weight"),
    "r": ("attn.wr_du.weight", "self_attn.r_proj.weight"),
    "o": ("attn.wo_ud.weight", "self_attn.o_proj.weight"),
    "q_norm": ("attn.q_norm.weight", "self_attn.q_norm.weight"),
    "k_norm": ("attn.k_norm.weight", "self_attn.k_norm.weight"),
    "k_conv": ("attn.k_sconv.weight", "self_attn.k_sconv.conv1d.weight"),
    "v_conv": ("attn.v_sconv.weight", "self_attn.v_sconv.conv1d.weight"),
    "rel_proj": ("attn.rel_logits_proj.proj", "self_attn.rel_logits_proj.proj"),
    "attn_conv": ("attn_sconv.weight", "attn_sconv.conv1d.weight"),
    "mlp_conv": ("mlp_sconv.weight", "mlp_sconv.conv1d.weight"),
    "mlp_norm": ("mlp_norm.weight", "post_attention_layernorm.weight"),
    "down": ("mlp.w2_md.weight", "mlp.down_proj.weight"),
    "router": ("mlp.gate.weight", "mlp.gate.weight"),
    "router_bias": ("mlp.gate.bias", "mlp.gate.e_score_correction_bias"),
    "experts.down": ("mlp.experts.w2_weight", "mlp.experts.down_proj"),
    "shared.down": ("mlp.shared_experts.shared_w2_weight", "mlp.shared_experts.down_proj"),
}

# Parts of a checkpoint that the text model is computed without.
_LEFT_OUT = (
    ("multi-token prediction", re.compile(r"(?:model\.)?mtp\.")),
    ("vision", re.compile(r"(?:model\.)?(?:visual|vision_tower)\.")),
    ("audio", re.compile(r"(?:model\.)?(?:audio|audio_tower)\.")),
    # What quantisation notes of activations and of its own input; weights are decoded without it.
    (
        "notes of quantisation",
        re.compile(
            r".*\.(?:w13|w2)(?:_weight)?[._](?:input_amax|input_scale|input_global_scale|original_shape)"
        ),
    ),
)


def find_spelling(names: Collection[str]) -> Spelling:
    """Tell by the embedding's name who wrote the checkpoint.

    Raises:
        CheckpointError: neither spelling's embedding is there, or both are.
    """
    found = [spelling for spelling, name in _EMBEDDING.items() if name in names]
    if len(found) != 1:
        expected = " or ".join(_EMBEDDING.values())
        has = "both are there" if found else f"it has {names_in_words(names) or 'no tensors'}"
        raise CheckpointError(f"the checkpoint should hold one embedding, {expected}, but {has}")
    return found[0]


def plan_tensors(config: InklingConfig, spelling: Spelling) -> ModelLayout:
    """Say which tensors the model has and how a checkpoint in this spelling keeps each."""
    naming = _Naming(config, spelling)
    layers = tuple(naming.layer(index) for index in range(config.layers))
    return ModelLayout(naming.embed(), layers, naming.head())


def layout(config: InklingConfig, names: Collection[str]) -> ModelLayout:
    """Say which tensors the model has and where the checkpoint with these tensor names keeps each.

    Raises:
        CheckpointError: tensors are missing.
    """
    plans = plan_tensors(config, find_spelling(names))
    needed = {plan.source for plan in plans.tensors()}
    present = set(names)
    if missing := needed - present:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of {len(needed)} tensors that its config.json asks for: "
            f"{names_in_words(missing)}"
        )
    rest = present - needed
    skipped = {part: tuple(sorted(n for n in rest if form.match(n))) for part, form in _LEFT_OUT}
    skipped = {part: found for part, found in skipped.items() if found}
    unknown = rest.difference(*skipped.values())
    return replace(plans, skipped=skipped, unknown=tuple(sorted(unknown)))


class _Naming:
    """Plans of single tensors, for one config and one spelling."""

    def __init__(self, config: InklingConfig, spelling: Spelling) -> None:
        self.config = config
        self.spelling = spelling
        self.column = 0 if spelling is Spelling.A else 1

    def embed(self) -> tuple[TensorPlan, ...]:
        c = self.config
        source = _EMBEDDING[self.spelling]
        shape = (c.vocab, c.hidden)
        return (
            TensorPlan("embed.weight", shape, TensorRole.EMBEDDING, source, (shape,)),
            self._outer("embed.norm", (c.hidden,)),
        )

    def head(self) -> tuple[TensorPlan, ...]:
        c = self.config
        valid = (c.vocab_valid, c.hidden)
        # Rows beyond the valid ids are padding, which some checkpoints leave out.
        head = TensorPlan(
            "head.weight",
            valid,
            TensorRole.HEAD,
            _OUTER["head.weight"][self.column],
            ((c.vocab, c.hidden), valid),
            Pick(0, 0, 1, c.vocab_valid),
        )
        return (self._outer("final_norm", (c.hidden,)), head)

    def layer(self, index: int) -> tuple[TensorPlan, ...]:
        mlp = self._experts(index) if self.config.sparse[index] else self._dense(index)
        return (*self._attention(index), self._small(index, "mlp_norm", (self.config.hidden,)), *mlp)

    def _attention(self, index: int) -> tuple[TensorPlan, ...]:
        c = self.config
        shape = c.attention[index]
        return (
            self._small(index, "attn_norm", (c.hidden,)),
            self._plain(index, "q", (shape.q_width, c.hidden), TensorRole.PROJECTIONS),
            self._plain(index, "k", (shape.kv_width, c.hidden), TensorRole.PROJECTIONS),
            self._plain(index, "v", (shape.kv_width, c.hidden), TensorRole.PROJECTIONS),
            self._plain(index, "r", (shape.r_width, c.hidden), TensorRole.PROJECTIONS),
            self._plain(index, "o", (c.hidden, shape.q_width), TensorRole.PROJECTIONS),
            self._small(index, "q_norm", (shape.head_dim,)),
            self._small(index, "k_norm", (shape.head_dim,)),
            self._conv(index, "k_conv", shape.kv_width),
            self._conv(index, "v_conv", shape.kv_width),
            self._small(index, "rel_proj", (shape.d_rel, shape.extent)),
            self._conv(index, "attn_conv", c.hidden),
            self._conv(index, "mlp_conv", c.hidden),
        )

    def _dense(self, index: int) -> tuple[TensorPlan, ...]:
        c = self.config
        if self.spelling is Spelling.A:
            both = self._gate_up(index, "", "mlp.w13_dn.weight", (), c.dense_width, TensorRole.DENSE)
        else:
            shape = (c.dense_width, c.hidden)
            both = tuple(
                self._plan(index, part, shape, TensorRole.DENSE, f"mlp.{part}_proj.weight", shape)
                for part in ("gate", "up")
            )
        return (
            *both,
            self._plain(index, "down", (c.hidden, c.dense_width), TensorRole.DENSE),
            self._plan(index, "global_scale", (1,), TensorRole.SMALL, "mlp.global_scale", (1,)),
        )

    def _experts(self, index: int) -> tuple[TensorPlan, ...]:
        c = self.config
        role = TensorRole.EXPERTS
        routed, shared = (c.experts,), (c.shared_experts,)
        if self.spelling is Spelling.A:
            routed_source = "mlp.experts.w13_weight"
            shared_both = self._gate_up(
                index, "shared.", "mlp.shared_experts.shared_w13_weight", shared, c.expert_width, role
            )
        else:
            routed_source = "mlp.experts.gate_up_proj"
            shape = (*shared, c.expert_width, c.hidden)
            shared_both = tuple(
                self._plan(index, f"shared.{part}", shape, role, f"mlp.shared_experts.{part}_proj", shape)
                for part in ("gate", "up")
            )
        return (
            self._small(index, "router", (c.experts + c.shared_experts, c.hidden)),
            self._small(index, "router_bias", (c.experts,)),
            self._plan(index, "global_scale", (1,), TensorRole.SMALL, "mlp.gate.global_scale", (1,)),
            *self._gate_up(index, "experts.", routed_source, routed, c.expert_width, role),
            self._plain(index, "experts.down", (*routed, c.hidden, c.expert_width), role),
            *shared_both,
            self._plain(index, "shared.down", (*shared, c.hidden, c.expert_width), role),
        )

    def _gate_up(
        self, index: int, group: str, source: str, stack: tuple[int, ...], width: int, role: TensorRole
    ) -> tuple[TensorPlan, ...]:
        """Gate and up rows that share one tensor: interleaved in spelling A, one after the other in B."""
        interleaved = self.spelling is Spelling.A
        shape = (*stack, width, self.config.hidden)
        whole = (*stack, 2 * width, self.config.hidden)
        axis = len(stack)
        gate = Pick(axis, 0, 2, width) if interleaved else Pick(axis, 0, 1, width)
        up = Pick(axis, 1, 2, width) if interleaved else Pick(axis, width, 1, width)
        return (
            self._plan(index, f"{group}gate", shape, role, source, whole, gate),
            self._plan(index, f"{group}up", shape, role, source, whole, up),
        )

    def _conv(self, index: int, name: str, channels: int) -> TensorPlan:
        taps = self.config.conv_kernel
        source = _LAYER[name][self.column]
        return self._plan(index, name, (channels, taps), TensorRole.SMALL, source, (channels, 1, taps))

    def _small(self, index: int, name: str, shape: tuple[int, ...]) -> TensorPlan:
        return self._plain(index, name, shape, TensorRole.SMALL)

    def _plain(self, index: int, name: str, shape: tuple[int, ...], role: TensorRole) -> TensorPlan:
        return self._plan(index, name, shape, role, _LAYER[name][self.column], shape)

    def _plan(
        self,
        index: int,
        name: str,
        shape: tuple[int, ...],
        role: TensorRole,
        source: str,
        source_shape: tuple[int, ...],
        pick: Pick | None = None,
    ) -> TensorPlan:
        full = f"{_PREFIX[self.spelling]}layers.{index}.{source}"
        return TensorPlan(f"layers.{index}.{name}", shape, role, full, (source_shape,), pick)

    def _outer(self, name: str, shape: tuple[int, ...]) -> TensorPlan:
        return TensorPlan(name, shape, TensorRole.SMALL, _OUTER[name][self.column], (shape,))
