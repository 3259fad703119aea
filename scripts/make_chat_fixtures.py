"""Renders the test conversations with transformers' `apply_chat_template` and writes what it gives.

Needs the `reference` extra. Run it after a change of tests/text/chats.py or of a template there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "text")]

from chats import GOLDEN, TALKS, TEMPLATES, VARIABLES, Talk, tokenizer_content  # noqa: E402


def rendered() -> dict[str, dict[str, object]]:
    """For each template and conversation the text and its ids, or the refusal."""
    import tokenizers
    import transformers

    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(tokenizer_content())), **VARIABLES
    )

    def one(template: str, talk: Talk) -> dict[str, object]:
        given = {"tools": talk.tools, "chat_template": template, "add_generation_prompt": talk.generation}
        try:
            text = made.apply_chat_template(talk.messages, tokenize=False, **given, **talk.options)
            ids = made.apply_chat_template(talk.messages, return_dict=False, **given, **talk.options)
        # Whatever a template raises is what is compared.
        except Exception as error:
            return {"error": str(error)}
        return {"text": text, "ids": ids}

    return {name: {talk.name: one(source, talk) for talk in TALKS} for name, source in TEMPLATES.items()}


if __name__ == "__main__":
    content = json.dumps(rendered(), ensure_ascii=False, indent=1)
    # A line for each list of ids.
    GOLDEN.write_text(
        content.replace(",\n    ", ",").replace("[\n    ", "[").replace("\n   ]", "]") + "\n",
        encoding="utf-8",
    )
