"""Reading safetensors files, good and bad."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.sample.checkpoint import write_safetensors
from cascadia_p2p.shards.safetensors import Checkpoint, StoredTensor, header_length, parse_header, read_header

LONG = 2**64 - 1

entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F16", "U8", "F8_E4M3", "X9"]) | st.integers(),
        "shape": st.lists(st.integers(-1, LONG), max_size=10) | st.none(),
        "data_offsets": st.lists(st.integers(-1, LONG), max_size=3) | st.text(max_size=3),
    },
)
headers = st.dictionaries(
    st.text(max_size=5), entries | st.integers() | st.lists(st.integers(), max_size=2), max_size=4
)


T = TypeVar("T")


def judged(read: Callable[[], T]) -> tuple[T | None, str]:
    """What the call gives, or the sentence it refuses with; any other exception fails the test."""
    try:
        return read(), ""
    except CheckpointError as error:
        return None, str(error)


def bytes_of(header: object) -> bytes:
    return json.dumps(header).encode()


@given(st.binary(max_size=200) | headers.map(bytes_of), st.integers(0, 10**6))
def test_every_header_gives_a_table_or_a_sentence(text: bytes, data_bytes: int) -> None:
    tensors, sentence = judged(lambda: parse_header(text, data_bytes, "x.safetensors"))
    if tensors is None:
        assert "x.safetensors" in sentence
        return
    for tensor in tensors.values():
        assert 8 + len(text) <= tensor.start <= tensor.start + tensor.nbytes <= 8 + len(text) + data_bytes


sizes = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5)


@given(sizes, st.sampled_from(["F32", "BF16"]), st.integers(0, 9))
def test_valid_headers_are_read_in_full(shapes: list[list[int]], dtype: str, spare: int) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    expected: dict[str, tuple[int, int]] = {}
    for number, shape in enumerate(shapes):
        nbytes = int(np.prod(shape)) * (4 if dtype == "F32" else 2)
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        expected[f"t{number}"] = (end, nbytes)
        end += nbytes
    text = bytes_of(header)
    found = parse_header(text, end + spare, "x.safetensors")
    assert {name: (t.start - 8 - len(text), t.nbytes) for name, t in found.items()} == expected


@given(st.binary(max_size=64))
@settings(max_examples=50)
def test_every_file_gives_a_table_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(content)
    tensors, sentence = judged(lambda: read_header(path))
    assert tensors is not None or "any.safetensors" in sentence


@given(st.binary(max_size=8), st.integers(0, 2**63))
def test_a_header_is_never_longer_than_its_file(prefix: bytes, size: int) -> None:
    length, sentence = judged(lambda: header_length(prefix, size, "x.safetensors"))
    if length is None:
        assert "x.safetensors" in sentence
    else:
        assert 0 <= length <= min(size - 8, 100_000_000)


def test_a_header_length_out_of_bounds_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="starts with a header of 4611686018427387904 bytes"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ({"a": entry("F32", [2], 0, 7)}, r"F32 of shape \[2\] needs 8 bytes, not 7"),
        ({"a": entry("F32", [LONG, LONG, LONG], 0, 8)}, r"needs \d{59} bytes, not 8"),
        ({"a": entry("F32", [2], 8, 0)}, r"data_offsets is \[8, 0\], expected a start and an end"),
        ({"a": entry("F32", [3], 0, 12)}, r"is 78 bytes, its tensors need 82: it is cut short"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, "keeps b in bytes of another tensor"),
        ({"a": 7}, "expected dtype, shape and data_offsets"),
        ([1], "no JSON object"),
    ],
)
def test_what_is_wrong_with_a_header_is_named(header: object, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        parse_header(bytes_of(header), 8, "x.safetensors")


def test_numbers_of_every_readable_type_become_float32(tmp_path: Path) -> None:
    values = np.array([[0.0, -1.5, 3.1415927], [65504.0, 2.0**-14, -0.0]], np.float32)
    stored = {"f": values, "h": values.astype(np.float16), "b": values.astype(ml_dtypes.bfloat16)}
    write_safetensors(tmp_path / "model.safetensors", stored)
    with Checkpoint(tmp_path) as checkpoint:
        for name, expected in stored.items():
            got = checkpoint.read(name, 0, 6)
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got.reshape(2, 3), expected.astype(np.float32))
            np.testing.assert_array_equal(
                checkpoint.read(name, 2, 3), expected.astype(np.float32).reshape(-1)[2:5]
            )


def raw_file(path: Path, header: dict[str, object], data: bytes) -> None:
    text = bytes_of(header)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_other_types_are_named_when_they_are_read(tmp_path: Path) -> None:
    raw_file(tmp_path / "model.safetensors", {"a": entry("I64", [1], 0, 8)}, bytes(8))
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensor("a") == StoredTensor("I64", (1,), checkpoint.tensor("a").start, 8)
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors keeps a as I64: expected one of F32, BF16, F16"
        ):
            checkpoint.read("a", 0, 1)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist: expected the directory of a checkpoint"):
        Checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file"):
        Checkpoint(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file: expected the directory"):
        Checkpoint(tmp_path / "file")


def index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_bytes(bytes_of({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        ({}, "has no weight_map"),
        (
            {"a": "../model.safetensors"},
            r"keeps a in '\.\./model\.safetensors': expected a safetensors file beside it",
        ),
        ({"a": 3}, "keeps a in 3"),
    ],
)
def test_an_index_must_say_which_file_holds_what(tmp_path: Path, weight_map: object, sentence: str) -> None:
    write_safetensors(tmp_path / "one.safetensors", {"a": np.ones(2, np.float32)})
    index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=sentence):
        Checkpoint(tmp_path)


def test_files_are_looked_at_when_their_tensors_are_needed(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "one.safetensors", {"a": np.ones(2, np.float32)})
    (tmp_path / "three.safetensors").write_bytes(b"half of a downl")
    index(
        tmp_path,
        {"a": "one.safetensors", "z": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"},
    )
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names == ("a", "b", "c", "z")
        checkpoint.require(["a"])
        with pytest.raises(
            CheckpointError, match=r"lacks 1 of the 2 files that are needed: two\.safetensors; download"
        ):
            checkpoint.require(["a", "b"])
        with pytest.raises(CheckpointError, match=r"says that one\.safetensors holds z, but it does not"):
            checkpoint.require(["z"])
        with pytest.raises(CheckpointError, match=r"three\.safetensors starts with a header of \d+ bytes"):
            checkpoint.require(["c"])


def test_one_of_several_files_is_not_taken_for_all(tmp_path: Path) -> None:
    path = tmp_path / "model-00002-of-00109.safetensors"
    write_safetensors(path, {"a": np.ones(2, np.float32)})
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00109\.safetensors, one of 109 files, but no .*download that"
    ):
        Checkpoint(tmp_path)
    index(tmp_path, {"a": path.name, "b": "model-00001-of-00109.safetensors"})
    Checkpoint(tmp_path).require(["a"])
    path.rename(tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    assert Checkpoint(tmp_path).names == ("a",)


def test_all_e4m3_numbers_and_bytes_are_read(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8)
    write_safetensors(
        tmp_path / "model.safetensors", {"scale": codes.view(ml_dtypes.float8_e4m3fn), "codes": codes}
    )
    # https://arxiv.org/abs/2209.05433, section 3: four bits of exponent, three of mantissa, bias 7.
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(
        exponent > 0, 2.0 ** (exponent - 7.0) * (1.0 + mantissa / 8.0), 2.0**-6.0 * mantissa / 8.0
    )
    size = np.where((exponent == 15) & (mantissa == 7), np.nan, size)
    with Checkpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(
            checkpoint.read("scale", 0, 256), np.where(codes < 128, size, -size).astype(np.float32)
        )
        np.testing.assert_array_equal(checkpoint.read("codes", 3, 200), np.arange(3, 203, dtype=np.float32))
        for name in ("scale", "codes"):
            with pytest.raises(
                CheckpointError, match=rf"keeps {name} as .*: expected one of F32, BF16, F16$"
            ):
                checkpoint.check_readable(name)


def test_two_files_with_one_tensor_need_an_index(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_safetensors(tmp_path / f"{name}.safetensors", {"a": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"holds a in one\.safetensors and in two\.safetensors"):
        Checkpoint(tmp_path)
    index(tmp_path, {"a": "two.safetensors"})
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.file_of("a") == "two.safetensors"


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": np.ones(64, np.float32)})
    with Checkpoint(tmp_path) as checkpoint:
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(CheckpointError, match=r"model\.safetensors ends within a: it was changed"):
            checkpoint.read("a", 0, 64)
