"""What is asked: texts for models with a tokenizer, token ids for those without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from cascadia_p2p.client import Prompt
from cascadia_p2p.errors import UsageError
from cascadia_p2p.workload import PROMPTS

ID_PROMPT: int = 33
"""Tokens of a prompt of ids: as many as the texts have in most vocabularies."""

MOST_PROMPTS = 100_000


class Prompts(Protocol):
    """Where prompts come from."""

    @property
    def words(self) -> str:
        """What they are, for the report."""

    def of(self, streams: int, request: int) -> Prompt:
        """The prompt of a request of the level of so many streams, counted from 0 over its cohorts."""


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """Texts in turn.

    Args:
        texts: at least one.
        words: what they are.
    """

    texts: Sequence[str]
    words: str

    def of(self, streams: int, request: int) -> Prompt:
        """See `Prompts`."""
        return self.texts[request % len(self.texts)]

    @classmethod
    def families(cls) -> TextPrompts:
        """The twelve families of the protocol."""
        return cls(tuple(PROMPTS.values()), f"{len(PROMPTS)} families in turn")

    @classmethod
    def read(cls, path: Path) -> TextPrompts:
        """The lines of a file that are not empty.

        Raises:
            UsageError: it can not be read, is no text, or has no such line.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"--prompt-file {path} can not be read ({error}): expected text in UTF-8, a prompt a line"
            ) from None
        lines = tuple(line.strip() for line in text.splitlines() if line.strip())
        if not 1 <= len(lines) <= MOST_PROMPTS:
            raise UsageError(
                f"--prompt-file {path} has {len(lines)} prompts: expected 1 to {MOST_PROMPTS}, one a line"
            )
        return cls(lines, f"{len(lines)} of {path.name} in turn")


@dataclass(frozen=True, slots=True)
class IdPrompts:
    """Random token ids, others for every request.

    Args:
        vocab: ids are below this.
        seed: the same ids at every run with the same one.
        length: ids of a prompt.
    """

    vocab: int
    seed: int = 0
    length: int = ID_PROMPT

    @property
    def words(self) -> str:
        """See `Prompts`."""
        return f"{self.length} random token ids"

    def of(self, streams: int, request: int) -> tuple[int, ...]:
        """See `Prompts`."""
        draw = np.random.default_rng([self.seed, streams, request])
        return tuple(draw.integers(0, self.vocab, self.length).tolist())
