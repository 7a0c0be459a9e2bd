"""A run of several ranks written with smdist's hook, and one tensor of it read with its trial."""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch
from torch import nn

import smdist.pytorch as smd
from benchmarks.peers.values import Run, checksum, value


class _Holder(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.parts = nn.ParameterList(
            nn.Parameter(torch.zeros(run.size)) for _ in range(run.tensors)
        )

    def forward(self) -> torch.Tensor:
        return torch.zeros(())


def write(place: str, run: Run) -> None:
    model = _Holder(run)
    for rank in range(run.ranks):
        hook = smd.Hook(
            out_dir=place,
            save_config=smd.SaveConfig(save_interval=1),
            include_regex=r"parts\.\d+$",
            include_workers="all",
            on_error="raise",
            rank=rank,
            world_size=run.ranks,
        )
        hook.register_module(model)
        for step in range(run.steps):
            with torch.no_grad():
                for number, part in enumerate(model.parts):
                    part.copy_(torch.from_numpy(value(run, rank, step, number)))
            model()
        hook.close()


def prepare() -> None:
    """smdebug loads its SDK when it is imported, which nobody counts: so is ours."""
    importlib.import_module("smdist.storage.s3.connection")


def name_of(number: int) -> str:
    return f"_Holder_parts.{number}"


def read_at_once(place: str, number: int, every: int) -> dict[str, Any]:
    begin = time.perf_counter()
    with smd.create_trial(place) as trial:
        opened = time.perf_counter()
        steps = trial.steps()[::every]
        found = trial.values([name_of(number)], steps)[name_of(number)]
        arrays = [array for ranks in found.values() for array in ranks.values()]
        return _answer(begin, opened, arrays)


def read_one_by_one(place: str, number: int, every: int) -> dict[str, Any]:
    begin = time.perf_counter()
    with smd.create_trial(place) as trial:
        opened = time.perf_counter()
        tensor = trial.tensor(name_of(number))
        arrays = [
            tensor.value(step, worker=worker)
            for worker in trial.workers()
            for step in trial.steps()[::every]
        ]
        return _answer(begin, opened, arrays)


def _answer(begin: float, opened: float, arrays: list[Any]) -> dict[str, Any]:
    end = time.perf_counter()
    return {
        "open_s": opened - begin,
        "read_s": end - opened,
        "values": len(arrays),
        "checksum": checksum(arrays),
    }
