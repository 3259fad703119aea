"""Writes a sample model as a checkpoint directory, as its publisher or transformers would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cascadia_p2p.models.inkling.names import Spelling, plan_tensors
from cascadia_p2p.models.layout import Pick, TensorPlan
from cascadia_p2p.sample.nvfp4 import Nvfp4, quant_config, quantise
from cascadia_p2p.sample.nvfp4 import stored as stored_nvfp4
from cascadia_p2p.sample.recipe import AUDIO, VISION, Recipe, find_recipe
from cascadia_p2p.sample.tokenizer import tokenizer_json
from cascadia_p2p.sample.weights import tensors

Encoding = Literal["F32", "BF16", "F16"]

_TYPES: dict[Encoding, npt.DTypeLike] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
_WORDS = {
    **{np.dtype(kind): word for word, kind in _TYPES.items()},
    np.dtype(np.uint8): "U8",
    np.dtype(np.int64): "I64",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
}
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
    nvfp4: Nvfp4 | None = None,
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
        nvfp4: rounds the routed experts to NVFP4. Spelling A keeps them so; spelling B, which knows no such
            form, keeps the same numbers as float32.

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
    stored = _spelled(recipe, seed, spelling, encoding, nvfp4)
    if spelling is Spelling.A:
        stored |= _beside_text(recipe, encoding)
        if nvfp4 is not None:
            _write_json(out / "hf_quant_config.json", quant_config(nvfp4, _plain_modules(recipe, nvfp4)))
    if files == 1:
        write_safetensors(out / "model.safetensors", stored)
    else:
        _write_indexed(out, stored, files)
    return out


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Write one safetensors file; float32, float16, bfloat16, float8 E4M3, uint8 and int64 only.

    Layout: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": _WORDS[values.dtype],
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
    recipe: Recipe, seed: int, spelling: Spelling, encoding: Encoding, nvfp4: Nvfp4 | None
) -> dict[str, npt.NDArray[np.generic]]:
    """The model's tensors under the names and in the shapes of the spelling."""
    plans = {plan.name: plan for plan in plan_tensors(recipe.config(), spelling).tensors()}
    stored: dict[str, npt.NDArray[np.generic]] = {}
    quantised = {
        f"layers.{layer}.experts.{part}"
        for layer in _quantised_layers(recipe, nvfp4)
        for part in ("gate", "up", "down")
    }
    for name, values in tensors(recipe, seed):
        plan = plans[name]
        exact = name.endswith(_ALWAYS_F32) or name in quantised
        kind = np.dtype(np.float32 if exact else _TYPES[encoding])
        whole = stored.setdefault(plan.source, np.zeros(plan.source_shapes[0], kind))
        _place(whole, plan, values)
    if nvfp4 is not None:
        for name in sorted(quantised):
            if not name.endswith(".up"):
                stored = _rounded(stored, plans[name].source, spelling, nvfp4, paired=name.endswith(".gate"))
    return stored


def _rounded(
    tensors: dict[str, npt.NDArray[np.generic]], name: str, spelling: Spelling, form: Nvfp4, *, paired: bool
) -> dict[str, npt.NDArray[np.generic]]:
    """The same tensors with one stack in NVFP4 or, in spelling B, with the numbers that it is then worth."""
    stack = np.asarray(tensors[name], np.float32)
    half = stack.shape[1] // 2
    turned = paired and spelling is Spelling.B
    if turned:
        # As the publisher interleaves it: the factors are those of a row of gate and the row of up below it.
        stack = np.stack([stack[:, :half], stack[:, half:]], axis=2).reshape(stack.shape)
    quantised = quantise(stack, form, paired=paired)
    if spelling is Spelling.A:
        parts = stored_nvfp4(name, quantised, form)
    else:
        values = quantised.values
        parts = {name: np.concatenate([values[:, 0::2], values[:, 1::2]], axis=1) if turned else values}
    # In the place of the stack, so that its parts are scattered like everything else.
    result: dict[str, npt.NDArray[np.generic]] = {}
    for key, value in tensors.items():
        result |= parts if key == name else {key: value}
    return result


def _quantised_layers(recipe: Recipe, form: Nvfp4 | None) -> list[int]:
    sparse = recipe.config().sparse
    return [
        layer for layer in range(recipe.layers) if form and sparse[layer] and layer not in form.plain_layers
    ]


def _plain_modules(recipe: Recipe, form: Nvfp4) -> list[str]:
    """Modules of the publisher's names that are not quantised, in the form in which such lists come."""
    quantised = _quantised_layers(recipe, form)
    modules = ["model.llm.embed", "model.llm.unembed", "model.visual.layers.linear_0", "model.audio.encoder"]
    for layer in range(recipe.layers):
        at = f"model.llm.layers.{layer}"
        modules += [f"{at}.attn.wq_du", f"{at}.attn.wo_ud", f"{at}.mlp_norm", f"{at}.mlp.shared_experts"]
        if layer not in quantised:
            modules.append(f"{at}.mlp.experts")
    return modules


def _beside_text(recipe: Recipe, encoding: Encoding) -> dict[str, npt.NDArray[np.generic]]:
    """What the published checkpoint holds beside the text model, under its names and in its shapes."""
    hidden = recipe.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "visual.layers.linear_0.weight": (hidden, VISION["patch_size"] ** 2 * 2 * 3),
        "visual.final_norm.weight": (hidden,),
        "audio.encoder.weight": (AUDIO["n_mel_bins"] * AUDIO["mel_vocab_size"], hidden),
        "audio.final_norm.weight": (hidden,),
        "mtp.layers.0.hidden_norm.weight": (hidden,),
        "mtp.layers.0.embed_norm.weight": (hidden,),
        "mtp.layers.0.input_proj.weight": (hidden, 2 * hidden),
    }
    # A drafting module is a decoder layer of its own, global and dense.
    draft = replace(recipe, layers=6, dense_layers=6).config()
    for plan in plan_tensors(draft, Spelling.A).layers[5]:
        name = plan.source.removeprefix("model.llm.layers.5.")
        shapes[f"mtp.layers.0.transformer_block.{name}"] = plan.source_shapes[0]
    return {f"model.{name}": np.ones(shape, _TYPES[encoding]) for name, shape in shapes.items()}


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
