"""The one door to the sizes of a model of any family."""

from __future__ import annotations

from cascadia_p2p.models.emulated.config import EmulatedConfig
from cascadia_p2p.models.family import ModelConfig
from cascadia_p2p.models.inkling.config import InklingConfig
from cascadia_p2p.models.llama.config import LlamaConfig
from cascadia_p2p.models.sizes import ModelSizes


def model_sizes(config: ModelConfig) -> ModelSizes:
    """The sizes of the model that a config describes."""
    # A family is imported when it is needed, because every kernel that is imported is compiled.
    match config:
        case InklingConfig():
            from cascadia_p2p.models.inkling.memory import inkling_sizes

            return inkling_sizes(config)
        case LlamaConfig():
            from cascadia_p2p.models.llama.memory import llama_sizes

            return llama_sizes(config)
        case EmulatedConfig():
            from cascadia_p2p.models.emulated.memory import emulated_sizes

            return emulated_sizes(config)
