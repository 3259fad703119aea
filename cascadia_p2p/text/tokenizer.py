"""The model's tokenizer, from its `tokenizer.json`."""

from __future__ import annotations

import contextlib
import difflib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers.decoders import ByteLevel

from cascadia_p2p.errors import ErrorCode, RequestError, ShardError

__all__ = ["Tokenizer"]


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()

# How vocabularies of SentencePiece spell a space, and bytes of characters that they do not have.
_WORD_MARK: Final = "\u2581"
_BYTE_TOKEN: Final = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """Encodes and decodes text; safe to use from several threads."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        added = inner.get_added_tokens_decoder()
        self.added: Mapping[str, int] = {token.content: id_ for id_, token in added.items()}
        """The id of every added token, special or not, by its spelling."""
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        """The ids of special tokens, which are never shown."""
        self._pieces: dict[int, bytes] = {}
        self.byte_level = isinstance(inner.decoder, ByteLevel)
        """Whether each token is a string of bytes, so that text is their concatenation."""

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.json`.

        Raises:
            ShardError: the file is missing, or is not a tokenizer.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ShardError(f"the tokenizer {path} can not be read: {error.strerror}") from error
        try:
            return cls(read_tokenizer(content))
        except ValueError as error:
            raise ShardError(f"{path} is not a tokenizer.json that can be used: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included; the model's padded vocabulary may be larger."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def special_id(self, name: str) -> int:
        """The id of an added token by its exact spelling, as in `<|endoftext|>`.

        Raises:
            ShardError: the tokenizer has no such token.
        """
        if name in self.added:
            return self.added[name]
        close = difflib.get_close_matches(name, self.added, n=1)
        hint = f"; the nearest is '{close[0]}'" if close else ""
        raise ShardError(f"the tokenizer has no special token '{name}'{hint}")

    def encode(self, text: str, *, specials: bool = True, affixes: bool | None = None) -> list[int]:
        """The token ids of `text`; other threads go on meanwhile.

        Args:
            text: any Unicode text.
            specials: True reads the spelling of a special token in the text as that token; False takes all as
                plain words, which is right for what a chat user wrote.
            affixes: whether to add the tokens that the tokenizer puts around a text; None adds them together
                with `specials` (as transformers does for a prompt).

        Raises:
            RequestError: the text is not valid Unicode (a lone surrogate), or the tokenizer fails at it.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                ErrorCode.BAD_REQUEST,
                f"the text is not valid Unicode: character {error.start} is half of a surrogate pair",
            ) from error
        with self._lock:
            self._inner.encode_special_tokens = not specials
            added = specials if affixes is None else affixes
            try:
                with _failing():
                    # Of all its methods only those for batches let other threads run.
                    batch = self._inner.encode_batch_fast([text], add_special_tokens=added)
            except ValueError as error:
                raise RequestError(
                    ErrorCode.INTERNAL, f"the model's tokenizer failed at this text: {error}"
                ) from None
        ids: list[int] = batch[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """The text of `ids`; ids that the tokenizer does not know give nothing.

        Args:
            ids: token ids.
            specials: whether special tokens show as their spelling.
        """
        return self._inner.decode(list(ids), skip_special_tokens=not specials)

    def spelling(self, token_id: int) -> str:
        """One token's text by itself, special ones as they are spelled; empty for an unknown id.

        Bytes that are no whole character show as U+FFFD.
        """
        if self.byte_level:
            return self.piece(token_id).decode(errors="replace")
        token = self._inner.id_to_token(token_id) or ""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)]).decode(errors="replace")
        return token.replace(_WORD_MARK, " ")

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token of a byte-level vocabulary; empty for an unknown id."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = _piece(self._inner.id_to_token(token_id) or "")
        return piece


def read_tokenizer(content: bytes) -> tokenizers.Tokenizer:
    """The tokenizer in the bytes of a `tokenizer.json`.

    Raises:
        ValueError: it is none.
    """
    with _failing():
        return tokenizers.Tokenizer.from_buffer(content)


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Let all ways of the library to fail be a ValueError; its panics pass by `except Exception`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise ValueError(str(error)) from None


def _piece(token: str) -> bytes:
    # Added tokens are spelled as text, not in the byte alphabet; the library's decoder tells them apart so.
    if all(char in _BYTES for char in token):
        return bytes(_BYTES[char] for char in token)
    return token.encode()
