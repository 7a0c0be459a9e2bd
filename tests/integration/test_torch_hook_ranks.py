"""Jobs of two ranks: every rank's own values, local or reduced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.torch_jobs import read, same

pytestmark = pytest.mark.ranks
REPOSITORY = Path(__file__).parents[2]
JOB = REPOSITORY / "tests" / "integration" / "torch_ranks_job.py"

LOCAL: list[dict[str, Any]] = [
    {},
    {"register": "inner"},
    {"ddp": {"gradient_as_bucket_view": True}, "set_to_none": False},
    {"ddp": {"static_graph": True}},
    {"ddp": {"find_unused_parameters": True, "gradient_as_bucket_view": True}},
]
SYNCED: list[dict[str, Any]] = [
    {"stage": "synced"},
    {"stage": "synced", "optimizer": True},
    {"stage": "synced", "ddp": {"static_graph": True, "gradient_as_bucket_view": True}},
]
CASES = [*LOCAL, *SYNCED]
Copies = dict[str, np.ndarray[Any, Any]]


def run_job(command: list[str], folder: Path, ranks: list[list[str]], **order: Any) -> None:
    """`ranks`: the arguments that make one process each."""
    (folder / "kept").mkdir()
    order = {"out": str(folder / "runs"), "kept": str(folder / "kept"), **order}
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SMDIST_RANK", "SMDIST_WORLD_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, *command, str(JOB), json.dumps(order), *rank],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(ranks), errors


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchrun")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run_job(torchrun, folder, [[]], cases=CASES)
    return folder


def copies(folder: Path, case: int, rank: int) -> Copies:
    with np.load(folder / "kept" / str(case) / f"{rank}.npz") as archive:
        return {name: archive[name] for name in archive.files}


@pytest.mark.parametrize("case", range(len(CASES)), ids=[json.dumps(case) for case in CASES])
def test_every_rank_has_its_own_values(job: Path, case: int) -> None:
    gradient = CASES[case].get("stage", "local")
    trial = read(job / "runs" / str(case))
    assert trial.workers() == ["worker_0", "worker_1"]
    assert trial.steps() == [0, 1, 2]
    compared = {"weight": 0, gradient: 0}
    for rank in range(2):
        for key, value in copies(job, case, rank).items():
            step, kind, name = key.split("/")
            if kind not in compared:
                continue
            tensor = trial.tensor(f"Net_{name}" if kind == "weight" else f"gradient/Net_{name}")
            assert same(tensor.value(int(step), worker=f"worker_{rank}"), value), key
            compared[kind] += 1
    unused = bool(CASES[case].get("ddp", {}).get("find_unused_parameters"))
    assert compared == {"weight": 2 * 3 * 6, gradient: 2 * 3 * (4 if unused else 6)}


def test_local_gradients_differ_between_ranks_and_reduced_ones_do_not(job: Path) -> None:
    one, other = copies(job, 0, 0), copies(job, 0, 1)
    for step in range(3):
        assert not np.array_equal(
            one[f"{step}/local/fc1.weight"], other[f"{step}/local/fc1.weight"]
        )
        assert np.array_equal(one[f"{step}/synced/fc1.weight"], other[f"{step}/synced/fc1.weight"])


def test_ranks_that_learn_late_that_they_do_not_save_leave_no_trace(tmp_path: Path) -> None:
    cases = [{"include_workers": "one", "register": "inner"}, {"include_workers": [1]}]
    run_job([], tmp_path, [["0"], ["1"]], bare=True, cases=cases)
    for case, saver in enumerate((0, 1)):
        trial = read(tmp_path / "runs" / str(case))
        assert trial.workers() == [f"worker_{saver}"]
        assert trial.steps() == [0, 1, 2]
        other = 1 - saver
        facts = json.loads((tmp_path / "kept" / str(case) / f"{other}.json").read_text())
        assert facts["hooks"] == 0
        assert facts["worker"] == f"worker_{other}"
        run = tmp_path / "runs" / str(case)
        assert not glob(f"**/*worker_{other}*", root_dir=run, recursive=True)
    # In the first job it has not started an uploader of its own either.
    facts = json.loads((tmp_path / "kept" / "0" / "1.json").read_text())
    assert facts["children"] == []
