"""What each model family gives the engine: the part of a model that a stage holds, and its need of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cascadia_p2p.engine.matrix import MatrixBackend
from cascadia_p2p.engine.memory import MemoryNeed
from cascadia_p2p.engine.model import PartLoaded, StageModel, StagePlan, TensorSource
from cascadia_p2p.models.family import ModelConfig
from cascadia_p2p.models.inkling.config import InklingConfig
from cascadia_p2p.models.llama.config import LlamaConfig
from cascadia_p2p.types import Promise


@dataclass(frozen=True, slots=True)
class StageMaker:
    """One model, ready to be cut into stages.

    Args:
        need: bytes of a stage with float32 weights, from its layers, promise and rewind. The device's copy of
            the weights counts, mapped files do not.
        build: embedding, layers and head of a stage, from its plan, weights and a backend; told of every part
            that is loaded. Raises ShardError when a tensor is missing or has another shape.
    """

    need: Callable[[range, Promise, int], MemoryNeed]
    build: Callable[[StagePlan, TensorSource, MatrixBackend, PartLoaded | None], StageModel]


def stage_maker(config: ModelConfig) -> StageMaker:
    """What makes stages of the model that has this config, by its family."""
    # A family is imported when it is needed, because every kernel that is imported is compiled.
    match config:
        case InklingConfig():
            from cascadia_p2p.models.inkling import memory as inkling_memory
            from cascadia_p2p.models.inkling.model import InklingStageModel

            return StageMaker(partial(inkling_memory.memory_need, config), partial(InklingStageModel, config))
        case LlamaConfig():
            from cascadia_p2p.models.llama import memory as llama_memory
            from cascadia_p2p.models.llama.model import LlamaStageModel

            return StageMaker(partial(llama_memory.memory_need, config), partial(LlamaStageModel, config))
