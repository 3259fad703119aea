"""A tokenizer for sample models: one token a byte, and the special tokens of the chat framing."""

from __future__ import annotations

_FRAMING = (
    "endoftext",
    "message_user",
    "message_model",
    "message_system",
    "message_tool",
    "content_text",
    "content_image",
    "content_model_end_sampling",
    "content_thinking",
    "end_message",
    "content_audio_input",
    "content_tool_error",
    "content_xml",
    "audio_end",
    "content_invoke_tool_json",
    "content_invoke_tool_text",
)

BYTES = 256
"""Ids below are bytes; the special tokens stand above."""


def special_tokens(vocab_valid: int) -> dict[str, int]:
    """Id by name, up to the last valid id; ids that mean nothing are `<|unused_ID|>`."""
    names = [*_FRAMING, *(f"unused_{number}" for number in range(BYTES + len(_FRAMING), vocab_valid))]
    return {f"<|{name}|>": BYTES + place for place, name in enumerate(names) if BYTES + place < vocab_valid}


def tokenizer_json(vocab_valid: int) -> dict[str, object]:
    """The object for `tokenizer.json`: byte-level, without merges; id of a byte is its value.

    Args:
        vocab_valid: ids that the tokenizer covers, at least 256.
    """
    added = [
        {
            "id": number,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for content, number in special_tokens(vocab_valid).items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_letters())},
            "merges": [],
        },
    }


def _letters() -> list[str]:
    """How byte-level tokenizers write each byte: itself if printable, else a character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(BYTES)]
