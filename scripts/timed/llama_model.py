"""A child that times llama.cpp on a GGUF file; needs the `llamacpp` extra."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import llama_cpp
import numpy as np

from timed.serving import serve

CONTEXT = 1024
BATCH = 512


class LlamaModel:
    """A model in llama.cpp on the CPU, one stream.

    Args:
        path: of the GGUF file.
        threads: for rows of both kinds.
        extra_buffers: whether llama.cpp may arrange weights anew for the processor, where it would use AMX.
    """

    def __init__(self, path: Path, threads: int, extra_buffers: bool) -> None:
        if not extra_buffers:
            _without_extra_buffers()
        self._extra_buffers = extra_buffers
        self._threads = threads
        self._model = llama_cpp.Llama(
            str(path),
            n_ctx=CONTEXT,
            n_batch=BATCH,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            verbose=False,
        )

    @property
    def vocab(self) -> int:
        """Valid ids."""
        return self._model.n_vocab()

    def about(self) -> dict[str, object]:
        """Versions and settings."""
        return {
            "llama_cpp_python": llama_cpp.__version__,
            "threads": self._threads,
            "batch": BATCH,
            "extra_buffers": self._extra_buffers,
            "system": llama_cpp.llama_print_system_info().decode(),
        }

    def prefill(self, ids: np.ndarray) -> None:
        """One prompt, in batches of llama.cpp's own size."""
        self._model.reset()
        self._model.eval(ids[0].tolist())
        self._choose()

    def decode(self, ids: np.ndarray) -> None:
        """One id."""
        self._model.eval(ids.tolist())
        self._choose()

    def parts(self) -> dict[str, float]:
        """Not told."""
        return {}

    def _choose(self) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())


def _without_extra_buffers() -> None:
    """Let llama.cpp load weights as they are: `Llama` has no argument for that."""
    usual = llama_cpp.llama_model_default_params

    def params() -> object:
        made = usual()
        made.use_extra_bufts = False
        return made

    llama_cpp.llama_model_default_params = llama_cpp.llama_cpp.llama_model_default_params = params


def main() -> int:
    """Load, warm up and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--extra-buffers", action="store_true")
    args = parser.parse_args()
    model = LlamaModel(args.gguf, args.threads, args.extra_buffers)
    return serve(model, model.vocab)


if __name__ == "__main__":
    sys.exit(main())
