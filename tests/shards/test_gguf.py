"""GGUF files: the same models as from safetensors, every form decoded exactly, faults in words."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from fixtures.dense import MODELS, Dense, dense_tensors, make_dense
from fixtures.exports import exact_export as export
from fixtures.gguf_files import F32, Kind, close, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.llama.config import LlamaConfig
from cascadia_p2p.shards import copying
from cascadia_p2p.shards.gguf import GgufSource, decode
from cascadia_p2p.shards.gguf_header import block_sizes, read_gguf_header
from cascadia_p2p.shards.manifest import Manifest
from cascadia_p2p.shards.opening import open_source
from cascadia_p2p.shards.reader import ShardReader

WIDE = Dense(
    "wide",
    {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    },
)
"""Rows of 256 and 512: whole blocks of every form."""

# Windows are not part of the format, and a tied or v5 model is like another here.
FORMAT_MODELS = (
    "llama",
    "llama-tied",
    "llama-linear",
    "llama-rope3",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3-bias",
)


def decodable() -> list[Kind]:
    """All forms that the package decodes."""
    found = []
    for kind in Kind:
        try:
            decode(kind.name, bytes(block_sizes(kind.name)[1]))
        except NotImplementedError:
            continue
        found.append(kind)
    return found


def all_tensors(model: Path) -> dict[str, F32]:
    found: dict[str, F32] = {}
    for shard in range(Manifest.load(model).shards):
        reader = ShardReader(model, shard)
        reader.verify()
        found |= {name: reader.tensor(name) for name in reader.names}
    return found


def config_of(model: Path) -> LlamaConfig:
    config = Manifest.load(model).model_config_of()
    assert isinstance(config, LlamaConfig)
    return config


@pytest.mark.parametrize("name", FORMAT_MODELS)
def test_a_gguf_file_gives_the_model_that_safetensors_give(name: str, tmp_path: Path) -> None:
    """Also that the converter's order of query and key rows, weights and biases, is undone."""
    model = MODELS[name]
    export(make_dense(tmp_path / "in", model), tmp_path / "one", split=(2, 3))
    export(write_gguf(tmp_path / "model.gguf", model), tmp_path / "two", split=(2, 3))
    one, two = all_tensors(tmp_path / "one"), all_tensors(tmp_path / "two")
    assert one.keys() == two.keys()
    for tensor, values in one.items():
        np.testing.assert_array_equal(two[tensor], values, err_msg=tensor)
    plain, read = config_of(tmp_path / "one"), config_of(tmp_path / "two")
    assert read.rotary.frequencies() == pytest.approx(plain.rotary.frequencies(), rel=1e-6)
    same = {"rotary": plain.rotary, "eps": plain.eps, "eos_ids": plain.eos_ids}
    assert replace(read, **same) == plain
    assert (read.eps, read.rotary.theta) == pytest.approx((plain.eps, plain.rotary.theta))


def test_rows_that_no_converter_interleaved_come_out_wrong(tmp_path: Path) -> None:
    """The check above can fail: without the converter's order, undoing it changes queries and keys only."""
    model = MODELS["llama"]
    export(write_gguf(tmp_path / "model.gguf", model, permute=False), tmp_path / "out", shards=1)
    made = dense_tensors(model)
    wrong = {
        name
        for name, values in all_tensors(tmp_path / "out").items()
        if not np.array_equal(values, made[name])
    }
    assert wrong == {f"layers.{number}.{part}" for number in range(5) for part in "qk"}


@pytest.mark.parametrize("piece", [1, 50, 1000])
def test_the_size_of_a_piece_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    source = write_gguf(tmp_path / "model.gguf", MODELS["llama-tied"])
    monkeypatch.setattr(copying, "PIECE_NUMBERS", piece)
    export(source, tmp_path / "out", shards=1)
    for name, values in dense_tensors(MODELS["llama-tied"]).items():
        np.testing.assert_array_equal(all_tensors(tmp_path / "out")[name], values, err_msg=name)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_quantised_values_are_kept_as_decoded(kind: Kind, tmp_path: Path) -> None:
    """The same numbers as safetensors that hold the decoded weights."""
    source = write_gguf(tmp_path / "model.gguf", WIDE, kind_of=lambda name, values: kind)
    export(source, tmp_path / "out", shards=1)
    for name, values in dense_tensors(WIDE).items():
        expected = values
        if values.ndim > 1:
            expected = gguf.dequantize(gguf.quantize(values, kind), kind)
        np.testing.assert_array_equal(all_tensors(tmp_path / "out")[name], expected, err_msg=name)


def test_the_forms_that_matter_are_decoded() -> None:
    wanted = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *(f"Q{n}_K" for n in range(2, 7))}
    assert wanted <= {kind.name for kind in decodable()}


@pytest.fixture(scope="module")
def every_form(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with one tensor of 3 x 512 numbers in each form, of random bytes."""
    path = tmp_path_factory.mktemp("forms") / "forms.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    rng = np.random.default_rng(5)
    for kind in decodable():
        numbers, size = block_sizes(kind.name)
        row = rng.integers(0, 256, (3, 512 // numbers * size), np.uint8)
        data = row.view(np.float32) if kind is Kind.F32 else row.view(np.float16) if kind is Kind.F16 else row
        writer.add_tensor(kind.name, data, raw_dtype=kind)
    close(writer)
    return path


@pytest.mark.parametrize("kind", [kind.name for kind in decodable()])
def test_any_slice_is_that_of_the_whole_decoded_by_the_package(kind: str, every_form: Path) -> None:
    found = next(tensor for tensor in gguf.GGUFReader(every_form).tensors if tensor.name == kind)
    with np.errstate(all="ignore"):
        whole = gguf.dequantize(found.data, found.tensor_type).reshape(-1).astype(np.float32)
        with GgufSource(every_form) as source:
            assert source.shape(kind) == (3, 512)
            for start, count in ((0, 1536), (0, 1), (7, 300), (511, 2), (1000, 536), (1535, 1), (64, 0)):
                got = source.read(kind, start, count)
                np.testing.assert_array_equal(got, whole[start : start + count])
                assert got.dtype == np.float32


def test_a_form_that_can_not_be_decoded_is_named_with_its_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", WIDE, kind_of=lambda name, values: Kind.Q8_0)
    spoil_kind(path, "blk.1.ffn_up.weight", Kind.Q8_0, Kind.I8)
    with pytest.raises(CheckpointError, match=r"model\.gguf keeps blk\.1\.ffn_up\.weight as I8, .*decode"):
        export(path, tmp_path / "out", shards=1)
    spoil_kind(path, "blk.1.ffn_up.weight", Kind.I8, 4)
    with pytest.raises(
        CheckpointError, match=r"blk\.1\.ffn_up\.weight in a form of number 4, which the gguf"
    ):
        export(path, tmp_path / "out", shards=1)


def spoil_kind(path: Path, tensor: str, old: int, new: int) -> None:
    """Change the form that the header gives for one tensor of two axes."""
    data = bytearray(path.read_bytes())
    at = data.index(tensor.encode()) + len(tensor) + 4 + 16
    assert struct.unpack_from("<I", data, at) == (old,)
    struct.pack_into("<I", data, at, new)
    path.write_bytes(data)


REFUSED = {
    "another architecture": (
        {"general.architecture": "gemma2"},
        "general.architecture = 'gemma2': expected one",
    ),
    "no layers": ({"llama.block_count": None}, "has no llama.block_count"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count = 8"),
    "yarn": (
        {"llama.rope.scaling.type": "yarn"},
        "llama.rope.scaling.type = 'yarn': expected none or linear",
    ),
    "part of a head": ({"llama.rope.dimension_count": 4}, "rope.dimension_count = 4: expected 8, the whole"),
    "window": ({"llama.attention.sliding_window": 100}, "sliding_window = 100"),
    "other values": ({"llama.attention.value_length": 16}, "value_length = 16: expected 8"),
    "multiplier": ({"llama.attention.scale": 0.5}, "llama.attention.scale = 0.5"),
    "one head too many": ({"llama.attention.head_count_kv": 4}, "6 query heads and 4 key and value heads"),
    "heads by layer": ({"llama.attention.head_count": [6, 6, 6, 6, 5]}, r"head_count = \[6, 6, 6, 6, 5\]"),
}


@pytest.mark.parametrize(("entries", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_computed_here_is_refused_in_words(
    entries: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    architecture = entries.pop("general.architecture", None)
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama"], metadata=entries)
    if architecture is not None:
        path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gemma", 1))
        sentence = sentence.replace("gemma2", "gemma")
    with pytest.raises(CheckpointError, match=sentence):
        export(path, tmp_path / "out", shards=1)


def test_a_tensor_that_would_change_the_result_is_not_left_out(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, MODELS["qwen3"])
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.3.attn_q_norm.weight", b"blk.3.attn_q_mean.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 of .*blk\.3\.attn_q_norm\.weight"):
        export(path, tmp_path / "out", shards=1)
    path.write_bytes(
        data.replace(b"attn_q_norm.weight", b"attn_q_mean.weight").replace(b"attn_k_norm", b"attn_k_mean")
    )
    with pytest.raises(CheckpointError, match="tensors in its layers that this family does not compute with"):
        export(path, tmp_path / "out", shards=1)


def test_a_directory_with_one_gguf_model_is_a_source(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", MODELS["llama"])
    with open_source(tmp_path) as source:
        assert source.files == ("model.gguf",)
    write_gguf(tmp_path / "other.gguf", MODELS["llama"])
    with pytest.raises(CheckpointError, match=r"several GGUF models \(model\.gguf, other\.gguf\): name one"):
        open_source(tmp_path)
    (tmp_path / "readme.txt").write_text("no model")
    with pytest.raises(CheckpointError, match=r"readme\.txt is a file: expected the directory .*\.gguf file"):
        open_source(tmp_path / "readme.txt")


def test_a_model_in_several_files_is_one(tmp_path: Path) -> None:
    """Tensors are spread as `gguf-split` does; the metadata stands in the first file."""
    whole = write_gguf(tmp_path / "whole.gguf", MODELS["qwen2"])
    names = [tmp_path / "split" / f"model-{number:05d}-of-00002.gguf" for number in (1, 2)]
    names[0].parent.mkdir()
    reader = gguf.GGUFReader(whole)
    for number, path in enumerate(names):
        writer = gguf.GGUFWriter(path, "qwen2")
        for field in reader.fields.values():
            if number == 0 and not field.name.startswith(("GGUF.", "general.")):
                writer.add_key_value(field.name, field.contents(), field.types[0])
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data)
        close(writer)
    export(whole, tmp_path / "one", shards=2)
    export(names[0].parent, tmp_path / "two", shards=2)
    one, two = all_tensors(tmp_path / "one"), all_tensors(tmp_path / "two")
    assert all(np.array_equal(one[name], two[name]) for name in one)
    names[1].unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 2 files of this model: model-00002-of-00002"):
        export(names[0], tmp_path / "three", shards=2)


def test_two_models_of_one_shape_have_two_fingerprints(tmp_path: Path) -> None:
    prints = {
        export(
            write_gguf(tmp_path / f"{seed}.gguf", MODELS["llama"], seed=seed), tmp_path / str(seed), shards=1
        ).fingerprint
        for seed in (0, 1)
    }
    assert len(prints) == 2


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = write_gguf(tmp_path_factory.mktemp("header") / "model.gguf", MODELS["llama"])
    return path.read_bytes()


COUNT_OF_TENSORS = range(8, 16)
"""Where a header has it."""


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_anywhere_is_said_in_words(header: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Cut short, or one byte changed in the header: read whole, or refused in one sentence."""
    path = tmp_path / "model.gguf"
    if data.draw(st.booleans()):
        spoilt = header[: data.draw(st.integers(0, len(header) - 1))]
        path.write_bytes(spoilt)
        with pytest.raises(CheckpointError, match="download it again"):
            read_gguf_header(path)
        return
    place = data.draw(st.integers(0, 6000))
    path.write_bytes(header[:place] + bytes([data.draw(st.integers(0, 255))]) + header[place + 1 :])
    with contextlib.suppress(CheckpointError):
        # Where it says so, a file has none.
        assert read_gguf_header(path).tensors or place in COUNT_OF_TENSORS


def test_a_header_that_claims_more_than_the_file_holds_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    entry = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 4, 2**40)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="cut short"):
        read_gguf_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
