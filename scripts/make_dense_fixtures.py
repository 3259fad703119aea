"""Runs transformers on the sample models of the Llama family and writes what it answers to tests/fixtures.

Needs the `reference` extra. Every case is checked before it is written: no near tie, varied tokens, and every
kind of tensor shows in the logits.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import transformers  # noqa: E402
from fixtures.dense import HERE, MODELS, TABLE, Dense, make_dense  # noqa: E402
from fixtures.reference import file_digest, relative_error  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

LENGTHS = (1, 20, 150)
NEW_TOKENS = 16
LEAST_GAP = 5e-4
LEAST_EFFECT = 1e-3


def main() -> int:
    """Write all cases."""
    transformers.utils.logging.disable_progress_bar()
    table: dict[str, object] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, model in MODELS.items():
        with tempfile.TemporaryDirectory() as work:
            table[name], logits = write_case(model, Path(work))
        arrays |= {f"{name}.{number}": values for number, values in enumerate(logits)}
        print(name, table[name]["smallest_gap"], file=sys.stderr)
    np.savez_compressed(HERE / "dense.npz", **arrays)
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
    TABLE.write_text(json.dumps({"made_with": made_with, "cases": table}, separators=(",", ":")) + "\n")
    return 0


def write_case(model: Dense, work: Path) -> tuple[dict[str, object], list[np.ndarray]]:
    """The entry of one model in the table, and the logits to keep for each prompt."""
    checkpoint = make_dense(work, model)
    reference = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = [choose_prompt(reference, model, length) for length in LENGTHS]
    check_parts(reference, found[1])
    prompts, kept, gaps = [], [], []
    for ids, generated, logits in found:
        last = len(ids) + len(generated) - 2
        positions = sorted({0, len(ids) // 2, len(ids) - 1, last})
        prompts.append({"ids": ids, "generated": generated, "positions": positions})
        kept.append(logits[positions])
        gaps.append(gap(len(ids), logits))
    return {
        "seed": 0,
        "digest": file_digest(checkpoint / "model.safetensors"),
        "smallest_gap": min(gaps),
        "prompts": prompts,
    }, kept


def answer(reference: torch.nn.Module, ids: list[int]) -> tuple[list[int], np.ndarray]:
    """Greedy continuation, and logits of one pass over all but its last token; both must agree."""
    prompt = torch.tensor([ids])
    with torch.no_grad():
        sequence = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS
        )[0]
        logits = reference(sequence[None, :-1]).logits[0]
    generated = sequence[len(ids) :].tolist()
    if logits[len(ids) - 1 :].argmax(-1).tolist() != generated:
        raise SystemExit("generate and one pass over the same tokens disagree")
    return generated, logits.numpy()


def choose_prompt(
    reference: torch.nn.Module, model: Dense, length: int
) -> tuple[list[int], list[int], np.ndarray]:
    """The first drawn prompt whose answer holds no near tie and does not repeat itself."""
    vocab = model.read().vocab
    for attempt in range(500):
        bits = np.random.PCG64([length, attempt]).random_raw(length)
        ids = [int(number) for number in bits % np.uint64(vocab)]
        generated, logits = answer(reference, ids)
        if gap(length, logits) >= LEAST_GAP and len(set(generated)) > NEW_TOKENS // 2:
            return ids, generated, logits
    raise SystemExit(f"{model.name}: no prompt of {length} ids will do")


def gap(length: int, logits: np.ndarray) -> float:
    """Least relative difference of the two highest logits at a generated token."""
    made = np.sort(logits[length - 1 :], axis=-1)
    return float(((made[:, -1] - made[:, -2]) / np.abs(made).max(axis=-1)).min())


def check_parts(reference: torch.nn.Module, found: tuple[list[int], list[int], np.ndarray]) -> None:
    """Changing any parameter shows in the logits."""
    ids, generated, logits = found
    sequence = torch.tensor([[*ids, *generated[:-1]]])
    for name, value in reference.named_parameters():
        old = value.detach().clone()
        with torch.no_grad():
            value.copy_(torch.ones_like(old) if "norm" in name else torch.zeros_like(old))
            changed = reference(sequence).logits[0].numpy()
            value.copy_(old)
        effect = relative_error(changed, logits)
        if effect < LEAST_EFFECT:
            raise SystemExit(f"without {name} the logits change by {effect:.1e} only")


if __name__ == "__main__":
    sys.exit(main())
