"""Which model families there are, told by a config's `model_type`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.emulated.config import FAMILY as EMULATED
from cascadia_p2p.models.emulated.config import EmulatedConfig
from cascadia_p2p.models.inkling import config as inkling
from cascadia_p2p.models.inkling import names as inkling_names
from cascadia_p2p.models.inkling.config import InklingConfig
from cascadia_p2p.models.layout import ModelLayout
from cascadia_p2p.models.llama import config as llama
from cascadia_p2p.models.llama import names as llama_names
from cascadia_p2p.models.llama.config import LlamaConfig

FAMILIES = ("inkling", "llama")

CheckpointConfig: TypeAlias = InklingConfig | LlamaConfig
"""The config of any family that checkpoints have."""

ModelConfig: TypeAlias = CheckpointConfig | EmulatedConfig
"""The config of any family; all have layers, hidden, context, vocab_valid, eos_ids and to_json."""


@dataclass(frozen=True, slots=True)
class SourceModel:
    """What a checkpoint holds: its family, config, and where each tensor lies."""

    family: str
    config: CheckpointConfig
    layout: ModelLayout


def read_config(
    config: Mapping[str, object], generation_config: Mapping[str, object] | None
) -> tuple[str, CheckpointConfig]:
    """The family and the config that a checkpoint's `config.json` describes.

    Raises:
        CheckpointError: no family of ours, or an impossible config.
    """
    model_type = config.get("model_type")
    if model_type in inkling.MODEL_TYPES:
        return "inkling", InklingConfig.from_json(config, generation_config)
    if model_type in llama.MODEL_TYPES:
        return "llama", LlamaConfig.from_json(config, generation_config)
    known = ", ".join((*inkling.MODEL_TYPES, *llama.MODEL_TYPES))
    raise CheckpointError(f"config.json has model_type {model_type!r}: expected one of {known}")


def read_source(
    config: Mapping[str, object], generation_config: Mapping[str, object] | None, names: Collection[str]
) -> SourceModel:
    """Tell what a checkpoint with this `config.json` and these tensor names is.

    Raises:
        CheckpointError: no family of ours, an impossible config, or tensors that are missing.
    """
    family, read = read_config(config, generation_config)
    match read:
        case InklingConfig():
            return SourceModel(family, read, inkling_names.layout(read, names))
        case LlamaConfig():
            return SourceModel(family, read, llama_names.layout(read, names))


def read_exported(family: str, config: Mapping[str, object]) -> ModelConfig:
    """The config that an export wrote.

    Raises:
        CheckpointError: an unknown family, or an impossible config.
    """
    if family == "inkling":
        return InklingConfig.from_json(config)
    if family == "llama":
        return LlamaConfig.from_export(config)
    if family == EMULATED:
        return EmulatedConfig.from_export(config)
    raise CheckpointError(f"model family {family!r} is not known: expected one of {', '.join(FAMILIES)}")
