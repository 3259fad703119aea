"""Detokenisation one token at a time: no half characters, and no finished character held back."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Protocol

from cascadia_p2p.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]

_REPLACEMENT = "\ufffd"
_OPEN = re.compile(
    rb"(?:[\xc2-\xdf]|\xe0[\xa0-\xbf]?|[\xe1-\xec\xee\xef][\x80-\xbf]?|\xed[\x80-\x9f]?"
    rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|[\xf1-\xf3][\x80-\xbf]{0,2}|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?)\Z"
)
"""Bytes at the end that may still become a character (Unicode 16, table 3-7). Python's incremental decoder
also waits for surrogates, which never do."""
_LONGEST_HOLD = 8
"""Tokens after which what still is no character never becomes one: UTF-8 needs at most four bytes."""


class Detokenizer:
    """Turns one stream's token ids into text as they come.

    The pieces together are the tokenizer's whole decode, except that a character which the last token leaves
    unfinished is dropped.

    Args:
        tokenizer: the model's.
        hidden: ids that show nothing, beside the tokenizer's special ones: the stop ids.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int] = ()) -> None:
        self._hidden = tokenizer.special_ids | frozenset(hidden)
        self._decoder: _Decoder = _Bytes(tokenizer) if tokenizer.byte_level else _Window(tokenizer)

    def add(self, token_id: int) -> str:
        """The text that this token finishes; may be empty."""
        return "" if token_id in self._hidden else self._decoder.add(token_id)

    def extend(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens finish."""
        return self._decoder.extend(token_id for token_id in token_ids if token_id not in self._hidden)


class _Decoder(Protocol):
    def add(self, token_id: int) -> str: ...

    def extend(self, token_ids: Iterable[int]) -> str: ...


class _Bytes:
    """Byte-level vocabularies: text is the UTF-8 of the tokens' bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._open = b""

    def add(self, token_id: int) -> str:
        return self._show(self._open + self._tokenizer.piece(token_id))

    def extend(self, token_ids: Iterable[int]) -> str:
        return self._show(self._open + b"".join(map(self._tokenizer.piece, token_ids)))

    def _show(self, data: bytes) -> str:
        match = _OPEN.search(data, max(0, len(data) - 3))
        end = match.start() if match else len(data)
        self._open = data[end:]
        return data[:end].decode("utf-8", "replace")


class _Window:
    """Any other vocabulary: decodes the last few tokens again, and shows what is new and finished.

    The window keeps the newest finished piece as context, because decoders treat the first token of a text
    differently from later ones.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._shown = 0

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        held = len(self._ids) - self._context
        finished = len(text) if held > _LONGEST_HOLD else len(text.rstrip(_REPLACEMENT))
        new = text[self._shown : finished]
        self._shown = max(self._shown, finished)
        if new and finished == len(text):
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._shown = len(self._tokenizer.decode(self._ids))
        return new

    def extend(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.add, token_ids))
