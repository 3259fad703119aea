"""A program like `cascadia-p2p` whose stage takes longer for a frame for as long as a file is there.

    python slow.py FILE join ...

The file holds the seconds: with it, answers outlast what a test does meanwhile.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from cascadia_p2p.cli import main
from cascadia_p2p.engine.stage import Stage


def install(file: Path) -> None:
    """Let every frame look at the file."""
    apply = Stage.apply

    def slowly(stage: Stage, *args: Any) -> Any:
        # Its writer may take it away, or just be writing.
        with contextlib.suppress(FileNotFoundError, ValueError):
            time.sleep(float(file.read_text()))
        return apply(stage, *args)

    Stage.apply = slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
