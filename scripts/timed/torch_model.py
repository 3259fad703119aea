"""A child that times transformers on a checkpoint, with torch on the CPU; needs the `reference` extra."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

from timed.serving import serve

TYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


class TorchModel:
    """A text model as transformers loads it, with the attention that it chooses by itself.

    Args:
        checkpoint: directory of a checkpoint in transformers' own spelling.
        dtype: of weights and activations, one of `TYPES`.
        experts: how transformers computes experts; None leaves the choice to it.
    """

    def __init__(self, checkpoint: Path, dtype: str, experts: str | None) -> None:
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=TYPES[dtype]).eval()
        if experts is not None:
            self._model.set_experts_implementation(experts)
        self._dtype = dtype
        self._cache: object = None

    @property
    def vocab(self) -> int:
        """Valid ids."""
        config = self._model.config
        return getattr(config, "unpadded_vocab_size", None) or config.vocab_size

    def about(self) -> dict[str, object]:
        """Versions and settings."""
        config = self._model.config
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": self._dtype,
            "threads": torch.get_num_threads(),
            "attention": config._attn_implementation,
            "experts": getattr(config, "_experts_implementation", None),
        }

    def prefill(self, ids: np.ndarray) -> None:
        """All prompts in one call."""
        self._cache = None
        self._step(torch.from_numpy(ids))

    def decode(self, ids: np.ndarray) -> None:
        """One id of every stream in one call."""
        self._step(torch.from_numpy(ids[:, None]))

    def parts(self) -> dict[str, float]:
        """Not told."""
        return {}

    def _step(self, ids: torch.Tensor) -> None:
        with torch.inference_mode():
            out = self._model(ids, cache=self._cache, use_cache=True, logits_to_keep=1)
            self._cache = out.cache
            out.logits[:, -1].argmax(-1).tolist()


def main() -> int:
    """Load, warm up and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", choices=TYPES, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--experts", metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = TorchModel(args.checkpoint, args.dtype, args.experts)
    return serve(model, model.vocab)


if __name__ == "__main__":
    sys.exit(main())
