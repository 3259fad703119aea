"""NVFP4 checkpoints: decoded exactly, in every spelling, and every way to misread them is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from fixtures.exports import exact_export as export
from hypothesis import given, settings
from hypothesis import strategies as st
from test_export import all_tensors

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.inkling import names as inkling_names
from cascadia_p2p.models.layout import Pick
from cascadia_p2p.sample.checkpoint import make_checkpoint, write_safetensors
from cascadia_p2p.sample.nvfp4 import Naming, Nvfp4
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.shards import nvfp4
from cascadia_p2p.shards.safetensors import Checkpoint
from cascadia_p2p.shards.source import SafetensorsSource

SMALL = Recipe(
    "quantised", layers=4, hidden=32, experts=3, chosen=2, expert_width=16, dense_width=24, dense_layers=1
)
NAMINGS: tuple[Naming, ...] = ("scale2", "scale_2", "global_scale", "weight_global_scale")
E2M1 = [0, 1, 2, 3, 4, 6, 8, 12]
"""Halves: the eight magnitudes of the format times two."""


def worth(code: int, scale: float, factor: float, *, reciprocal: bool) -> np.float32:
    """A number of the format by the definition, in whole fractions; numpy rounds to the nearest."""
    exact = Fraction(E2M1[code & 7], 2) * Fraction(scale)
    exact = exact / Fraction(factor) if reciprocal else exact * Fraction(factor)
    size = nearest(exact)
    return np.float32(-size if code & 8 else size)


def nearest(exact: Fraction) -> np.float32:
    """The float32 nearest to a fraction that is not negative; of two, the even one."""
    middle = np.float32(float(exact))
    around = [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))]
    return min(
        (one for one in around if np.isfinite(one)),
        key=lambda one: (abs(Fraction(float(one)) - exact), int(one.view(np.uint32)) & 1),
    )


scales = st.integers(0, 0x7E).map(lambda code: float(np.uint8(code).view(ml_dtypes.float8_e4m3fn)))
factors = st.floats(2.0**-60, 2.0**60, width=32)


@given(st.binary(min_size=8, max_size=8), scales, factors, st.booleans())
@settings(max_examples=200)
def test_every_number_is_the_nearest_float(
    packed: bytes, scale: float, factor: float, reciprocal: bool
) -> None:
    found = nvfp4.decode(
        np.frombuffer(packed, np.uint8),
        np.array([scale], np.float32),
        np.array([factor], np.float32),
        reciprocal=reciprocal,
    )
    # The low nibble comes first.
    codes = [nibble for byte in packed for nibble in (byte & 15, byte >> 4)]
    expected = [worth(code, scale, factor, reciprocal=reciprocal) for code in codes]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), np.array(expected, np.float32).view(np.uint32))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Nvfp4], dict[str, np.ndarray]]:
    """What is exported from spelling B with the weights that a form's are worth."""
    made: dict[tuple[bool, bool, tuple[int, ...]], dict[str, np.ndarray]] = {}

    def of(form: Nvfp4) -> dict[str, np.ndarray]:
        key = (form.reciprocal, form.two_factors, form.plain_layers)
        if key not in made:
            path = tmp_path_factory.mktemp("plain")
            make_checkpoint(path / "in", SMALL, spelling="B", encoding="BF16", nvfp4=form)
            export(path / "in", path / "out", shards=1)
            made[key] = {name: np.array(values) for name, values in all_tensors(path / "out").items()}
        return made[key]

    return of


def differing(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> set[str]:
    """Names of the tensors that are not the same to the bit."""
    assert found.keys() == expected.keys()
    return {name for name, values in expected.items() if values.tobytes() != found[name].tobytes()}


@pytest.mark.parametrize("two", [False, True], ids=["one factor", "two factors"])
@pytest.mark.parametrize("naming", NAMINGS)
def test_every_spelling_is_the_same_model_as_its_decoded_weights(
    tmp_path: Path, plain: Callable[[Nvfp4], dict[str, np.ndarray]], naming: Naming, two: bool
) -> None:
    form = Nvfp4(naming, two, plain_layers=(2,))
    source = make_checkpoint(tmp_path / "in", SMALL, spelling="A", encoding="BF16", files=5, nvfp4=form)
    with Checkpoint(source) as checkpoint:
        kinds = {
            checkpoint.tensor(name).dtype
            for name in checkpoint.names
            if ".layers.3.mlp.experts." in name and checkpoint.tensor(name).count > SMALL.experts * 2
        }
        assert kinds == {"U8", "F8_E4M3"}
        assert checkpoint.tensor("model.llm.layers.2.mlp.experts.w13_weight").dtype == "BF16"
    notes: list[str] = []
    export(source, tmp_path / "out", shards=1, note=notes.append)
    assert differing(all_tensors(tmp_path / "out"), plain(form)) == set()
    assert len(notes) == 1
    assert "multi-token prediction (20 tensors)" in notes[0]
    assert "notes of quantisation" in notes[0]


def test_the_layers_of_inkling_small_go_the_same_way(tmp_path: Path) -> None:
    form = Nvfp4(plain_layers=(2,))
    for spelling, files in (("A", 30), ("B", 1)):
        source = make_checkpoint(
            tmp_path / spelling, "tiny42", spelling=spelling, encoding="BF16", files=files, nvfp4=form
        )
        assert export(source, tmp_path / f"out{spelling}", shards=7).split == [6] * 7
    found = all_tensors(tmp_path / "outA")
    assert differing(found, all_tensors(tmp_path / "outB")) == set()
    assert {"layers.1.gate", "layers.41.experts.down"} <= found.keys()
    assert "layers.2.gate" not in found


# --- every misreading must show ----------------------------------------------------------------------------


def swap_nibbles(patch: pytest.MonkeyPatch) -> None:
    pairs = nvfp4._PAIRS.view(np.float32).reshape(256, 2)
    patch.setattr(nvfp4, "_PAIRS", np.ascontiguousarray(pairs[:, ::-1]).view(np.uint64)[:, 0])


def drop_signs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nvfp4, "_PAIRS", np.abs(nvfp4._PAIRS.view(np.float32)).view(np.uint64))


def turn_factors(patch: pytest.MonkeyPatch) -> None:
    turned = tuple(replace(spelling, reciprocal=not spelling.reciprocal) for spelling in nvfp4._SPELLINGS)
    patch.setattr(nvfp4, "_SPELLINGS", turned)


def swap_gate_and_up(patch: pytest.MonkeyPatch) -> None:
    right = inkling_names._Naming._gate_up

    def wrong(*args: object) -> tuple[object, ...]:
        gate, up = right(*args)  # type: ignore[arg-type]
        return replace(gate, pick=up.pick), replace(up, pick=gate.pick)

    patch.setattr(inkling_names._Naming, "_gate_up", wrong)


def halve_gate_and_up(patch: pytest.MonkeyPatch) -> None:
    """Rows of gate first, then those of up, as in spelling B."""
    right = inkling_names._Naming._gate_up

    def wrong(*args: object) -> tuple[object, ...]:
        gate, up = right(*args)  # type: ignore[arg-type]
        assert gate.pick is not None
        axis, count = gate.pick.axis, gate.pick.count
        return (
            replace(gate, pick=Pick(axis, 0, 1, count)),
            replace(up, pick=Pick(axis, count, 1, count)),
        )

    patch.setattr(inkling_names._Naming, "_gate_up", wrong)


def change_factor_of(patch: pytest.MonkeyPatch, by: Callable[[nvfp4.Layout, np.ndarray], np.ndarray]) -> None:
    def wrong(layout: nvfp4.Layout, first: int, count: int) -> np.ndarray:
        row = np.arange(first, first + count) // layout.groups
        return row // layout.rows * layout.factors + (by(layout, row) if layout.factors == 2 else 0)

    patch.setattr(nvfp4.Layout, "factor_of", wrong)


def swap_factors(patch: pytest.MonkeyPatch) -> None:
    change_factor_of(patch, lambda _, row: 1 - row % 2)


def halve_factors(patch: pytest.MonkeyPatch) -> None:
    """The first factor for the first half of the rows, as where gate rows come first."""
    change_factor_of(patch, lambda layout, row: row % layout.rows // (layout.rows // 2))


def first_factor_only(patch: pytest.MonkeyPatch) -> None:
    change_factor_of(patch, lambda _, row: 0 * row)


def shift_scales(patch: pytest.MonkeyPatch) -> None:
    right = nvfp4.decode

    def wrong(packed: np.ndarray, scale: np.ndarray, factor: np.ndarray, *, reciprocal: bool) -> np.ndarray:
        return right(packed, np.roll(scale, 1), factor, reciprocal=reciprocal)

    patch.setattr(nvfp4, "decode", wrong)


EXPERTS = {f"layers.{layer}.experts.{part}" for layer in (1, 2, 3) for part in ("gate", "up", "down")}
BOTH = {name for name in EXPERTS if not name.endswith("down")}
ALL_BOTH = BOTH | {f"layers.{layer}.shared.{part}" for layer in (1, 2, 3) for part in ("gate", "up")}
ALL_BOTH |= {"layers.0.gate", "layers.0.up"}


@pytest.mark.parametrize("naming", ["scale2", "global_scale"])
@pytest.mark.parametrize(
    ("misread", "two", "wrong"),
    [
        (swap_nibbles, False, EXPERTS),
        (drop_signs, False, EXPERTS),
        (turn_factors, False, EXPERTS),
        (turn_factors, True, EXPERTS),
        (shift_scales, False, EXPERTS),
        (swap_gate_and_up, False, ALL_BOTH),
        (halve_gate_and_up, False, ALL_BOTH),
        (swap_factors, True, BOTH),
        (halve_factors, True, BOTH),
        (first_factor_only, True, {name for name in BOTH if name.endswith("up")}),
    ],
)
def test_a_misreading_shows_in_every_tensor_that_it_spoils(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plain: Callable[[Nvfp4], dict[str, np.ndarray]],
    misread: Callable[[pytest.MonkeyPatch], None],
    two: bool,
    wrong: set[str],
    naming: Naming,
) -> None:
    form = Nvfp4(naming, two)
    expected = plain(form)
    source = make_checkpoint(tmp_path / "in", SMALL, spelling="A", encoding="BF16", nvfp4=form)
    misread(monkeypatch)
    export(source, tmp_path / "out", shards=1)
    assert differing(all_tensors(tmp_path / "out"), expected) == wrong


# --- slices ------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_slice_is_that_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "sliced"
    if not path.exists():
        make_checkpoint(path, SMALL, spelling="A", nvfp4=Nvfp4("global_scale", two_factors=True))
    with SafetensorsSource(path) as source:
        name = f"model.llm.layers.1.mlp.experts.{data.draw(st.sampled_from(['w13_weight', 'w2_weight']))}"
        count = int(np.prod(source.shape(name)))
        start = data.draw(st.integers(0, count - 1))
        length = data.draw(st.integers(1, count - start))
        whole = source.read(name, 0, count)
        part = source.read(name, start, length)
        assert whole.shape == (count,)
        assert part.tobytes() == whole[start : start + length].tobytes()


# --- what is refused ---------------------------------------------------------------------------------------

W13 = "model.llm.layers.1.mlp.experts.w13_weight"
W2 = "model.llm.layers.1.mlp.experts.w2_weight"


def spoiled(path: Path, form: Nvfp4, by: Callable[[dict[str, np.ndarray]], object], files: int = 1) -> Path:
    """A quantised checkpoint with changed tensors."""
    make_checkpoint(path, SMALL, spelling="A", nvfp4=form, files=files)
    stored: dict[str, np.ndarray] = {}
    kinds = {
        "U8": np.uint8,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F32": np.float32,
        "BF16": ml_dtypes.bfloat16,
        "I64": np.int64,
    }
    with Checkpoint(path) as checkpoint:
        for name in checkpoint.names:
            tensor = checkpoint.tensor(name)
            raw = np.frombuffer(checkpoint.read_bytes(name, 0, tensor.nbytes), np.uint8).copy()
            stored[name] = raw.view(kinds[tensor.dtype]).reshape(tensor.shape)
    by(stored)
    write_safetensors(path / "model.safetensors", stored)
    return path


def put(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray]], None]:
    def by(stored: dict[str, np.ndarray]) -> None:
        stored[name] = value(stored[name])

    return by


def set_first(name: str, value: float) -> Callable[[dict[str, np.ndarray]], None]:
    def by(stored: dict[str, np.ndarray]) -> None:
        stored[name].reshape(-1)[0] = value

    return by


@pytest.mark.parametrize(
    ("naming", "two", "by", "sentence"),
    [
        (
            "scale2",
            False,
            lambda t: t.pop(f"{W13}.scale"),
            r"holds .*w13_weight\.scale2, a part of an NVFP4 weight, but not .*w13_weight\.scale:",
        ),
        (
            "global_scale",
            False,
            lambda t: t.pop(f"{W2}_global_scale"),
            r"holds .*w2_weight_packed, a part .*, but not .*w2_weight_global_scale:",
        ),
        (
            "global_scale",
            False,
            lambda t: t.update({W2: np.zeros((3, 32, 16), np.float32)}),
            r"w2_weight in two forms, one of them .*w2_weight_packed: it is not clear which",
        ),
        (
            "scale2",
            False,
            lambda t: t.update({f"{W2}_scale": t[f"{W2}.scale"], f"{W2}_scale_2": t[f"{W2}.scale2"]}),
            r"w2_weight in two forms",
        ),
        (
            "scale2",
            False,
            lambda t: t.pop(f"{W13}.scale2"),
            r"keeps .*w13_weight as U8: expected one of F32, BF16, F16",
        ),
        (
            "scale2",
            False,
            put(f"{W13}.scale", lambda v: v.view(np.uint8)),
            r"keeps .*w13_weight\.scale as U8: expected F8_E4M3",
        ),
        (
            "scale2",
            False,
            put(f"{W13}.scale", lambda v: v[..., :1].copy()),
            r"w13_weight\.scale has shape \[3, 32, 1\]: expected \[3, 32, 2\], one scale for every 16",
        ),
        (
            "scale2",
            False,
            put(W13, lambda v: v[..., :5].copy()),
            r"w13_weight has shape \[3, 32, 5\]: expected rows of NVFP4 numbers, two a byte",
        ),
        (
            "scale2",
            False,
            put(f"{W13}.scale2", lambda v: v[:2].copy()),
            r"w13_weight\.scale2 has shape \[2\]: expected \[3\] or \[3, 1\] or \[3, 2\]$",
        ),
        (
            "scale_2",
            True,
            put(f"{W2}_scale_2", lambda v: np.stack([v, v], axis=1)),
            r"w2_weight_scale_2 has shape \[3, 2\]: expected \[3\] or \[3, 1\]$",
        ),
        (
            "global_scale",
            True,
            set_first(f"{W13}_global_scale", 0.0),
            r"w13_weight_global_scale holds 0\.0 at place 0, which is no scale of weights",
        ),
        (
            "scale2",
            False,
            set_first(f"{W13}.scale2", np.inf),
            r"w13_weight\.scale2 holds inf at place 0, which is no scale",
        ),
        (
            "scale2",
            False,
            set_first(f"{W13}.scale2", -1.0),
            r"w13_weight\.scale2 holds -1\.0 at place 0, which is no scale",
        ),
        (
            "scale2",
            False,
            set_first(f"{W2}.scale", np.nan),
            r"model\.safetensors holds what is no number in .*w2_weight\.scale: download it again",
        ),
        (
            "scale2",
            False,
            lambda t: t.update(
                {
                    W2: t[W2][:2].copy(),
                    f"{W2}.scale": t[f"{W2}.scale"][:2].copy(),
                    f"{W2}.scale2": t[f"{W2}.scale2"][:2].copy(),
                }
            ),
            r"w2_weight of shape \[2, 32, 16\]: by config\.json it should be \[3, 32, 16\]",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_named(
    tmp_path: Path,
    naming: Naming,
    two: bool,
    by: Callable[[dict[str, np.ndarray]], object],
    sentence: str,
) -> None:
    source = spoiled(tmp_path / "in", Nvfp4(naming, two), by)
    with pytest.raises(CheckpointError, match=sentence):
        export(source, tmp_path / "out", shards=1)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_factor_may_have_an_axis_of_its_own(
    tmp_path: Path, plain: Callable[[Nvfp4], dict[str, np.ndarray]]
) -> None:
    form = Nvfp4("scale_2")
    source = spoiled(tmp_path / "in", form, put(f"{W13}_scale_2", lambda v: v[:, None].copy()))
    export(source, tmp_path / "out", shards=1)
    assert not differing(all_tensors(tmp_path / "out"), plain(form)) & EXPERTS


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"NVFP4"', '"FP8"', r"has quant_algo = 'FP8': only 'NVFP4' can be read"),
        ('"group_size": 16', '"group_size": 32', r"has group_size = 32: only 16 can be read"),
        ('"quantization"', '"other"', r"has no 'quantization' object"),
        ('"exclude_modules": [', '"exclude_modules": [3, ', r"exclude_modules that are no list of names"),
        (
            '"model.llm.embed"',
            '"model.llm.layers.3.mlp"',
            r"excludes model\.llm\.layers\.3\.mlp from quantisation, but the checkpoint holds .*layers\.3",
        ),
        (
            '"model.llm.embed"',
            '"*layers.3.mlp.experts*"',
            r"excludes \*layers\.3\.mlp\.experts\* from quantisation, but the checkpoint holds .*layers\.3",
        ),
    ],
)
def test_a_quantisation_that_contradicts_the_tensors_is_refused(
    tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    source = make_checkpoint(tmp_path / "in", SMALL, spelling="A", nvfp4=Nvfp4())
    path = source / "hf_quant_config.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(CheckpointError, match=sentence):
        export(source, tmp_path / "out", shards=1)


def test_an_excluded_module_of_a_similar_name_is_not_taken_for_another(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "in", SMALL, spelling="A", nvfp4=Nvfp4())
    path = source / "hf_quant_config.json"
    path.write_text(path.read_text().replace('"model.llm.embed"', '"model.llm.layers.3.mlp.exp"', 1))
    export(source, tmp_path / "out", shards=1)
