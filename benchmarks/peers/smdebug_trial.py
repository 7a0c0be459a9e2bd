"""A run of several ranks written with smdebug's own writer, and one tensor of it read with its trial.

The hook writes with that writer too, but a process has one hook and is one rank.

On S3 the processes it forks to read many objects share one connection with their parent and get each
other's answers. Each is given its own here: otherwise there is nothing to compare.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from smdebug.core.access_layer.s3handler import (  # type: ignore[import-not-found]
    S3Handler,
)
from smdebug.core.access_layer.utils import (  # type: ignore[import-not-found]
    training_has_ended,
)
from smdebug.core.modes import ModeKeys  # type: ignore[import-not-found]
from smdebug.core.writer import FileWriter  # type: ignore[import-not-found]
from smdebug.pytorch.collection import CollectionManager  # type: ignore[import-not-found]
from smdebug.trials import create_trial  # type: ignore[import-not-found]

from benchmarks.peers.values import Run, checksum, value


def prepare() -> None:
    os.register_at_fork(after_in_child=S3Handler.client.cache_clear)


def name_of(number: int) -> str:
    return f"parts.{number}"


def write(place: str, run: Run) -> None:
    for rank in range(run.ranks):
        worker = f"worker_{rank}"
        collections = CollectionManager()
        collections.set_num_workers(run.ranks)
        collections.export(place, f"{worker}_collections.json")
        for step in range(run.steps):
            with FileWriter(trial_dir=place, step=step, worker=worker) as writer:
                for number in range(run.tensors):
                    data = value(run, rank, step, number)
                    writer.write_tensor(data, name_of(number), mode=ModeKeys.TRAIN, mode_step=step)
    training_has_ended(place)


def read_one_by_one(place: str, number: int, every: int) -> dict[str, Any]:
    with _counting_sleep() as slept:
        begin = time.perf_counter()
        trial = create_trial(place)
        opened = time.perf_counter()
        tensor = trial.tensor(name_of(number))
        steps = trial.steps()[::every]
        arrays = [tensor.value(step, worker=worker) for worker in trial.workers() for step in steps]
        end = time.perf_counter()
    return {
        "open_s": opened - begin,
        "read_s": end - opened,
        "slept_s": sum(slept),
        "values": len(arrays),
        "checksum": checksum(arrays),
    }


@contextmanager
def _counting_sleep() -> Iterator[list[float]]:
    """It pauses before it believes that a run has ended: told apart from its work."""
    slept: list[float] = []
    real = time.sleep

    def sleep(seconds: float) -> None:
        begin = time.perf_counter()
        real(seconds)
        slept.append(time.perf_counter() - begin)

    time.sleep = sleep  # type: ignore[assignment]
    try:
        yield slept
    finally:
        time.sleep = real
