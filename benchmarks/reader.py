"""The process of one format: writes a run and reads it, as it is told. See `pipe`.

python -m benchmarks.reader smdist|smdebug
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from benchmarks.peers.values import Run
from benchmarks.pipe import Answer, own_output, serve


def main() -> None:
    answers = own_output()
    module: Any = importlib.import_module(f"benchmarks.peers.{sys.argv[1]}_trial")

    def write(place: str, **run: int) -> Answer:
        module.write(place, Run(**run))
        return {}

    def read(place: str, number: int, every: int, how: str) -> Answer:
        found: Answer = getattr(module, f"read_{how}")(place, number, every)
        return found

    module.prepare()
    serve(answers, {"write": write, "read": read})
    os._exit(0)


if __name__ == "__main__":
    main()
