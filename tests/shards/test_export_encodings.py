"""Exports in four and eight bits: every source goes the same way, and quantised files keep what they hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from fixtures.dense import Dense, dense_tensors
from fixtures.exports import exact_export
from fixtures.gguf_files import Kind, write_gguf

from cascadia_p2p.errors import CheckpointError, UsageError
from cascadia_p2p.matrices.encoding import Encoding, StoredMatrix, stored_bytes
from cascadia_p2p.matrices.packing import dense
from cascadia_p2p.matrices.quantise import encode, prepare
from cascadia_p2p.sample.checkpoint import make_checkpoint, write_safetensors
from cascadia_p2p.sample.nvfp4 import Nvfp4
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.sample.weights import tensors
from cascadia_p2p.shards import copying
from cascadia_p2p.shards.attenuation import parse_attenuation
from cascadia_p2p.shards.encodings import EXACT, Asked, Encodings, Kept
from cascadia_p2p.shards.export import export
from cascadia_p2p.shards.manifest import Manifest
from cascadia_p2p.shards.reader import ShardReader
from cascadia_p2p.shards.safetensors import Checkpoint

UNEVEN = Recipe(
    "uneven",
    layers=3,
    dense_layers=1,
    hidden=80,
    expert_width=48,
    dense_width=40,
    experts=3,
    shared=2,
    chosen=2,
)
"""Sizes that are no whole blocks, and up rows that do not begin at one."""

WIDE = Dense(
    "wide",
    {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
    },
)
"""Heads of 16 rows; rows of 256 and 512 are whole blocks of every form."""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    prepare()


def stored(out: Path) -> dict[str, StoredMatrix]:
    found: dict[str, StoredMatrix] = {}
    for shard in range(Manifest.load(out).shards):
        reader = ShardReader(out, shard)
        reader.verify()
        found |= {name: reader.matrix(name) for name in reader.names}
    return found


def encoded(encoding: Encoding, values: np.ndarray) -> np.ndarray:
    """What is left of a stack of matrices, each by itself."""
    if encoding in (Encoding.F32, Encoding.BF16):
        return dense(encode(encoding, values))
    flat = np.ascontiguousarray(values.reshape(-1, *values.shape[-2:]), np.float32)
    return np.stack([dense(encode(encoding, each)) for each in flat]).reshape(values.shape)


def usual(name: str) -> Encoding:
    """The encoding that a tensor of the Inkling family has where nothing is asked for."""
    part = name.split(".", 2)[-1]
    if part in ("q", "k", "v", "r", "o") or name == "head.weight":
        return Encoding.INT8
    if part.rpartition(".")[2] in ("gate", "up", "down"):
        return Encoding.INT4
    return Encoding.BF16 if name == "embed.weight" else Encoding.F32


def read_all(source: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, to be changed."""
    with Checkpoint(source) as checkpoint:
        counts = {name: checkpoint.tensor(name).count for name in checkpoint.names}
        return {
            name: np.array(checkpoint.read(name, 0, count)).reshape(checkpoint.shape(name))
            for name, count in counts.items()
        }


def check(out: Path, expected: dict[str, np.ndarray]) -> None:
    found = stored(out)
    assert found.keys() == expected.keys()
    for name, matrix in found.items():
        assert matrix.encoding is usual(name), name
        assert matrix.nbytes == stored_bytes(matrix.encoding, matrix.shape)
        np.testing.assert_array_equal(dense(matrix), encoded(matrix.encoding, expected[name]), err_msg=name)


@pytest.mark.parametrize("kind", ["BF16", "F32", "F16"])
@pytest.mark.parametrize("spelling", ["A", "B"])
def test_every_checkpoint_is_quantised_alike(tmp_path: Path, spelling: str, kind: str) -> None:
    source = make_checkpoint(tmp_path / "in", UNEVEN, spelling=spelling, encoding=kind, files=3)
    exact_export(source, tmp_path / "exact", shards=2)
    export(source, tmp_path / "out", shards=2)
    check(tmp_path / "out", {name: dense(matrix) for name, matrix in stored(tmp_path / "exact").items()})
    if kind == "BF16":
        embedding = dict(tensors(UNEVEN, 0))["embed.weight"].astype(ml_dtypes.bfloat16).astype(np.float32)
        assert np.array_equal(dense(stored(tmp_path / "out")["embed.weight"]), embedding)


def test_four_bit_checkpoints_are_decoded_first(tmp_path: Path) -> None:
    form = Nvfp4(plain_layers=(2,))
    source = make_checkpoint(tmp_path / "in", UNEVEN, spelling="A", encoding="BF16", nvfp4=form)
    exact_export(source, tmp_path / "exact", shards=1)
    export(source, tmp_path / "out", shards=1)
    check(tmp_path / "out", {name: dense(matrix) for name, matrix in stored(tmp_path / "exact").items()})


@pytest.mark.parametrize("piece", [1, 2000, 6000])
@pytest.mark.parametrize("spelling", ["A", "B"])
def test_pieces_change_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str, piece: int
) -> None:
    source = make_checkpoint(tmp_path / "in", UNEVEN, spelling=spelling, encoding="BF16")
    whole = export(source, tmp_path / "whole", shards=1)
    monkeypatch.setattr(copying, "PIECE_NUMBERS", piece)
    assert export(source, tmp_path / "out", shards=1).files == whole.files


def test_forms_are_as_asked_for(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "in", UNEVEN)
    asked = Asked(projections=Encoding.INT4, head=Encoding.F32, embedding=Encoding.F32)
    manifest = export(source, tmp_path / "out", shards=1, encodings=asked)
    assert manifest.encodings == Encodings(
        projections=Encoding.INT4, head=Encoding.F32, embedding=Encoding.F32
    )
    found = stored(tmp_path / "out")
    assert found["layers.1.q"].encoding is found["layers.0.gate"].encoding is Encoding.INT4
    assert found["head.weight"].encoding is found["embed.weight"].encoding is Encoding.F32
    grouped = export(source, tmp_path / "g32", shards=1, encodings=Asked(experts=Encoding.INT8_GROUPED))
    assert stored(tmp_path / "g32")["layers.2.shared.up"].encoding is Encoding.INT8_GROUPED
    assert manifest.stored == manifest.encodings
    assert len({manifest.fingerprint, grouped.fingerprint}) == 2
    with pytest.raises(UsageError, match="holds the export of something else"):
        export(source, tmp_path / "out", shards=1)
    for encodings in ({"experts": "bf16"}, {"embedding": "int8"}):
        with pytest.raises(ValueError, match="stored as one of"):
            Encodings.model_validate(encodings)


@pytest.mark.parametrize(
    ("kind", "encoding"),
    [
        (Kind.Q4_0, Encoding.INT4),
        (Kind.Q4_1, Encoding.INT4_AFFINE),
        (Kind.Q5_0, Encoding.INT8_GROUPED),
        (Kind.Q8_0, Encoding.INT8_GROUPED),
    ],
)
@pytest.mark.parametrize("piece", [1, 2**20])
def test_quantised_files_keep_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, encoding: Encoding, piece: int
) -> None:
    """To the bit; rows of queries and keys change their order and nothing else."""
    source = write_gguf(tmp_path / "model.gguf", WIDE, kind_of=lambda name, values: kind)
    monkeypatch.setattr(copying, "PIECE_NUMBERS", piece)
    manifest = export(source, tmp_path / "out", shards=1)
    assert manifest.encodings == Encodings.model_validate(
        dict.fromkeys(("experts", "projections", "head", "embedding"), Kept.KEEP)
    )
    assert manifest.stored == Encodings(
        experts=encoding, projections=encoding, head=encoding, embedding=Encoding.F32
    )
    found = stored(tmp_path / "out")
    for name, values in dense_tensors(WIDE).items():
        small = values.ndim == 1 or name == "embed.weight"
        assert found[name].encoding is (Encoding.F32 if small else encoding)
        expected = values if values.ndim == 1 else gguf.dequantize(gguf.quantize(values, kind), kind)
        np.testing.assert_array_equal(dense(found[name]), expected, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "experts", "others"),
    [
        (Kind.F16, Encoding.INT4, Encoding.INT8),
        (Kind.BF16, Encoding.INT4, Encoding.INT8),
        (Kind.Q5_1, Encoding.INT8_GROUPED, Encoding.INT8_GROUPED),
    ],
)
def test_other_forms_of_files_are_quantised(
    tmp_path: Path, kind: Kind, experts: Encoding, others: Encoding
) -> None:
    source = write_gguf(tmp_path / "model.gguf", WIDE, kind_of=lambda name, values: kind)
    export(source, tmp_path / "out", shards=1)
    exact_export(source, tmp_path / "exact", shards=1)
    found, exact = stored(tmp_path / "out"), stored(tmp_path / "exact")
    assert found["layers.1.up"].encoding is experts
    assert found["layers.1.k"].encoding is found["head.weight"].encoding is others
    assert found["embed.weight"].encoding is (Encoding.BF16 if kind is Kind.BF16 else Encoding.F32)
    for name, matrix in found.items():
        np.testing.assert_array_equal(dense(matrix), encoded(matrix.encoding, dense(exact[name])))


def test_a_form_that_is_asked_for_is_not_kept(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", WIDE, kind_of=lambda name, values: Kind.Q8_0)
    export(source, tmp_path / "out", shards=1, encodings=Asked(experts=Encoding.INT4))
    found = stored(tmp_path / "out")
    assert found["layers.0.down"].encoding is Encoding.INT4
    assert found["layers.0.q"].encoding is Encoding.INT8_GROUPED


def test_smollm_keeps_the_numbers_of_its_file(smollm: Path, tmp_path: Path) -> None:
    export(smollm, tmp_path / "out", shards=1)
    exact_export(smollm, tmp_path / "exact", shards=1)
    found, exact = ShardReader(tmp_path / "out"), ShardReader(tmp_path / "exact")
    assert found.entry("layers.7.gate").encoding is Encoding.INT4_AFFINE
    assert found.entry("head.weight").encoding is Encoding.INT8_GROUPED
    for name in exact.names:
        same = dense(found.matrix(name)).view(np.uint32) == exact.tensor(name).view(np.uint32)
        assert same.all(), name


@pytest.mark.parametrize(
    ("value", "words"),
    [(np.nan, "holds nan in .* which is no number"), (-np.inf, "no number"), (9e5, "900000 .* no weight")],
)
def test_what_is_no_weight_is_named_with_its_place(tmp_path: Path, value: float, words: str) -> None:
    source = make_checkpoint(tmp_path / "in", UNEVEN)
    made = read_all(source)
    for path in source.glob("*.safetensors*"):
        path.unlink()
    made["model.layers.1.mlp.experts.down_proj"][2, 70, 3] = value
    write_safetensors(source / "model.safetensors", made)
    place = r"\(at \[2, 70, 3\] of layers\.1\.experts\.down\)"
    with pytest.raises(CheckpointError, match=words) as told:
        export(source, tmp_path / "out", shards=1)
    assert told.match(place)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.1.mlp.gate.weight", r"\(at \[4, 3\] of "),
        ("model.layers.1.input_layernorm.weight", r"\(at \[4, 0\] of "),
        ("model.norm.weight", r"\(at \[4, 0\] of "),
    ],
)
def test_what_is_no_number_is_named_where_weights_stay_as_they_are(
    tmp_path: Path, name: str, place: str
) -> None:
    source = make_checkpoint(tmp_path / "in", UNEVEN)
    made = read_all(source)
    for path in source.glob("*.safetensors*"):
        path.unlink()
    made[name][(4, 3)[: made[name].ndim]] = np.nan
    write_safetensors(source / "model.safetensors", made)
    with pytest.raises(CheckpointError, match=f"holds nan in {name} {place}.*no number"):
        export(source, tmp_path / "out", shards=1)


def test_layers_that_may_pass_fp16_are_attenuated(tmp_path: Path) -> None:
    recipe = replace(UNEVEN, layers=4)
    source = make_checkpoint(tmp_path / "in", recipe)
    quiet = export(source, tmp_path / "quiet", split=(2, 2))
    assert quiet.attenuation == {}
    made = read_all(source)
    made["model.layers.2.mlp.shared_experts.up_proj"][1, 7] *= 1e4
    made["model.layers.2.mlp.shared_experts.gate_proj"][1, 7] *= 1e2
    made["model.layers.2.mlp.shared_experts.down_proj"][1, :, 7] *= 1e2
    spoiled = tmp_path / "loud"
    spoiled.mkdir()
    for path in source.glob("*.json"):
        (spoiled / path.name).write_bytes(path.read_bytes())
    write_safetensors(spoiled / "model.safetensors", made)
    manifest = export(spoiled, tmp_path / "out", split=(2, 2))
    assert manifest.attenuation.keys() == {"2"}
    # What the strongest input that the estimate means gives: rows aligned with the neuron at a cosine of 1/4.
    gate = made["model.layers.2.mlp.shared_experts.gate_proj"][1, 7]
    up = made["model.layers.2.mlp.shared_experts.up_proj"][1, 7]
    norm = made["model.layers.2.post_attention_layernorm.weight"]
    down = np.abs(made["model.layers.2.mlp.shared_experts.down_proj"][1, :, 7]).max()
    strongest = (
        np.linalg.norm(gate * norm) * np.linalg.norm(up * norm) * (recipe.hidden / 16) * max(1.0, down)
    )
    n = manifest.attenuation["2"]
    assert strongest * 2.0**-n <= 65504 / 2 < strongest * 2.0 ** (2 - n)
    assert ShardReader(tmp_path / "out", 1).attenuation(2) == n
    assert ShardReader(tmp_path / "out", 1).attenuation(3) == 0
    assert Manifest.load(tmp_path / "out" / "shard-00").attenuation == {}
    assert Manifest.load(tmp_path / "out" / "shard-01").attenuation == manifest.attenuation


def test_attenuation_can_be_chosen_and_changes_neither_weights_nor_fingerprint(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "in", UNEVEN)
    plain = export(source, tmp_path / "plain", split=(2, 1))
    chosen = export(source, tmp_path / "out", split=(2, 1), attenuation={1: 4, 2: 0})
    assert chosen.attenuation == {"1": 4}
    assert chosen.fingerprint == plain.fingerprint
    weights = {place for place in plain.files if place.endswith(".weights")}
    assert all(chosen.files[place] == plain.files[place] for place in weights)
    # What is there already keeps it, and another choice counts.
    assert export(source, tmp_path / "out", split=(2, 1)) == chosen
    assert export(source, tmp_path / "out", split=(2, 1), attenuation={1: 5}).attenuation == {"1": 5}
    with pytest.raises(UsageError, match="--attenuate names layer 3: the model has 3 layers, 0 to 2"):
        export(source, tmp_path / "other", split=(2, 1), attenuation={3: 1})


def test_attenuation_is_parsed() -> None:
    assert parse_attenuation("8=4, 40=5") == {8: 4, 40: 5}
    for text in ("", "8", "8=", "=4", "8=-1", "8=25", "x=1", "8=4,"):
        with pytest.raises(UsageError, match="expected LAYER=N with N from 0 to 24"):
            parse_attenuation(text)
    with pytest.raises(UsageError, match="--attenuate names layer 3 twice"):
        parse_attenuation("3=3,3=4")


def test_exact_is_float32_throughout(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "in", UNEVEN)
    assert export(source, tmp_path / "out", shards=1, encodings=EXACT).encodings == EXACT
    assert {matrix.encoding for matrix in stored(tmp_path / "out").values()} == {Encoding.F32}
