"""Tokenizers from GGUF metadata: cut as each model's own, special tokens, frames, ends, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures.dense import MODELS
from fixtures.exports import exact_export as export
from fixtures.gguf_files import write_gguf
from fixtures.smollm import HERE, PROMPTS, TEXTS, load_prompts, load_texts

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.sample.tokenizer import tokenizer_json
from cascadia_p2p.shards.gguf import GgufSource
from cascadia_p2p.shards.gguf_tokenizer import end_ids, tokenizer_files
from cascadia_p2p.shards.manifest import Manifest
from cascadia_p2p.text.detokenizer import Detokenizer
from cascadia_p2p.text.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>")
MERGES = ("1 2", "12 3", "123 4", "h e", "l l", "he ll", "hell o", "Ġ hello", "n ' t")
KINDS = {"control": 3, "user": 4, "normal": 1}


def metadata(**changes: object) -> dict[str, object]:
    """A small byte-level tokenizer, as in a file; None takes an entry away."""
    model = tokenizer_json(256)["model"]
    assert isinstance(model, dict)
    letters = list(model["vocab"])
    merged = ["12", "123", "1234", "he", "ll", "hell", "hello", "Ġhello", "Ġworld"]
    entries: dict[str, object] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": [*SPECIAL, *letters, *merged],
        "token_type": [3, 3, 3, 4, *[1] * (len(letters) + len(merged))],
        "merges": [*MERGES[:-1]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (entries | changes).items() if value is not None}


def tokenizer(**changes: object) -> Tokenizer:
    path = Path(changes.pop("path"))  # type: ignore[arg-type]
    path.write_bytes(tokenizer_files(metadata(**changes))["tokenizer.json"])
    return Tokenizer.load(path)


def pieces(found: Tokenizer, text: str, *, specials: bool = True) -> list[str]:
    return [found.decode([token], specials=True) for token in found.encode(text, specials=specials)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("default", ["123", "4"]),
        ("gpt-2", ["1234"]),
        ("tekken", ["1", "2", "3", "4"]),
    ],
)
def test_digits_are_cut_as_in_each_model(pre: str, expected: list[str], tmp_path: Path) -> None:
    assert pieces(tokenizer(path=tmp_path / "t", pre=pre, bos_token_id=None), "1234") == expected


def test_without_a_name_text_is_cut_as_llama_cpp_does_then(tmp_path: Path) -> None:
    assert pieces(tokenizer(path=tmp_path / "t", pre=None), "1234") == ["123", "4"]


def test_pieces_that_are_tokens_are_taken_whole_only_where_the_model_does(tmp_path: Path) -> None:
    """' world' is a token that no merges lead to."""
    assert pieces(tokenizer(path=tmp_path / "a", pre="llama-bpe", bos_token_id=None), " world") == [" world"]
    assert pieces(tokenizer(path=tmp_path / "b", pre="smollm"), " world") == list(" world")


def test_text_is_composed_for_qwen_only(tmp_path: Path) -> None:
    composed, apart = "\u00e9", "e\u0301"
    qwen, smollm = tokenizer(path=tmp_path / "a", pre="qwen2"), tokenizer(path=tmp_path / "b", pre="smollm")
    assert qwen.encode(apart) == qwen.encode(composed)
    assert smollm.encode(apart) != smollm.encode(composed)


def test_special_tokens_are_found_in_text_and_hidden_in_answers(tmp_path: Path) -> None:
    found = tokenizer(path=tmp_path / "t")
    ids = found.encode("<|im_start|>hello<tool>")
    assert ids == [1, found.encode("hello")[0], 3]
    assert found.decode(ids) == "hello<tool>", "what a user defined is text, what controls is not"
    assert found.special_ids == {0, 1, 2}
    assert found.byte_level
    assert len(found.encode("<|im_start|>", specials=False)) == len("<|im_start|>")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pre": "smollm"}, ["hello"]),
        ({"pre": "smollm", "add_bos_token": True}, ["<|im_start|>", "hello"]),
        ({"pre": "llama-bpe"}, ["<|im_start|>", "hello"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["hello"]),
        ({"pre": "llama-bpe", "bos_token_id": None}, ["hello"]),
        (
            {"pre": "smollm", "add_bos_token": True, "add_eos_token": True},
            ["<|im_start|>", "hello", "<|im_end|>"],
        ),
    ],
)
def test_text_is_framed_as_the_file_asks(
    changes: dict[str, object], expected: list[str], tmp_path: Path
) -> None:
    found = tokenizer(path=tmp_path / "t", **changes)
    assert pieces(found, "hello") == expected
    assert pieces(found, "hello", specials=False) == ["hello"]


def test_the_files_say_what_libraries_ask_for() -> None:
    files = tokenizer_files(metadata() | {"tokenizer.chat_template": "{{ messages }}ü"})
    assert files["chat_template.jinja"].decode() == "{{ messages }}ü"
    config = json.loads(files["tokenizer_config.json"])
    named = (config["bos_token"], config["eos_token"], config["pad_token"])
    assert named == (SPECIAL[1], SPECIAL[2], SPECIAL[0])
    assert "unk_token" not in config
    assert "chat_template.jinja" not in tokenizer_files(metadata())
    assert tokenizer_files({}) == {}


def test_exo_18_every_token_that_ends_a_turn_ends_an_answer() -> None:
    """The file names one of them; the vocabulary has more."""
    assert end_ids(metadata()) == (2, 0)
    assert end_ids(metadata(eot_token_id=3, eom_token_id=7)) == (2, 3, 7, 0)
    assert end_ids(metadata(eos_token_id=None)) == (0, 2)
    assert end_ids({"tokenizer.ggml.eos_token_id": 9}) == (9,)


REFUSED = {
    "another kind": ({"model": "t5"}, "kind 't5', pre-tokenizer 'smollm': only 'llama', and 'gpt2' with"),
    "unknown cut": ({"pre": "klingon"}, "pre-tokenizer 'klingon'"),
    "twice": ({"tokens": [*SPECIAL, "a", "a"], "token_type": [1] * 6}, "the token 'a' twice"),
    "types": ({"token_type": [1, 2]}, "269 tokens and 2 token types"),
    "no merges": ({"merges": None}, "no list of merges"),
    "no tokens": ({"tokens": None}, "no list of tokens"),
    "beyond": ({"add_bos_token": True, "bos_token_id": 999}, "names token 999 and has 269 tokens"),
    "a merge of nothing": ({"merges": ["x yyy"]}, "tokenizer is damaged"),
}


@pytest.mark.parametrize(("changes", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_used_is_refused_in_words(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        tokenizer_files(metadata(**changes))


def test_an_export_holds_tokenizer_template_and_ends(tmp_path: Path) -> None:
    entries = metadata() | {"tokenizer.chat_template": "{{ messages }}"}
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama"], metadata=entries)
    manifest = export(path, tmp_path / "out", shards=2)
    assert manifest.tokenizer == ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    assert manifest.model_config_of().eos_ids == (2, 0)
    for shard in range(2):
        assert Tokenizer.load(tmp_path / "out" / f"shard-0{shard}" / "tokenizer.json").vocab_size == 269
    assert Manifest.load(tmp_path / "out" / "shard-01").tokenizer == manifest.tokenizer


def test_the_real_tokenizer_cuts_as_llama_cpp_does(smollm: Path, tmp_path: Path) -> None:
    with GgufSource(smollm) as source:
        files = source.tokenizer()
        assert source.model().config.eos_ids == (2, 0)
    (tmp_path / "tokenizer.json").write_bytes(files["tokenizer.json"])
    found = Tokenizer.load(tmp_path / "tokenizer.json")
    for text, ids in load_texts():
        assert found.encode(text, specials=False) == ids, text
        assert found.decode(ids) == text
    for prompt in load_prompts():
        assert tuple(found.encode(prompt.text)) == prompt.ids
    assert len(PROMPTS) == 20
    assert b"<|im_start|>" in files["chat_template.jinja"]


def sentencepiece(**changes: object) -> dict[str, object]:
    """A SentencePiece model as in a file; the fixture's texts are cut by the real library."""
    made = json.loads((HERE / "sentencepiece.json").read_text(encoding="utf-8"))
    entries = {key: made[key] for key in ("tokens", "scores", "token_type")}
    entries |= {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items()}


def test_sentencepiece_models_cut_as_the_library_does(tmp_path: Path) -> None:
    texts = json.loads((HERE / "sentencepiece.json").read_text(encoding="utf-8"))["texts"]
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer_files(sentencepiece())["tokenizer.json"])
    found = Tokenizer.load(path)
    assert not found.byte_level
    assert found.special_ids == {0, 1, 2}
    for text, ids in zip(TEXTS, texts, strict=True):
        assert found.encode(text, specials=False) == ids, text
        assert found.encode(text) == [1, *ids]
        assert found.decode(ids) == text
        shown = Detokenizer(found)
        assert "".join(shown.add(token) for token in ids) == text


def test_sentencepiece_without_a_space_in_front(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(
        tokenizer_files(sentencepiece(add_space_prefix=False, add_bos_token=False))["tokenizer.json"]
    )
    found = Tokenizer.load(path)
    assert found.decode(found.encode("node")) == "node"
    assert found.encode(" node") != found.encode("node")


def test_scores_that_are_not_those_of_the_pieces_are_refused() -> None:
    with pytest.raises(CheckpointError, match="700 tokens and 2 scores"):
        tokenizer_files(sentencepiece(scores=[0.5, 1.5]))
