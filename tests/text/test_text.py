from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from cascadia_p2p.errors import RequestError, ShardError
from cascadia_p2p.text import Detokenizer, Tokenizer

CORPUS = [
    "the ring turns and turns",
    "Grüße aus dem Süden, weiß und groß",
    "日本語の文章です",
    "a 😀 b 😀 c 👩‍👩‍👧 d",
    "e\u0301e\u0301",
]
TURN = "<|end_of_turn|>"


def byte_level(merges: int = 40) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 1 + merges, initial_alphabet=alphabet, special_tokens=[TURN], show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_tokens(["<plain added>"])
    return Tokenizer(inner)


def byte_fallback() -> Tokenizer:
    words = ["<unk>", "▁the", "▁ring", "▁", "a", "日", "é", "\u0301"]
    vocab = [(word, -1.0) for word in words] + [(f"<0x{byte:02X}>", -5.0) for byte in range(256)]
    inner = tokenizers.Tokenizer(models.Unigram(vocab, 0, True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(inner)


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=40))
@settings(max_examples=200, deadline=None)
@example([170, 95])
def test_exo_17_any_token_ids_show_the_whole_decode_at_once_without_half_characters(ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    shown = ""
    for count, token_id in enumerate(ids, 1):
        shown += detokenizer.add(token_id)
        whole = BYTE_LEVEL.decode(ids[:count])
        # One replacement sign may stand for the character that is still open; nothing else may be missing.
        assert whole in (shown, shown + "\ufffd")


@given(st.text(max_size=40))
def test_exo_17_text_comes_back_character_by_character(text: str) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode(text, specials=False)
    pieces = [detokenizer.add(token_id) for token_id in ids]
    assert "".join(pieces) == text


@pytest.mark.parametrize("text", ["😀", "日本", "e\u0301", "👩‍👩‍👧", "a😀b"])
@pytest.mark.parametrize("tokenizer", [byte_level(0), BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_exo_17_characters_split_over_several_tokens(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text, specials=False)
    assert len(ids) > 1
    shown = ""
    for token_id in ids:
        shown += detokenizer.add(token_id)
        assert text.startswith(shown)
    assert shown == text


@given(
    st.lists(st.sampled_from(["the ring", " the", "a", "日", "😀", "é", "한", " "]), max_size=12).map("".join)
)
def test_exo_17_other_decoders_show_the_whole_decode(text: str) -> None:
    ids = BYTE_FALLBACK.encode(text.replace(" ", "▁"), specials=False)
    detokenizer = Detokenizer(BYTE_FALLBACK)
    shown = ""
    for count, token_id in enumerate(ids, 1):
        shown += detokenizer.add(token_id)
        finished = BYTE_FALLBACK.decode(ids[:count])
        if "\ufffd" not in finished:
            assert shown == finished
    assert "\ufffd" not in shown
    assert shown == BYTE_FALLBACK.decode(ids)


def test_finished_character_is_not_held_back_by_an_open_one() -> None:
    ids = [*BYTE_FALLBACK.encode("日", specials=False), 8 + 0xF0, 8 + 0x9F]
    assert Detokenizer(BYTE_FALLBACK).extend(ids) == "日"


def test_bytes_that_never_become_a_character_are_shown_in_the_end() -> None:
    detokenizer = Detokenizer(BYTE_FALLBACK)
    assert "\ufffd" in detokenizer.extend([8 + 0xFF] * 12)
    assert detokenizer.extend([4, 4]).endswith("aa")


def test_exo_18_stop_markers_are_never_shown() -> None:
    turn = BYTE_LEVEL.special_id(TURN)
    plain = BYTE_LEVEL.special_id("<plain added>")
    ids = [*BYTE_LEVEL.encode("ring", specials=False), turn, plain]
    assert Detokenizer(BYTE_LEVEL).extend(ids) == "ring<plain added>"
    assert Detokenizer(BYTE_LEVEL, hidden=[plain]).extend(ids) == "ring"
    assert BYTE_LEVEL.decode(ids, specials=True) == f"ring{TURN}<plain added>"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
def test_a_token_is_spelled_by_itself(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" the ring", specials=False)
    assert "".join(map(tokenizer.spelling, ids)).lstrip() == "the ring"
    assert any(tokenizer.spelling(token).startswith(" ") for token in ids)
    assert tokenizer.spelling(tokenizer.vocab_size + 5) == ""


def test_tokens_that_are_special_or_no_whole_character_are_spelled_too() -> None:
    assert BYTE_LEVEL.spelling(BYTE_LEVEL.special_id(TURN)) == TURN
    assert BYTE_LEVEL.spelling(BYTE_LEVEL.added["<plain added>"]) == "<plain added>"
    assert BYTE_FALLBACK.spelling(8 + 0x41) == "A"
    assert BYTE_FALLBACK.spelling(8 + 0xC3) == "\ufffd"


def test_a_users_text_can_not_spell_a_special_token() -> None:
    turn = BYTE_LEVEL.special_id(TURN)
    assert BYTE_LEVEL.encode(TURN) == [turn]
    plain = BYTE_LEVEL.encode(TURN, specials=False)
    assert turn not in plain
    assert BYTE_LEVEL.decode(plain) == TURN


def test_lone_surrogate_is_a_bad_request() -> None:
    with pytest.raises(RequestError, match="character 1 is half of a surrogate pair"):
        BYTE_LEVEL.encode("a\ud800")


def test_unknown_special_name_suggests_the_nearest() -> None:
    with pytest.raises(
        ShardError, match="no special token '<|end_of_tur|>'; the nearest is".replace("|", r"\|")
    ):
        BYTE_LEVEL.special_id("<|end_of_tur|>")


def test_load_reads_a_file_and_refuses_others(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    good, bad, empty = tmp_path / "tokenizer.json", tmp_path / "bad.json", tmp_path / "empty.json"
    inner.save(str(good))
    bad.write_text('{"model": 3}')
    empty.write_bytes(b"")
    tokenizer = Tokenizer.load(good)
    assert tokenizer.vocab_size == 2
    assert tokenizer.decode([1, 7]) == "b"
    with pytest.raises(ShardError, match="can not be read: No such file"):
        Tokenizer.load(tmp_path / "none.json")
    for path in (bad, empty):
        with pytest.raises(ShardError, match=r"is not a tokenizer\.json"):
            Tokenizer.load(path)
