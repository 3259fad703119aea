"""Asks llama.cpp and transformers twenty prompts on the SmolLM2 GGUF, and keeps what they answer.

Needs the `reference` and `llamacpp` extras. transformers reads the GGUF by its own loader, in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import gguf  # noqa: E402
import llama_cpp  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from fixtures.smollm import ANSWERS, LOGITS, PROMPTS, TEXTS, kept_ids  # noqa: E402

NEW_TOKENS = 40
CONTEXT = 512


def main() -> int:
    """Write the fixtures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path, help="the file that 'pull smollm2-135m' prints")
    path = parser.parse_args().gguf
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as work:
        decoded = write_decoded(path, Path(work) / "decoded.gguf")
        as_it_is, plain = open_cpp(path, llama_cpp.GGML_TYPE_F16), open_cpp(decoded, llama_cpp.GGML_TYPE_F32)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        entries, logits = [], {}
        for number, prompt in enumerate(PROMPTS):
            ids = as_it_is.tokenize(prompt.encode(), add_bos=False, special=True)
            quantised, decoded_answer = answer_cpp(as_it_is, ids), answer_cpp(plain, ids)
            reference, rows = answer_transformers(model, ids)
            entry = {"ids": ids, "quantised": quantised, "decoded": decoded_answer, "transformers": reference}
            entries.append(entry)
            logits[str(number)] = rows[:, kept_ids(rows.shape[1])]
            agree = [reference[:32] == answer["ids"][:32] for answer in (quantised, decoded_answer)]
            print(number, agree, file=sys.stderr, flush=True)
        texts = [as_it_is.tokenize(text.encode(), add_bos=False, special=False) for text in TEXTS]
    versions = {
        "llama_cpp_python": llama_cpp.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    content = {"made_with": versions, "prompts": entries, "texts": texts}
    ANSWERS.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    np.savez_compressed(LOGITS, **logits)
    return 0


def write_decoded(source: Path, out: Path) -> Path:
    """The same file with every tensor in F32, so that llama.cpp computes in float32 throughout."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind, value = field.types[0], field.contents()
        writer.add_key_value(field.name, value, kind, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def open_cpp(path: Path, cache: int) -> llama_cpp.Llama:
    """A file in llama.cpp, its keys and values kept in the given type."""
    return llama_cpp.Llama(
        str(path), n_ctx=CONTEXT, verbose=False, n_threads=2, type_k=cache, type_v=cache, flash_attn=False
    )


def answer_cpp(model: llama_cpp.Llama, ids: list[int]) -> dict[str, object]:
    """Greedy tokens, and by how much each leads over the next one, in logits."""
    model.reset()
    model.eval(ids)
    tokens: list[int] = []
    leads: list[float] = []
    while len(tokens) < NEW_TOKENS:
        row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), shape=(model.n_vocab(),))
        low, high = np.sort(row)[-2:].tolist()
        tokens.append(int(row.argmax()))
        leads.append(round(high - low, 4))
        if tokens[-1] == model.token_eos():
            break
        model.eval(tokens[-1:])
    return {"ids": tokens, "leads": leads}


def answer_transformers(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], np.ndarray]:
    """Greedy tokens, and logits at the prompt's last position and at the last that was generated from."""
    prompt = torch.tensor([ids])
    with torch.no_grad():
        sequence = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=2,
            pad_token_id=2,
        )[0]
        logits = model(sequence[None, :-1]).logits[0].numpy()
    return sequence[len(ids) :].tolist(), logits[[len(ids) - 1, -1]]


if __name__ == "__main__":
    sys.exit(main())
