"""Runs transformers on the decoded weights of compressed sample exports; writes tests/fixtures/compressed.*.

Needs the `reference` extra. Every sample model is exported as usual, each stored tensor is decoded to float32
and put in its place in the checkpoint, and transformers reads that. Prompts are drawn until no token of an
answer leads by less than 1e-3 of the highest logit, and no expert by less than 2e-4, so that tokens are
decided by more than float32 noise.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import transformers  # noqa: E402
from fixtures.compressed import (  # noqa: E402
    ARRAYS,
    LENGTHS,
    NEW_TOKENS,
    SAMPLES,
    TABLE,
    ExportedWeights,
    config_of,
    export_sample,
    valid_ids,
)
from fixtures.live import Answer, Reference  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

from cascadia_p2p.models.inkling.config import InklingConfig  # noqa: E402
from cascadia_p2p.models.inkling.names import Spelling  # noqa: E402
from cascadia_p2p.models.inkling.names import plan_tensors as inkling_tensors  # noqa: E402
from cascadia_p2p.models.layout import TensorPlan  # noqa: E402
from cascadia_p2p.models.llama.config import LlamaConfig  # noqa: E402
from cascadia_p2p.models.llama.names import plan_tensors as llama_tensors  # noqa: E402

LEAST_LEAD = 1e-3
LEAST_ROUTER_GAP = 2e-4
LEAST_DISTINCT = 24


def main() -> int:
    """Write all cases."""
    table: dict[str, object] = {}
    arrays: dict[str, np.ndarray] = {}
    for name in SAMPLES:
        with tempfile.TemporaryDirectory() as work:
            weights = ExportedWeights(export_sample(name, Path(work), (config_of(name).layers,)))
            write_decoded(weights, Path(work) / "checkpoint")
            reference = Reference(Path(work) / "checkpoint")
        prompts = []
        for number, length in enumerate(LENGTHS):
            ids, answer = choose_prompt(reference, name, length)
            positions = sorted({0, length // 2, length - 1, length + 6, length + NEW_TOKENS - 2})
            arrays[f"{name}.{number}"] = answer.logits[positions]
            prompts.append(
                {
                    "ids": ids,
                    "generated": answer.generated,
                    "leads": [float(f"{lead:.3g}") for lead in leads(length, answer)],
                    "positions": positions,
                }
            )
            print(name, length, f"least lead {leads(length, answer).min():.1e}", file=sys.stderr)
        table[name] = {"digest": weights.digest(), "prompts": prompts}
    np.savez_compressed(ARRAYS, **arrays)
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
    TABLE.write_text(json.dumps({"made_with": made_with, "cases": table}, separators=(",", ":")) + "\n")
    return 0


def write_decoded(weights: ExportedWeights, checkpoint: Path) -> None:
    """Put the decoded tensors in the place of those that they were made from."""
    plans = {plan.name: plan for plan in tensor_plans(weights.config)}
    file = checkpoint / "model.safetensors"
    stored = {name: values.copy() for name, values in load_file(file).items()}
    for name, values in weights.decoded():
        part = stored[plans[name].source][rows_of(plans[name])]
        part[...] = values.reshape(part.shape)
    save_file(stored, file, {"format": "pt"})


def tensor_plans(config: object) -> Sequence[TensorPlan]:
    """Where the checkpoint of a sample model has its tensors."""
    if isinstance(config, InklingConfig):
        return tuple(inkling_tensors(config, Spelling.B).tensors())
    assert isinstance(config, LlamaConfig)
    return tuple(llama_tensors(config).tensors())


def rows_of(plan: TensorPlan) -> tuple[slice, ...]:
    """The part of a checkpoint's tensor that is this one."""
    if (pick := plan.pick) is None:
        return (slice(None),)
    stop = pick.start + pick.step * (pick.count - 1) + 1
    return (*(slice(None) for _ in range(pick.axis)), slice(pick.start, stop, pick.step))


def choose_prompt(reference: Reference, name: str, length: int) -> tuple[list[int], Answer]:
    """The first drawn prompt whose answer holds no near tie and is no short loop."""
    vocab = valid_ids(name)
    for attempt in range(500):
        bits = np.random.PCG64([length, attempt]).random_raw(length)
        ids = [int(number) for number in bits % np.uint64(vocab)]
        answer = reference.answer(ids, NEW_TOKENS)
        clear = leads(length, answer).min() >= LEAST_LEAD and answer.router_gap >= LEAST_ROUTER_GAP
        if clear and len(set(answer.generated)) >= LEAST_DISTINCT:
            return ids, answer
    raise SystemExit(f"{name}: no prompt of {length} ids will do")


def leads(length: int, answer: Answer) -> np.ndarray:
    """Relative difference of the two highest logits at each generated token."""
    made = np.sort(answer.logits[length - 1 :], axis=-1)
    return (made[:, -1] - made[:, -2]) / np.abs(made).max(axis=-1)


if __name__ == "__main__":
    sys.exit(main())
