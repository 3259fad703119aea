"""Trains a small SentencePiece model and keeps its pieces, as GGUF holds them, and how it cuts some texts.

Needs the `sentencepiece` package, which nothing else here does.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import sentencepiece  # noqa: E402
from fixtures.smollm import TEXTS  # noqa: E402

OUT = ROOT / "tests" / "fixtures" / "sentencepiece.json"
SIZE = 700


def main() -> int:
    """Write the fixture."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((ROOT / "README.md").read_text(encoding="utf-8").splitlines()),
        model_writer=made,
        model_type="bpe",
        vocab_size=SIZE,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.99,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    kinds = [
        2 if model.is_unknown(n) else 3 if model.is_control(n) else 6 if model.is_byte(n) else 1
        for n in range(SIZE)
    ]
    content = {
        "tokens": [model.id_to_piece(n) for n in range(SIZE)],
        "scores": [model.get_score(n) for n in range(SIZE)],
        "token_type": kinds,
        "texts": [model.encode(text) for text in TEXTS],
    }
    OUT.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
