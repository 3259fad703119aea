"""Runs transformers on sample models and writes what it answers to tests/fixtures.

Needs the `reference` extra. Every case is checked before it is written: no near tie among logits or
experts, varied tokens, and every kind of tensor shows in the logits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import transformers  # noqa: E402
from fixtures.live import Answer, Reference  # noqa: E402
from fixtures.reference import HERE, TABLE, file_digest, relative_error  # noqa: E402

from cascadia_p2p.models.inkling.names import Spelling  # noqa: E402
from cascadia_p2p.sample.checkpoint import Encoding, make_checkpoint  # noqa: E402
from cascadia_p2p.sample.recipe import Recipe, find_recipe  # noqa: E402

LEAST_GAP = 5e-4
LEAST_ROUTER_GAP = 2e-4
LEAST_EFFECT = 1e-3

# Parts of tensor names; zeroing any of them (or halving a scale) must show in the logits.
PARTS = (
    *(f"self_attn.{part}_proj" for part in "qkvro"),
    "rel_logits_proj",
    "k_sconv",
    "v_sconv",
    "attn_sconv",
    "mlp_sconv",
    "q_norm",
    "k_norm",
    "input_layernorm",
    "post_attention_layernorm",
    "embed_norm",
    "e_score_correction_bias",
    "global_scale",
    "mlp.gate.weight",
    "experts.gate_up_proj",
    "experts.down_proj",
    "shared_experts.up_proj",
    "mlp.gate_proj",
    "mlp.down_proj",
)


@dataclass(frozen=True)
class Plan:
    """A case to write: the sample model, the spellings to run, and an id that some answer must hold."""

    name: str
    preset: str
    spellings: tuple[Spelling, ...] = (Spelling.B,)
    encoding: Encoding = "F32"
    new_tokens: int = 24
    must_hold: int | None = None
    stops: bool = False


PLANS = (
    Plan("tiny12", "tiny12", (Spelling.B, Spelling.A)),
    Plan("tiny12-log", "tiny12-log"),
    Plan("tiny12-heads", "tiny12-heads", (Spelling.B, Spelling.A)),
    Plan("tiny12-noeos", "tiny12-noeos", must_hold=2),
    Plan("tiny12-eos", "tiny12", stops=True),
    Plan("tiny12-bf16", "tiny12", (Spelling.A, Spelling.B), "BF16"),
    Plan("tiny66", "tiny66", (Spelling.B, Spelling.A), new_tokens=16),
)


def main() -> int:
    """Write the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(p.name for p in PLANS)}")
    wanted = parser.parse_args().cases or [plan.name for plan in PLANS]
    table = json.loads(TABLE.read_text(encoding="utf-8"))["cases"] if TABLE.exists() else {}
    for plan in PLANS:
        if plan.name in wanted:
            with tempfile.TemporaryDirectory() as work:
                table[plan.name] = write_case(plan, Path(work))
            print(f"{plan.name}: gap {table[plan.name]['smallest_gap']:.1e}", file=sys.stderr)
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
    ordered = {plan.name: table[plan.name] for plan in PLANS if plan.name in table}
    TABLE.write_text(json.dumps({"made_with": made_with, "cases": ordered}, separators=(",", ":")) + "\n")
    return 0


def write_case(plan: Plan, work: Path, seed: int = 0) -> dict[str, object]:
    """Run the reference on one case, check it, write its logits and return its entry in the table."""
    recipe = find_recipe(plan.preset)
    references, digests = {}, {}
    if plan.stops:
        recipe = replace(recipe, eos=end_ids(recipe, seed, work / "first"))
    for spelling in plan.spellings:
        where = make_checkpoint(work / spelling, recipe, seed=seed, spelling=spelling, encoding=plan.encoding)
        digests[str(spelling)] = file_digest(where / "model.safetensors")
        references[spelling] = Reference(where)
    first = references[plan.spellings[0]]
    prompts = [choose_prompt(first, recipe, plan, length) for length in lengths(recipe)]
    check_together(plan, recipe, [answer for _, answer in prompts])
    for other in references.values():
        for ids, answer in prompts:
            again = other.answer(ids, plan.new_tokens)
            if again.generated != answer.generated or relative_error(again.logits, answer.logits) > 1e-5:
                raise SystemExit(f"{plan.name}: the spellings give different answers")
    check_parts(first, plan, prompts[1])
    kept = [positions(len(ids), len(answer.generated)) for ids, answer in prompts]
    arrays = {f"logits{n}": prompts[n][1].logits[kept[n]] for n in range(len(prompts))}
    np.savez_compressed(HERE / f"{plan.name}.npz", **arrays)
    return {
        "preset": plan.preset,
        **({"eos": list(recipe.eos)} if plan.stops else {}),
        "seed": seed,
        "encoding": plan.encoding,
        "new_tokens": plan.new_tokens,
        "digests": digests,
        "smallest_gap": min(gap(len(ids), answer) for ids, answer in prompts),
        "smallest_router_gap": min(answer.router_gap for _, answer in prompts),
        "prompts": [
            {
                "ids": ids,
                "generated": answer.generated,
                "stopped": len(answer.generated) < plan.new_tokens or answer.generated[-1] in recipe.eos,
                "positions": kept[n],
            }
            for n, (ids, answer) in enumerate(prompts)
        ],
    }


def lengths(recipe: Recipe) -> tuple[int, ...]:
    """Prompt lengths: one row, a few, just past the window, far past it."""
    return (1, 20, recipe.window + 1, 300)


def draw_prompt(recipe: Recipe, length: int, attempt: int) -> list[int]:
    """Valid ids, the same for every version of numpy."""
    bits = np.random.PCG64([length, attempt]).random_raw(length)
    return [int(number) for number in bits % np.uint64(recipe.vocab_valid)]


def choose_prompt(reference: Reference, recipe: Recipe, plan: Plan, length: int) -> tuple[list[int], Answer]:
    """The first drawn prompt whose answer holds no near tie, and what the plan asks for."""
    for attempt in range(200):
        ids = draw_prompt(recipe, length, attempt)
        answer = reference.answer(ids, plan.new_tokens)
        good = gap(length, answer) >= LEAST_GAP and answer.router_gap >= LEAST_ROUTER_GAP
        if good and length == 20 and plan.must_hold is not None:
            good = plan.must_hold in answer.generated[:-4]
        if good and (plan.stops or len(set(answer.generated)) > plan.new_tokens // 2):
            return ids, answer
    raise SystemExit(f"{plan.name}: no prompt of {length} ids will do")


def end_ids(recipe: Recipe, seed: int, where: Path) -> tuple[int, ...]:
    """Two ids, the second of which first appears some way into the answer to the prompt of 20."""
    reference = Reference(make_checkpoint(where, recipe, seed=seed))
    plan = Plan(recipe.name, recipe.name)
    _, answer = choose_prompt(reference, recipe, plan, 20)
    late = [t for n, t in enumerate(answer.generated) if n >= 6 and t not in answer.generated[:n]]
    return (recipe.eos[0], late[0])


def gap(length: int, answer: Answer) -> float:
    """Least relative difference of the two highest logits at a generated token."""
    made = np.sort(answer.logits[length - 1 :], axis=-1)
    return float(((made[:, -1] - made[:, -2]) / np.abs(made).max(axis=-1)).min())


def positions(length: int, generated: int) -> list[int]:
    """A few positions of the prompt, its last, and a few of the answer."""
    last = length + generated - 2
    return sorted({0, length // 3, length // 2, length - 1, min(length, last), min(length + 7, last), last})


def check_together(plan: Plan, recipe: Recipe, answers: list[Answer]) -> None:
    """The answers as a whole: ended by an end id where they should, and not otherwise."""
    ended = [answer.generated[-1] in recipe.eos for answer in answers]
    if any(ended) != plan.stops:
        raise SystemExit(f"{plan.name}: end-of-sequence ids ended {sum(ended)} of {len(ended)} answers")
    short = [len(answer.generated) for answer in answers if len(answer.generated) < plan.new_tokens]
    if bool(short) != plan.stops:
        raise SystemExit(f"{plan.name}: {len(short)} answers ended early")


def check_parts(reference: Reference, plan: Plan, prompt: tuple[list[int], Answer]) -> None:
    """Every kind of tensor shows in the logits."""
    ids, answer = prompt
    sequence = torch.tensor([[*ids, *answer.generated[:-1]]])
    for part in PARTS:
        scale = part.endswith("norm") or part in ("q_norm", "k_norm", "global_scale")
        undo = reference.change(part, torch.ones_like if scale else torch.zeros_like)
        with torch.no_grad():
            changed = reference.model(sequence).logits[0].numpy()
        undo()
        effect = relative_error(changed, answer.logits)
        if effect < LEAST_EFFECT:
            raise SystemExit(f"{plan.name}: without {part} the logits change by {effect:.1e} only")


if __name__ == "__main__":
    sys.exit(main())
