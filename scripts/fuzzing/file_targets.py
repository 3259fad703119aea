"""Targets that read files from elsewhere: keys, manifests, weights, tokenizers, settings, templates."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import orjson

from cascadia_p2p.config import load_config
from cascadia_p2p.errors import CheckpointError, RequestError, ShardError, UsageError
from cascadia_p2p.keys.files import KeyFile, read_key, write_key
from cascadia_p2p.models.family import read_config, read_exported
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import find_recipe
from cascadia_p2p.sample.tokenizer import tokenizer_json
from cascadia_p2p.shards.encodings import EXACT
from cascadia_p2p.shards.export import export
from cascadia_p2p.shards.gguf_header import read_gguf_header
from cascadia_p2p.shards.gguf_tokenizer import end_ids, tokenizer_files
from cascadia_p2p.shards.manifest import MANIFEST, TABLE, Manifest, ShardTable
from cascadia_p2p.shards.safetensors import read_header
from cascadia_p2p.text.chat import Chat
from cascadia_p2p.text.template import MAX_S, MAX_TEXT, ChatTemplate
from cascadia_p2p.text.tokenizer import Tokenizer
from cascadia_p2p.transport.curve import KeyPair
from fuzzing.target import Target, promise

SAMPLE: Final = "tiny12"
VOCAB: Final = 280


@cache
def scratch() -> Path:
    """A directory for the files of this process; in memory where the system has such a place."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="cascadia-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))


def _file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A run that lays an input down as a file of its own and reads that."""

    def run(data: bytes) -> object:
        path = scratch() / name
        path.write_bytes(data)
        path.chmod(0o600)
        return read(path)

    return run


def _made(write: Callable[[Path], object]) -> Callable[[], list[bytes]]:
    """Seeds out of what is written into a new directory: every file of it."""

    def seeds() -> list[bytes]:
        with tempfile.TemporaryDirectory() as directory:
            write(Path(directory))
            return [path.read_bytes() for path in sorted(Path(directory).rglob("*")) if path.is_file()]

    return seeds


def _keys(directory: Path) -> None:
    fleet, client = KeyPair.new(), KeyPair.new()
    write_key(KeyFile(directory / "fleet.key", "office", fleet, fleet.public))
    write_key(KeyFile(directory / "a.key", "office", client, fleet.public, "alice"))


def _few(tensors: dict[str, object]) -> bytes:
    """A whole safetensors file."""
    header = orjson.dumps(tensors)
    return len(header).to_bytes(8, "little") + header + bytes(64)


def _short_table(data: bytes) -> bytes:
    """A shard's table with only its first file."""
    table = orjson.loads(data)
    table["files"] = dict(list(table["files"].items())[:1])
    return orjson.dumps(table)


@cache
def _exported() -> dict[str, list[bytes]]:
    """Files of a small export, by what they are."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        checkpoint = make_checkpoint(root / "checkpoint", find_recipe(SAMPLE))
        export(checkpoint, root / "model", shards=2, encodings=EXACT)
        weights = sorted(checkpoint.glob("*.safetensors"))[0].read_bytes()
        length = 8 + int.from_bytes(weights[:8], "little")
        model = root / "model"
        return {
            "manifest": [(model / "shard-00" / MANIFEST).read_bytes()],
            "table": [_short_table((model / "shard-00" / TABLE).read_bytes())],
            "config": [(checkpoint / "config.json").read_bytes(), orjson.dumps(LLAMA)],
            "safetensors": [weights[:length], _few(TENSORS)],
        }


def _gguf_seed() -> list[bytes]:
    """A file of two pairs and one tensor, and one with the metadata of a tokenizer."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def texts(name: str, values: list[str]) -> bytes:
        return text(name) + struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(text, values))

    def numbers(name: str, kind: int, form: str, values: list[float]) -> bytes:
        packed = struct.pack(f"<{len(values)}{form}", *values)
        return text(name) + struct.pack("<IIQ", 9, kind, len(values)) + packed

    def word(name: str, value: str) -> bytes:
        return text(name) + struct.pack("<I", 8) + text(value)

    tensor = text("w") + struct.pack("<IQIQ", 1, 32, 0, 0)
    pairs = [word("general.architecture", "llama"), text("general.alignment") + struct.pack("<II", 4, 32)]
    small = b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + b"".join(pairs) + tensor
    tokens = ["<unk>", "<s>", "</s>", "\u2581a", "b", "ab", "<0x41>"]
    spoken = [
        word("tokenizer.ggml.model", "llama"),
        texts("tokenizer.ggml.tokens", tokens),
        numbers("tokenizer.ggml.scores", 6, "f", [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, 0.0]),
        numbers("tokenizer.ggml.token_type", 5, "i", [2, 3, 3, 1, 1, 1, 6]),
        text("tokenizer.ggml.eos_token_id") + struct.pack("<II", 4, 2),
    ]
    merged = [
        word("tokenizer.ggml.model", "gpt2"),
        word("tokenizer.ggml.pre", "qwen2"),
        texts("tokenizer.ggml.tokens", ["a", "b", "ab", "<|im_end|>"]),
        texts("tokenizer.ggml.merges", ["a b"]),
        numbers("tokenizer.ggml.token_type", 5, "i", [1, 1, 1, 3]),
    ]
    made = [b"GGUF" + struct.pack("<IQQ", 3, 0, len(each)) + b"".join(each) for each in (spoken, merged)]
    return [small + bytes(-len(small) % 32) + bytes(128), *made]


def _gguf(path: Path) -> None:
    header = read_gguf_header(path)
    size = path.stat().st_size
    promise(
        all(each.start + each.nbytes <= size for each in header.tensors.values()), "a tensor beyond the file"
    )
    files = tokenizer_files(header.metadata)
    if files:
        end_ids(header.metadata)


def _safetensors(path: Path) -> None:
    size = path.stat().st_size
    tensors = read_header(path)
    promise(all(each.start + each.nbytes <= size for each in tensors.values()), "a tensor beyond the file")


def _manifest(path: Path) -> None:
    folder = path.parent / "manifest"
    folder.mkdir(exist_ok=True)
    path.replace(folder / MANIFEST)
    manifest = Manifest.load(folder)
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    promise(Manifest.load(folder).to_bytes() == manifest.to_bytes(), "a manifest does not come back the same")


def _model_config(data: bytes) -> None:
    """A checkpoint's config.json; what an export makes of it must be readable again."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return
    if isinstance(value, dict):
        family, config = read_config(value, None)
        promise(read_exported(family, config.to_json()) == config, "a config does not come back the same")


def _tokenizer(path: Path) -> None:
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode("Why is the sky blue? \u00e9")
    tokenizer.decode(ids[:100])
    for token in ids[:8]:
        tokenizer.spelling(token)


@cache
def plain_tokenizer() -> Tokenizer:
    """The tokenizer of sample models."""
    path = scratch() / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_json(VOCAB)))
    return Tokenizer.load(path)


def _chat(path: Path) -> None:
    """The file beside a tokenizer, and a conversation in its form."""
    folder = path.parent / "chat"
    folder.mkdir(exist_ok=True)
    path.replace(folder / "tokenizer_config.json")
    chat = Chat.load(folder, plain_tokenizer())
    chat.prompt([{"role": "user", "content": "hello"}])


TENSORS: Final[dict[str, object]] = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
    "__metadata__": {"format": "pt"},
}
LLAMA: Final = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "eos_token_id": [2, 3], "tie_word_embeddings": True,
    "rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}  # fmt: skip

MESSAGES: Final = (
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello"},
    {
        "role": "assistant",
        "content": "ha",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1]}}}],
    },
)


def _template(data: bytes) -> None:
    text = ChatTemplate(data.decode("utf-8", "replace"), {"bos_token": "<s>", "eos_token": "</s>"}).render(
        MESSAGES, tools=[{"name": "f", "parameters": {}}]
    )
    promise(len(text) <= MAX_TEXT, "a longer text than the limit")


TEMPLATES: Final = (
    b"{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}",
    b"{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    b"{{ ns.n ~ ',' }}{% endfor %}",
    b"{% macro f(x) %}{{ x | tojson(indent=2) }}{% endmacro %}{{ f(tools) }}"
    b"{% if add_generation_prompt %}a{% endif %}",
    b"{{ messages | map(attribute='role') | join(', ') }}{{ '%s-%5d' | format('a', 3) }}"
    b"{{ 'ab' * 3 }}{{ 2 ** 8 }}",
    b"{{ raise_exception('no') if messages[0].role != 'user' else strftime_now('%Y') }}",
    b"{{ messages[1].content.split('l') }}"
    b"{{ 'x'.join(['a', 'b']) | replace('a', 'bb') | upper | indent(4) }}",
)

CONFIG: Final = b"""fleet = "office"
model = "/srv/model"
peers = ["192.168.1.20:7600", "pc2:7600"]
bind = "192.168.1.20"
port = 7600
mdns = true
slots = 4
precision = "fine"
[limits]
gone_s = 2.0
drain_s = 60
"""

CHAT_CONFIG: Final = orjson.dumps(
    {
        "eos_token": {"content": "<|endoftext|>"},
        "bos_token": None,
        "chat_template": [{"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"}],
    }
)


def _sample(kind: str) -> Callable[[], list[bytes]]:
    return lambda: _exported()[kind]


TARGETS: Final = (
    Target("key", _file("a.key", read_key), _made(_keys), (UsageError,)),
    Target("manifest", _file("manifest.part", _manifest), _sample("manifest"), (ShardError,)),
    Target("table", _file("shard.json", ShardTable.load), _sample("table"), (ShardError,)),
    Target("model_config", _model_config, _sample("config"), (CheckpointError,)),
    Target("safetensors", _file("a.safetensors", _safetensors), _sample("safetensors"), (CheckpointError,)),
    Target("gguf", _file("a.gguf", _gguf), _gguf_seed, (CheckpointError,), memory_base=4 << 20),
    Target(
        "tokenizer",
        _file("t.json", _tokenizer),
        lambda: [json.dumps(tokenizer_json(258)).encode(), json.dumps(_small_bpe()).encode()],
        (ShardError, RequestError),
        memory_base=4 << 20,
    ),
    Target("chat", _file("c.json", _chat), lambda: [CHAT_CONFIG], (RequestError,), MAX_S + 1, 64 << 20),
    Target("template", _template, lambda: list(TEMPLATES), (ShardError, RequestError), MAX_S + 1, 64 << 20),
    Target(
        "config",
        _file("c.toml", lambda path: load_config(file=path, environ={})),
        lambda: [CONFIG],
        (UsageError,),
        memory_base=4 << 20,
    ),
)


def _small_bpe() -> dict[str, object]:
    whole = tokenizer_json(256)
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "unk_token": None}
    return whole | {"added_tokens": [], "model": model}
