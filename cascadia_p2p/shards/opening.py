"""Opens whatever checkpoint lies at a path: a directory of safetensors files, or GGUF."""

from __future__ import annotations

from pathlib import Path

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.layout import names_in_words
from cascadia_p2p.shards.source import SafetensorsSource, Source


def open_source(path: Path) -> Source:
    """A checkpoint, to be used as a context manager.

    Args:
        path: a directory with `config.json` and safetensors files, a GGUF file, or a directory that holds
            one GGUF model and no safetensors.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    if path.is_file() and path.suffix != ".gguf":
        raise CheckpointError(
            f"{path} is a file: expected the directory of a checkpoint, with its config.json, or a .gguf file"
        )
    found = [path] if path.is_file() else _gguf_inside(path)
    if not found:
        return SafetensorsSource(path)
    if len(found) > 1:
        raise CheckpointError(
            f"{path} holds several GGUF models ({names_in_words([file.name for file in found])}): name one"
        )
    # The package behind this is imported only where there is such a file.
    from cascadia_p2p.shards.gguf import GgufSource

    return GgufSource(found[0])


def _gguf_inside(path: Path) -> list[Path]:
    """The GGUF files of a directory that has no safetensors; of a model in several files the first."""
    if not path.is_dir() or next(path.glob("*.safetensors"), None) or next(path.glob("*.index.json"), None):
        return []
    files = sorted(path.glob("*.gguf"))
    return [file for file in files if "-of-" not in file.name or "-00001-of-" in file.name]
