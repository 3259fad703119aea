"""Text to token ids and back: the tokenizer's file, and detokenisation one token at a time."""

from cascadia_p2p.text.detokenizer import Detokenizer
from cascadia_p2p.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
