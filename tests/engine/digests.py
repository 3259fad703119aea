"""What the kernels make of fixed inputs, as lines of digests: run in processes of other instruction sets."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from itertools import chain

import numpy as np
from engine_world import Stages, sample_weights
from fixtures.dense import MODELS, dense_tensors
from stored_world import Coded, drawn_ids, experts, extremes, gated, stored

from cascadia_p2p.compiled import compiling
from cascadia_p2p.engine.kernel_backend import KernelBackend
from cascadia_p2p.engine.kernels.instructions import instructions
from cascadia_p2p.engine.load import backend_of, new_backend
from cascadia_p2p.engine.matrix import F32
from cascadia_p2p.logs import configure_logs
from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.models.family import ModelConfig
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.types import Promise

PRECISIONS = ("exact", "fine", "fast")
ENCODINGS = [encoding for encoding in Encoding if encoding is not Encoding.BF16]
RECIPE = Recipe("sets", layers=7, dense_layers=2)
PROMISE = Promise(1, 64, 20)


def rows(seed: int, count: int, width: int) -> F32:
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def signs(count: int, width: int) -> F32:
    return np.sign(rows(1, count, width)).astype(np.float32)


def models() -> Iterator[tuple[str, ModelConfig, Coded]]:
    yield "inkling", RECIPE.config(), Coded(sample_weights(RECIPE).tensors)
    dense = MODELS["qwen3"]
    yield "llama", dense.read(), Coded(dense_tensors(dense))


def products(precision: str) -> Iterator[tuple[str, F32]]:
    """Products, and mixtures of experts."""
    backend = KernelBackend(precision, 20, 1)
    for encoding in ENCODINGS:
        project = backend.projections([stored(encoding, 2, 70, 200)], "digest")
        for count in (1, 11):
            yield f"{encoding} {count}", project(rows(3, count, 200))[0]
        yield f"{encoding} extremes", backend.projections([extremes(encoding)], "digest")(signs(7, 192))[0]
        layer = backend.experts(gated(encoding, 4, 96, 80, 5), gated(encoding, 5, 96, 80, 1), 2, "digest")
        shares = np.ones((13, 2), np.float32)
        yield f"{encoding} experts", layer(rows(6, 13, 96), drawn_ids(7, 13, 5, 2), shares, shares[:, :1])


def logits(precision: str) -> Iterator[tuple[str, F32]]:
    """A prompt in windows through all layers of each family."""
    for name, config, source in models():
        stages = Stages(config, (config.layers,), source, PROMISE, precision=precision)
        stages.start(1)
        yield name, stages.prefill(1, [17 * n % 200 for n in range(45)], 20)


def fallback() -> float:
    """The error of what the CPU's backend here is, OpenVINO or our kernels, on an expert layer."""
    backend = new_backend("CPU", "exact", 4, 1)
    routed, shared = gated(Encoding.INT8, 4, 96, 80, 5), gated(Encoding.INT8, 5, 96, 80, 1)
    x, ids, shares = rows(6, 4, 96), drawn_ids(7, 4, 5, 2), np.ones((4, 2), np.float32)
    got = backend.experts(routed, shared, 2, "digest")(x, ids, shares, shares[:, :1])
    expected = experts(routed, shared, x, ids, shares, shares[:, :1])
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def main() -> None:
    compiling.set_threads(1)
    compiling.warm_up()
    print(f"set {instructions()}")
    print(f"backend {backend_of('CPU')} {fallback():.1e}")
    if instructions() is None:
        config = MODELS["qwen3"].read()
        source = Coded(dense_tensors(MODELS["qwen3"]))
        stages = Stages(config, (config.layers,), source, PROMISE, precision="openvino")
        stages.start(1)
        print("finite", np.isfinite(stages.prefill(1, list(range(20)), 20)).all())
        return
    for precision in PRECISIONS:
        for name, result in chain(products(precision), logits(precision) if "stages" in sys.argv else ()):
            assert np.isfinite(result).all(), name
            print(precision, name, hashlib.sha256(result.tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    # Only digests go to standard output.
    configure_logs("console", "error")
    main()
