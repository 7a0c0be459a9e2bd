"""The ranks of one peer, asked together, and what the processes beside them use."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.environments import interpreter
from benchmarks.pipe import Answer, Worker

__all__ = ["PEERS", "Team", "child_named", "cpu_s", "descendants"]

# Where each is installed; said here too, as loading their modules needs what they need.
PEERS = {
    "none": "main",
    "smdist": "main",
    "smdebug": "smdebug",
    "dcp": "main",
    "tensorboard": "peers",
    "torch_save": "main",
    "safetensors": "main",
    "memcpy": "main",
}


class Team:
    """All ranks get each command at once and are done when the last is."""

    def __init__(
        self,
        peer: str,
        model: str,
        *,
        threads: int,
        ranks: int,
        logs: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.peer = peer
        port = _free_port() if ranks > 1 else 0
        more = {"SMDIST_LAUNCH": f"{peer}-{os.getpid()}-{port}", **environment}
        python = interpreter(PEERS[peer])
        shared = ["--threads", str(threads), "--ranks", str(ranks), "--port", str(port)]
        self._workers = [
            Worker(
                python,
                "benchmarks.trainer",
                [peer, model, *shared, "--rank", str(rank)],
                logs / f"{peer}-{rank}.log",
                more,
            )
            for rank in range(ranks)
        ]

    def ask(self, do: str, **details: Any) -> list[Answer]:
        for worker in self._workers:
            worker.tell(do, **details)
        return [worker.hear() for worker in self._workers]

    def steps(self, count: int, clock: str = "wall") -> list[float]:
        """Milliseconds of each step: a step of several ranks lasts as long as the slowest."""
        answers = self.ask("steps", count=count)
        return [max(times) for times in zip(*(answer[clock] for answer in answers), strict=True)]

    def both_clocks(self, count: int) -> tuple[list[float], list[float]]:
        answers = self.ask("steps", count=count)
        wall, cpu = (
            [max(times) for times in zip(*(answer[clock] for answer in answers), strict=True)]
            for clock in ("wall", "cpu")
        )
        return wall, cpu

    def helpers_cpu_s(self) -> float:
        """Of the processes that the ranks started, as long as these run."""
        return sum(cpu_s(pid) for worker in self._workers for pid in descendants(worker.pid))

    def end(self) -> None:
        for worker in self._workers:
            worker.end()


def cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []
    return children + [each for child in children for each in descendants(child)]


def child_named(part: str) -> int:
    """The process id of a child of this process, by a part of its command; 0: none."""

    def is_it(pid: int) -> bool:
        return part in Path(f"/proc/{pid}/cmdline").read_text()

    return next(filter(is_it, descendants(os.getpid())), 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
