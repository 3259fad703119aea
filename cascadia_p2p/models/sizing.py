"""The one door to the sizes of a model of any family."""

from __future__ import annotations

from cascadia_p2p.models.family import ModelConfig
from cascadia_p2p.models.inkling.memory import inkling_sizes
from cascadia_p2p.models.sizes import ModelSizes


def model_sizes(config: ModelConfig) -> ModelSizes:
    """The sizes of the model that a config describes."""
    return inkling_sizes(config)
