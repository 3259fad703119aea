"""The files of a tokenizer from the metadata of a GGUF file, as Hugging Face's libraries read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.fields import Fields
from cascadia_p2p.shards.manifest import TokenizerFile
from cascadia_p2p.text.tokenizer import read_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"
"""How SentencePiece writes a space."""

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's words."""

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Words:
    """How text is cut before pairs are merged.

    Args:
        patterns: cut one after the other; what matches and what lies between are pieces.
        whole: whether a piece that is a token is not merged from its bytes.
        compose: whether text is brought into Unicode's composed form (NFC) before.
        begin: whether a beginning-of-sequence token is put in front when the file does not say.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    compose: bool = False
    begin: bool = False


_GPT2 = _Words((_WORDS,))
_DIGITS = _Words((r"\p{N}", _WORDS))
_LLAMA3 = _Words((_LETTERS + r"|\p{N}{1,3}" + _TAIL,), whole=True, begin=True)
_QWEN2 = _Words((_LETTERS + r"|\p{N}" + _TAIL,), compose=True)
_PRE: Final = {
    "default": _Words((r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b", "exaone"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _Words(_LLAMA3.patterns)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"), _QWEN2),
    "tekken": _Words((_TEKKEN,), whole=True, begin=True),
}
"""By `tokenizer.ggml.pre`; each is the pattern in the `tokenizer.json` of the model that it is named for."""

_ENDS: Final = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
)
"""Control tokens that end a turn or a text wherever they are; files made early name only one of them."""

_Item = TypeVar("_Item", str, int, float)


@dataclass(frozen=True, slots=True)
class _Rules:
    """The parts of a `tokenizer.json` that differ between kinds, as its keys name them."""

    normalizer: dict[str, object] | None
    pre_tokenizer: dict[str, object] | None
    decoder: dict[str, object]
    model: dict[str, object]


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id, and what kind each is of."""

    tokens: list[str]
    kinds: list[int]

    def is_control(self, token_id: int) -> bool:
        return self.kinds[token_id] in (_CONTROL, _UNKNOWN) or self.tokens[token_id] in _ENDS

    def added(self) -> list[dict[str, object]]:
        """Tokens that are found in text as they are spelled, before it is cut."""
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": self.is_control(token_id),
            }
            for token_id, token in enumerate(self.tokens)
            if self.is_control(token_id) or self.kinds[token_id] == _USER_DEFINED
        ]


def tokenizer_files(metadata: Mapping[str, object]) -> dict[TokenizerFile, bytes]:
    """The content of `tokenizer.json`, `tokenizer_config.json` and, if there is one, the chat template.

    Raises:
        CheckpointError: the tokenizer is of a kind that can not be written, or is damaged.
    """
    fields = _fields(metadata)
    kind, pre = fields.value("model"), fields.value("pre") or "default"
    if kind is None:
        return {}
    if kind == "gpt2" and pre in _PRE:
        vocabulary, words = _vocabulary(fields), _PRE[str(pre)]
        rules = _byte_level(fields, vocabulary, words)
    elif kind == "llama":
        vocabulary, words = _vocabulary(fields), _Words((), begin=True)
        rules = _sentencepiece(fields, vocabulary)
    else:
        known = ", ".join(_PRE)
        raise CheckpointError(
            f"the GGUF file has a tokenizer of kind {kind!r}, pre-tokenizer {pre!r}: only 'llama', and "
            f"'gpt2' with one of {known} can be used; export from the checkpoint's safetensors with its "
            "tokenizer.json instead"
        )
    files: dict[TokenizerFile, bytes] = {
        "tokenizer.json": _json(_tokenizer(vocabulary, rules, _frame(fields, vocabulary, words))),
        "tokenizer_config.json": _json(_config(fields, vocabulary, words)),
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        files["chat_template.jinja"] = template.encode()
    try:
        read_tokenizer(files["tokenizer.json"])
    except ValueError as error:
        raise CheckpointError(f"the GGUF file's tokenizer is damaged: {error}") from None
    return files


def end_ids(metadata: Mapping[str, object]) -> tuple[int, ...]:
    """The ids that end an answer: those that the file names, then control tokens that always do.

    Raises:
        CheckpointError: an id that is no token.
    """
    fields = _fields(metadata)
    if fields.value("tokens") is None:
        return fields.ids("eos_token_id")
    vocabulary = _vocabulary(fields)
    named = [fields.ids(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    spelled = [token_id for token_id, token in enumerate(vocabulary.tokens) if token in _ENDS]
    found = dict.fromkeys((*(token_id for ids in named for token_id in ids), *spelled))
    for token_id in found:
        _token(vocabulary, token_id)
    return tuple(found)


def _fields(metadata: Mapping[str, object]) -> Fields:
    return Fields(metadata, "the GGUF file", "tokenizer.ggml.")


def _vocabulary(fields: Fields) -> _Vocabulary:
    tokens = _list(fields, "tokens", str)
    kinds = _list(fields, "token_type", int) if fields.has("token_type") else [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"the GGUF file has {len(tokens)} tokens and {len(kinds)} token types: download it again"
        )
    if len(set(tokens)) != len(tokens):
        last = {token: token_id for token_id, token in enumerate(tokens)}
        twice = next(token for token_id, token in enumerate(tokens) if last[token] != token_id)
        raise CheckpointError(f"the GGUF file has the token {twice!r} twice: its tokenizer can not be used")
    return _Vocabulary(tokens, kinds)


def _list(fields: Fields, name: str, kind: type[_Item]) -> list[_Item]:
    value = fields.value(name)
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise CheckpointError(f"the GGUF file has no list of {name} for its tokenizer: download it again")
    return value


def _token(vocabulary: _Vocabulary, token_id: int) -> str:
    if token_id >= len(vocabulary.tokens):
        raise CheckpointError(
            f"the GGUF file names token {token_id} and has {len(vocabulary.tokens)} tokens: download it again"
        )
    return vocabulary.tokens[token_id]


def _tokenizer(vocabulary: _Vocabulary, rules: _Rules, frame: dict[str, object] | None) -> dict[str, object]:
    """The object for `tokenizer.json`."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "normalizer": rules.normalizer,
        "pre_tokenizer": rules.pre_tokenizer,
        "post_processor": frame,
        "decoder": rules.decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "vocab": {token: token_id for token_id, token in enumerate(vocabulary.tokens)},
            **rules.model,
        },
    }


def _byte_level(fields: Fields, vocabulary: _Vocabulary, words: _Words) -> _Rules:
    """Every byte is a letter, and letters are merged by a list."""
    letters: dict[str, object] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in words.patterns
    ]
    return _Rules(
        normalizer={"type": "NFC"} if words.compose else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*cuts, letters]},
        decoder=letters,
        model={
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": words.whole,
            "merges": _list(fields, "merges", str),
        },
    )


def _sentencepiece(fields: Fields, vocabulary: _Vocabulary) -> _Rules:
    """Characters are merged to the piece with the best score; what is no piece becomes byte tokens."""
    prefixed = fields.flag("add_space_prefix", True)
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    unknown = fields.ids("unknown_token_id")
    return _Rules(
        normalizer={
            "type": "Sequence",
            "normalizers": [*prefix, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}],
        },
        pre_tokenizer=None,
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        model={
            "unk_token": _token(vocabulary, unknown[0]) if unknown else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "merges": _merges(vocabulary, _list(fields, "scores", float)),
        },
    )


def _merges(vocabulary: _Vocabulary, scores: list[float]) -> list[list[str]]:
    """The pairs that make each piece, the piece with the best score first."""
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"the GGUF file has {len(vocabulary.tokens)} tokens and {len(scores)} scores: download it again"
        )
    pieces = {
        token: token_id
        for token_id, token in enumerate(vocabulary.tokens)
        if vocabulary.kinds[token_id] == _NORMAL
    }
    merges: list[list[str]] = []
    for piece in sorted(pieces, key=lambda piece: -scores[pieces[piece]]):
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in pieces and pair[1] in pieces]
        merges += [list(pair) for pair in sorted(known, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))]
    return merges


def _frame(fields: Fields, vocabulary: _Vocabulary, words: _Words) -> dict[str, object] | None:
    """What is put around a text: the beginning- and end-of-sequence tokens that the file asks for."""
    sides = (("bos", words.begin), ("eos", False))
    wanted = [name for name, usual in sides if fields.flag(f"add_{name}_token", usual)]
    ids = {name: ids[0] for name in wanted if (ids := fields.ids(f"{name}_token_id"))}
    if not ids:
        return None
    spelled = {name: _token(vocabulary, token_id) for name, token_id in ids.items()}

    def side(name: str, number: int) -> list[dict[str, object]]:
        return [{"SpecialToken": {"id": spelled[name], "type_id": number}}] if name in spelled else []

    def framed(sequence: str, number: int) -> list[dict[str, object]]:
        inside: dict[str, object] = {"Sequence": {"id": sequence, "type_id": number}}
        return [*side("bos", number), inside, *side("eos", number)]

    return {
        "type": "TemplateProcessing",
        "single": framed("A", 0),
        "pair": [*framed("A", 0), *framed("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [ids[name]], "tokens": [token]} for name, token in spelled.items()
        },
    }


def _config(fields: Fields, vocabulary: _Vocabulary, words: _Words) -> dict[str, object]:
    """The object for `tokenizer_config.json`."""
    result: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": fields.flag("add_bos_token", words.begin),
        "add_eos_token": fields.flag("add_eos_token", False),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if ids := fields.ids(f"{key}_token_id"):
            result[f"{name}_token"] = _token(vocabulary, ids[0])
    return result


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n"
