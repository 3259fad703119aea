"""Turns a sample model's expert stacks into NVFP4, and says what they are worth from then on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Naming = Literal["scale2", "scale_2", "global_scale", "weight_global_scale"]

_GROUP = 16
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LARGEST_SCALE = 448.0


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """How a checkpoint's routed experts are quantised.

    Args:
        naming: the word for an expert's own factor. `scale2` is the published checkpoint's, as in
            `w13_weight.scale2`; `scale_2` that of `w13_weight_scale_2`; `global_scale` and
            `weight_global_scale` go with `w13_weight_packed` and `w13_weight.weight_packed`, and there the
            factor is the reciprocal.
        two_factors: gate and up of an expert have one each.
        plain_layers: layers that `hf_quant_config.json` excludes.
    """

    naming: Naming = "scale2"
    two_factors: bool = False
    plain_layers: tuple[int, ...] = ()

    @property
    def reciprocal(self) -> bool:
        """The factor divides."""
        return self.naming in ("global_scale", "weight_global_scale")


@dataclass(frozen=True, slots=True)
class Quantised:
    """A stack in NVFP4.

    Args:
        codes: uint8 [experts, rows, columns], 0 to 15.
        scales: float8 E4M3 [experts, rows, columns / 16].
        factors: float32 [experts] or [experts, 2].
        values: what it is worth, float32 [experts, rows, columns].
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.generic]
    factors: Array
    values: Array


def quantise(stack: Array, form: Nvfp4, *, paired: bool) -> Quantised:
    """Round a stack to the nearest numbers of the format.

    Args:
        stack: [experts, rows, columns]; columns a multiple of 16.
        form: which factors there are.
        paired: rows of gate and up take turns.
    """
    experts, rows, columns = stack.shape
    turns = 2 if paired and form.two_factors else 1
    # Rows that share a factor, side by side: [experts, rows / turns, turns, groups, 16].
    grouped = stack.astype(np.float64).reshape(experts, rows // turns, turns, columns // _GROUP, _GROUP)
    peak = np.abs(grouped).max(axis=(1, 3, 4))
    factor = np.where(peak > 0.0, peak / (_MAGNITUDES[-1] * _LARGEST_SCALE), 1.0).astype(np.float32)
    stored = (1.0 / factor.astype(np.float64)).astype(np.float32) if form.reciprocal else factor
    unit = 1.0 / stored.astype(np.float64) if form.reciprocal else stored.astype(np.float64)
    unit = unit[:, None, :, None, None]
    ideal = np.abs(grouped).max(axis=4, keepdims=True) / _MAGNITUDES[-1] / unit
    scales = np.minimum(ideal, _LARGEST_SCALE).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    step = scales.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        size = np.where(step > 0.0, np.abs(grouped) / (step * unit), 0.0)
    nearest = np.abs(size[..., None] - _MAGNITUDES).argmin(axis=-1)
    sign = np.signbit(grouped)
    exact = np.where(sign, -_MAGNITUDES[nearest], _MAGNITUDES[nearest]) * step
    divided = exact / stored[:, None, :, None, None].astype(np.float64)
    values = divided if form.reciprocal else exact * unit
    return Quantised(
        (nearest + 8 * sign).astype(np.uint8).reshape(stack.shape),
        scales.reshape(experts, rows, columns // _GROUP),
        stored if turns == 2 else stored[:, 0],
        values.astype(np.float32).reshape(stack.shape),
    )


def stored(base: str, quantised: Quantised, form: Nvfp4) -> dict[str, npt.NDArray[np.generic]]:
    """The tensors of a quantised stack as a checkpoint holds them, and those that its writer adds.

    Args:
        base: the name that the stack would have without quantisation, ending in `_weight`.
        quantised: the stack.
        form: names.
    """
    codes = quantised.codes
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    shape = np.array(codes.shape, np.int64)
    calibrated = np.ones(1, np.float32)
    short = base.removesuffix("_weight")
    names: dict[Naming, tuple[str, str, str, dict[str, npt.NDArray[np.generic]]]] = {
        "scale2": (
            base,
            ".scale",
            ".scale2",
            {f"{base}.input_amax": calibrated.astype(ml_dtypes.bfloat16), f"{base}.original_shape": shape},
        ),
        "scale_2": (base, "_scale", "_scale_2", {f"{short}_input_scale": calibrated}),
        "global_scale": (
            f"{base}_packed",
            "_scale",
            "_global_scale",
            {f"{short}_input_global_scale": calibrated},
        ),
        "weight_global_scale": (
            f"{base}.weight_packed",
            ".weight_scale",
            ".weight_global_scale",
            {f"{base}.input_global_scale": calibrated},
        ),
    }
    name, scale, factor, more = names[form.naming]
    return {name: packed, base + scale: quantised.scales, base + factor: quantised.factors, **more}


def quant_config(form: Nvfp4, plain_modules: list[str]) -> dict[str, object]:
    """The object for `hf_quant_config.json`."""
    return {
        "producer": {"name": "modelopt", "version": "0.39.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": _GROUP,
            "exclude_modules": plain_modules,
        },
    }
