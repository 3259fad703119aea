"""The command line with a stage that kills its process when it is to compute a stream of a certain seed.

    python crashing.py SEED join ...

The seed is what every stage is told of a request; a prompt's ids only the first one sees.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from cascadia_p2p.cli import main
from cascadia_p2p.engine.stage import Stage
from cascadia_p2p.wire.frames import OperationKind


def crash_at(seed: int) -> None:
    """Let every stage of this process be one that crashes."""
    apply = Stage.apply
    deadly: set[int] = set()

    def crashing(stage: Stage, segments: Any, operations: Any, *rest: Any) -> Any:
        started = operations[operations["kind"] == OperationKind.START]
        deadly.update(started["stream"][started["seed"] == seed].tolist())
        if deadly & set(segments["stream"].tolist()):
            os.kill(os.getpid(), signal.SIGKILL)
        return apply(stage, segments, operations, *rest)

    Stage.apply = crashing  # type: ignore[method-assign]


if __name__ == "__main__":
    crash_at(int(sys.argv[1]))
    raise SystemExit(main(sys.argv[2:]))
