"""What each model family gives the engine: the part of a model that a stage holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from cascadia_p2p.engine.matrix import MatrixBackend
from cascadia_p2p.engine.model import PartLoaded, StageModel, StagePlan, TensorSource
from cascadia_p2p.models.emulated.config import EmulatedConfig
from cascadia_p2p.models.family import ModelConfig
from cascadia_p2p.models.inkling.config import InklingConfig
from cascadia_p2p.models.llama.config import LlamaConfig

StageBuilder: TypeAlias = Callable[[StagePlan, TensorSource, MatrixBackend, PartLoaded | None], StageModel]
"""Makes embedding, layers and head of one stage from its plan, the weights and a backend.

It tells of every part that is loaded, and raises ShardError when a tensor is missing or has another shape.
"""


def stage_builder(config: ModelConfig) -> StageBuilder:
    """What makes the stages of the model that has this config."""
    # A family is imported when it is needed, because every kernel that is imported is compiled.
    match config:
        case InklingConfig():
            from cascadia_p2p.models.inkling.model import InklingStageModel

            return partial(InklingStageModel, config)
        case LlamaConfig():
            from cascadia_p2p.models.llama.model import LlamaStageModel

            return partial(LlamaStageModel, config)
        case EmulatedConfig():
            from cascadia_p2p.models.emulated.model import EmulatedStageModel

            return partial(EmulatedStageModel, config)
