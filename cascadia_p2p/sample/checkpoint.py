"""Writes a sample model as a checkpoint directory, as its publisher or transformers would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cascadia_p2p.models.inkling.names import Spelling, plan_tensors
from cascadia_p2p.models.layout import Pick, TensorPlan
from cascadia_p2p.sample.recipe import Recipe, find_recipe
from cascadia_p2p.sample.tokenizer import tokenizer_json
from cascadia_p2p.sample.weights import tensors

Encoding = Literal["F32", "BF16", "F16"]

_TYPES: dict[Encoding, npt.DTypeLike] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
# Kept in float32 by every writer of such checkpoints.
_ALWAYS_F32 = ("router_bias", "global_scale")


def make_checkpoint(
    out: Path,
    recipe: Recipe | str,
    *,
    seed: int = 0,
    spelling: Spelling | str = Spelling.B,
    encoding: Encoding = "F32",
    files: int = 1,
    tokenizer: bool = True,
) -> Path:
    """Write the sample model into a directory and return that directory.

    Args:
        out: made if absent; files of the same names are overwritten.
        recipe: sizes, or the name of a preset.
        seed: other seeds give other numbers of the same sizes.
        spelling: the publisher's names (A) or those of transformers (B).
        encoding: of the matrices; the few tensors that are always float32 stay so.
        files: 1 for a single safetensors file, more for an index and tensors of each layer spread over all.
        tokenizer: whether to write a `tokenizer.json`.

    Raises:
        UsageError: there is no preset of that name.
    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    spelling = Spelling(spelling)
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", recipe.config_json(spelling))
    _write_json(out / "generation_config.json", recipe.generation_json())
    if tokenizer:
        _write_json(out / "tokenizer.json", tokenizer_json(recipe.vocab_valid))
    stored = _spelled(recipe, seed, spelling, encoding)
    if files == 1:
        write_safetensors(out / "model.safetensors", stored)
    else:
        _write_indexed(out, stored, files)
    return out


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Write one safetensors file; float32, float16, bfloat16 only.

    Layout: https://github.com/huggingface/safetensors#format
    """
    names = {np.dtype(kind): name for name, kind in _TYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": names[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [offset, offset + values.nbytes],
        }
        offset += values.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for values in tensors.values():
            file.write(np.ascontiguousarray(values).view(np.uint8).data)


def _write_indexed(out: Path, stored: Mapping[str, npt.NDArray[np.generic]], files: int) -> None:
    names = [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    # Neighbours go to different files, as the published checkpoint scatters a layer.
    home = {tensor: names[place % files] for place, tensor in enumerate(stored)}
    for name in names:
        write_safetensors(out / name, {tensor: stored[tensor] for tensor in stored if home[tensor] == name})
    total = sum(values.nbytes for values in stored.values())
    _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": home})


def _spelled(
    recipe: Recipe, seed: int, spelling: Spelling, encoding: Encoding
) -> dict[str, npt.NDArray[np.generic]]:
    """The model's tensors under the names and in the shapes of the spelling."""
    plans = {plan.name: plan for plan in plan_tensors(recipe.config(), spelling).tensors()}
    stored: dict[str, npt.NDArray[np.generic]] = {}
    for name, values in tensors(recipe, seed):
        plan = plans[name]
        kind = np.dtype(np.float32 if name.endswith(_ALWAYS_F32) else _TYPES[encoding])
        whole = stored.setdefault(plan.source, np.zeros(plan.source_shapes[0], kind))
        _place(whole, plan, values)
    if spelling is Spelling.A:
        for part in ("mtp.layers.0.hidden_norm", "visual.final_norm", "audio.final_norm"):
            stored[f"model.{part}.weight"] = np.ones(recipe.hidden, _TYPES[encoding])
    return stored


def _place(whole: npt.NDArray[np.generic], plan: TensorPlan, values: npt.NDArray[np.float32]) -> None:
    pick = plan.pick or Pick(0, 0, 1, whole.shape[0])
    if plan.name == "head.weight":
        pick = Pick(0, 0, 1, whole.shape[0])
    stop = pick.start + pick.step * (pick.count - 1) + 1
    where = (*(slice(None) for _ in range(pick.axis)), slice(pick.start, stop, pick.step))
    part = whole[where]
    part[...] = values.reshape(part.shape).astype(whole.dtype)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
