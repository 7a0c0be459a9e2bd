"""Commands to a process and its answers, a line of JSON each: workers in other environments.

The worker calls `own_output` before anything that may print, then `serve`, both in its main thread.
Its answers have a descriptor of their own; whatever else it prints goes to its log. Standard library
alone, as both sides load it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

__all__ = ["ROOT", "Answer", "Failed", "Worker", "own_output", "serve"]

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 900.0

Answer = dict[str, Any]


class Failed(Exception):
    """A worker ended or did not answer; the text has the end of its log."""


def own_output() -> TextIO:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, commands: Mapping[str, Callable[..., Answer]]) -> None:
    """Carry out one command after the other until standard input ends."""
    for line in sys.stdin:
        given = json.loads(line)
        answer = commands[given.pop("do")](**given)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Worker:
    def __init__(
        self,
        python: Path,
        module: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._name, self._log = " ".join([module, *arguments[:2]]), log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(python), "-m", module, *arguments],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, do: str, **details: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **details}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None

    def hear(self) -> Answer:
        assert self._process.stdout is not None
        # One answer for one command: nothing of an earlier one waits in Python's buffer.
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        if not ready:
            raise self._failed(f"was silent for {PATIENCE_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failed("ended")
        found: Answer = json.loads(line)
        return found

    def ask(self, do: str, **details: Any) -> Answer:
        self.tell(do, **details)
        return self.hear()

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _failed(self, what: str) -> Failed:
        end = self._log.read_text(errors="replace").strip().splitlines()[-12:]
        return Failed("\n".join([f"{self._name} {what}", *end]))
