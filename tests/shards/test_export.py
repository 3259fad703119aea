"""Exporting: the same numbers from every kind of checkpoint, bounded memory, and what is refused."""

from __future__ import annotations

import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from fixtures.exports import exact_export as export

from cascadia_p2p.errors import CapacityError, CheckpointError, UsageError
from cascadia_p2p.sample.checkpoint import Encoding, make_checkpoint, write_safetensors
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.sample.weights import tensors
from cascadia_p2p.shards import copying
from cascadia_p2p.shards import export as export_module
from cascadia_p2p.shards.encodings import EMBEDDING, Encodings, parse_encoding
from cascadia_p2p.shards.export import Progress
from cascadia_p2p.shards.manifest import Manifest
from cascadia_p2p.shards.reader import ShardReader
from cascadia_p2p.shards.safetensors import Checkpoint

KINDS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}


def all_tensors(out: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for shard in range(Manifest.load(out).shards):
        reader = ShardReader(out, shard)
        reader.verify()
        assert not found.keys() & set(reader.names)
        found |= {name: reader.tensor(name) for name in reader.names}
    return found


def expected_tensors(recipe: Recipe, encoding: Encoding, seed: int = 0) -> dict[str, np.ndarray]:
    result = {}
    for name, values in tensors(recipe, seed):
        kind = np.float32 if name.endswith(("router_bias", "global_scale")) else KINDS[encoding]
        result[name] = values.astype(kind).astype(np.float32)
    result["head.weight"] = result["head.weight"][: recipe.vocab_valid]
    return result


@pytest.mark.parametrize("files", [1, 5])
@pytest.mark.parametrize("encoding", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("spelling", ["A", "B"])
def test_every_kind_of_checkpoint_gives_the_same_model(
    tmp_path: Path, small: Recipe, spelling: str, encoding: Encoding, files: int
) -> None:
    source = make_checkpoint(tmp_path / "in", small, spelling=spelling, encoding=encoding, files=files)
    manifest = export(source, tmp_path / "out", shards=3)
    assert manifest.model_config_of() == small.config()
    found, expected = all_tensors(tmp_path / "out"), expected_tensors(small, encoding)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("piece", [1, 7, 33, 500])
def test_the_size_of_a_piece_changes_nothing(
    tmp_path: Path, small: Recipe, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    recipe = replace(small, layers=3, experts=3, vocab=272, vocab_valid=272, extent=16)
    source = make_checkpoint(tmp_path / "in", recipe, spelling="A")
    monkeypatch.setattr(copying, "PIECE_NUMBERS", piece * recipe.hidden // 2)
    export(source, tmp_path / "out", shards=1)
    found = all_tensors(tmp_path / "out")
    for name, values in expected_tensors(recipe, "F32").items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("spelling", ["A", "B"])
def test_a_head_without_padding_rows_is_accepted(tmp_path: Path, small: Recipe, spelling: str) -> None:
    source = make_checkpoint(tmp_path / "in", small, spelling=spelling, files=2)
    with Checkpoint(source) as checkpoint:
        stored = {
            name: checkpoint.read(name, 0, checkpoint.tensor(name).count).reshape(checkpoint.shape(name))
            for name in checkpoint.names
        }
    head = "model.llm.unembed.weight" if spelling == "A" else "lm_head.weight"
    stored[head] = stored[head][: small.vocab_valid]
    for path in source.glob("*.safetensors*"):
        path.unlink()
    write_safetensors(source / "model.safetensors", stored)
    export(source, tmp_path / "out", shards=1)
    found = ShardReader(tmp_path / "out", 0).tensor("head.weight")
    np.testing.assert_array_equal(found, expected_tensors(small, "F32")["head.weight"])


def test_memory_is_bounded_whatever_the_size_of_a_stack(tmp_path: Path) -> None:
    recipe = Recipe("wide", layers=1, dense_layers=0, hidden=256, experts=64, expert_width=512, extent=16)
    source = make_checkpoint(tmp_path / "in", recipe, spelling="A", encoding="BF16")
    with Checkpoint(source) as checkpoint:
        stack = checkpoint.tensor("model.llm.layers.0.mlp.experts.w13_weight").count
    tracemalloc.start()
    export(source, tmp_path / "out", shards=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 4 * stack > 2.5 * peak, (
        f"{peak / 1e6:.0f} MB were taken to export a stack of {4 * stack / 1e6:.0f} MB"
    )


def test_progress_grows_to_the_total(tmp_path: Path, checkpoint: Path) -> None:
    seen: list[Progress] = []
    manifest = export(checkpoint, tmp_path / "out", shards=2, progress=seen.append)
    done = [step.done for step in seen]
    assert done == sorted(done)
    weights = sum(entry.size for place, entry in manifest.files.items() if place.endswith(".weights"))
    assert done[-1] == seen[-1].total == weights
    assert {step.file for step in seen} == {place for place in manifest.files if place.endswith(".weights")}


def test_a_shard_directory_stands_alone(tmp_path: Path, exported: Path, small: Recipe) -> None:
    alone = tmp_path / "elsewhere"
    shutil.copytree(exported / "shard-01", alone)
    shutil.rmtree(exported)
    reader = ShardReader(alone)
    reader.verify()
    assert (reader.index, reader.layers, reader.is_first, reader.is_last) == (1, range(3, 5), False, False)
    assert reader.config == small.config()
    assert reader.tokenizer == alone / "tokenizer.json"
    assert {name.split(".")[1] for name in reader.names} == {"3", "4"}


def test_the_fingerprint_says_what_the_model_is(tmp_path: Path, checkpoint: Path, small: Recipe) -> None:
    first = export(checkpoint, tmp_path / "first", shards=3)
    assert export(checkpoint, tmp_path / "second", shards=3).fingerprint == first.fingerprint
    others = {
        "split": export(checkpoint, tmp_path / "split", split=(1, 3, 3)),
        "numbers": export(make_checkpoint(tmp_path / "in1", small, seed=1), tmp_path / "numbers", shards=3),
        "config": export(
            make_checkpoint(tmp_path / "in2", replace(small, route_scale=2.0)), tmp_path / "config", shards=3
        ),
        "tokenizer": export(
            make_checkpoint(tmp_path / "in3", small, tokenizer=False), tmp_path / "tokenizer", shards=3
        ),
    }
    assert len({first.fingerprint, *(other.fingerprint for other in others.values())}) == 5


def test_what_is_left_out_is_told(tmp_path: Path, small: Recipe) -> None:
    source = make_checkpoint(tmp_path / "in", small, spelling="A")
    write_safetensors(source / "more.safetensors", {"stranger.weight": np.ones(3, np.float32)})
    notes: list[str] = []
    export(source, tmp_path / "out", shards=1, note=notes.append)
    assert notes == [
        "left out, as the text model is computed without: "
        "multi-token prediction (20 tensors), vision (2 tensors), audio (2 tensors)",
        "warning: 1 tensors of the checkpoint are not known and left out: stranger.weight",
    ]


def test_a_tensor_of_another_shape_is_named(tmp_path: Path, small: Recipe) -> None:
    source = make_checkpoint(tmp_path / "in", small)
    config = (source / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 64')
    (source / "config.json").write_text(config)
    with pytest.raises(
        CheckpointError, match=r"embed_tokens\.weight of shape \[288, 32\]: .* should be \[288, 64\]"
    ):
        export(source, tmp_path / "out", shards=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", None, r"config\.json can not be read"),
        ("config.json", "{", r"config\.json is no JSON"),
        ("config.json", "[]", r"config\.json holds no JSON object"),
        ("config.json", '{"model_type": "gpt2"}', r"model_type 'gpt2': expected one of inkling_mm_model"),
        ("generation_config.json", "{", r"generation_config\.json is no JSON"),
    ],
)
def test_a_bad_config_is_named(
    tmp_path: Path, small: Recipe, name: str, content: str | None, sentence: str
) -> None:
    source = make_checkpoint(tmp_path / "in", small)
    (source / name).unlink()
    if content is not None:
        (source / name).write_text(content)
    with pytest.raises(CheckpointError, match=sentence):
        export(source, tmp_path / "out", shards=1)


def test_a_truncated_source_is_named(tmp_path: Path, small: Recipe) -> None:
    source = make_checkpoint(tmp_path / "in", small)
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is \d+ bytes, its tensors need \d+: it is cut short"
    ):
        export(source, tmp_path / "out", shards=1)


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=12345))
    with pytest.raises(CapacityError, match=r"needs [\d.]+ MB on the disk of .*, where 12\.3 kB is free"):
        export(checkpoint, tmp_path / "out", shards=2)
    assert not list((tmp_path / "out").glob("shard-*"))


def test_cas_21_more_shards_than_layers_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="--shards is 8, but the model has 7 layers"):
        export(checkpoint, tmp_path / "out", shards=8)


def test_dll_05_the_split_is_checked_against_the_model(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="--split 3,3 adds up to 6 layers, but the model has 7"):
        export(checkpoint, tmp_path / "out", split=(3, 3))
    with pytest.raises(UsageError, match="either --shards N or --split"):
        export(checkpoint, tmp_path / "out")


def test_another_export_is_not_overwritten(tmp_path: Path, exported: Path, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="holds the export of something else"):
        export(checkpoint, exported, shards=2)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file: give a directory"):
        export(checkpoint, tmp_path / "file", shards=2)
    assert not (exported / ".export").exists()


def test_an_encoding_that_is_not_possible_is_named() -> None:
    matrices = "expected one of int4, int8, int8g32, f32, keep"
    for flag, text in (("--head", "q4_k"), ("--experts", "bf16"), ("--projections", "int4a")):
        with pytest.raises(UsageError, match=f"{flag} '{text}' is not possible: {matrices}"):
            parse_encoding(flag, text)
    with pytest.raises(UsageError, match="--embedding 'int8' is not possible: expected one of bf16"):
        parse_encoding("--embedding", "int8", EMBEDDING)
    assert Encodings(projections=parse_encoding("--projections", "int4")).projections == "int4"
