"""Where a process's rank comes from, and that nonsense is named."""

from __future__ import annotations

import json
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from smdist.errors import ConfigurationError, NoRank
from smdist.limits import MAX_RANKS
from smdist.workers.join.rank import Identity, resolve_rank

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
HOROVODRUN = {
    "HOROVOD_RANK": "2",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
# What sbatch gives its script: a rank-like number that is none.
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS_PER_NODE": "4",
}
SRUN = BATCH_SCRIPT | {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-10", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}


def module(**functions: Any) -> ModuleType:
    made = ModuleType("made")
    for name, value in functions.items():
        setattr(made, name, partial(lambda v: v, value))
    return made


def torch_at(rank: int, world: int, initialized: bool = True) -> dict[str, ModuleType]:
    return {
        "torch.distributed": module(
            is_available=True, is_initialized=initialized, get_rank=rank, get_world_size=world
        )
    }


def horovod_at(rank: int, size: int, initialized: bool = True) -> dict[str, ModuleType]:
    hvd = module(
        is_initialized=initialized, rank=rank, size=size, local_rank=rank % 2, local_size=2
    )
    return {"horovod.torch": hvd}


@pytest.mark.parametrize(
    ("environ", "modules", "expected"),
    [
        pytest.param({}, {}, Identity(0, 1, None, None, "single", False), id="alone"),
        pytest.param(TORCHRUN, {}, Identity(3, 8, 1, 2, "torchrun", True), id="torchrun"),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2"},
            {},
            Identity(1, 2, None, None, "torchrun", False),
            id="pod-of-an-operator",
        ),
        pytest.param({"RANK": "x"}, {}, Identity(0, 1, None, None, "single", False), id="lone"),
        pytest.param(HOROVODRUN, {}, Identity(2, 4, 0, 2, "horovodrun", True), id="horovodrun"),
        pytest.param(OPEN_MPI, {}, Identity(5, 6, 1, 2, "mpi", False), id="open-mpi"),
        pytest.param(
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            {},
            Identity(1, 2, None, None, "mpi", False),
            id="pmi",
        ),
        pytest.param(
            {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
            {},
            Identity(1, 2, None, None, "mpi", False),
            id="mvapich",
        ),
        pytest.param(SRUN, {}, Identity(9, 11, 1, 3, "slurm", False), id="srun"),
        pytest.param(
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": ""},
            {},
            Identity(9, 11, 1, 4, "slurm", False),
            id="srun-tasks-per-node",
        ),
        pytest.param(BATCH_SCRIPT, {}, Identity(0, 1, None, None, "single", False), id="sbatch"),
        pytest.param(
            BATCH_SCRIPT | {"SLURM_STEP_NUM_TASKS": "1"},
            {},
            Identity(0, 1, 0, None, "slurm", False),
            id="srun-of-one-in-a-larger-allocation",
        ),
        pytest.param(SAGEMAKER, {}, Identity(1, 3, 0, 1, "sagemaker", False), id="sagemaker"),
        pytest.param(SRUN | TORCHRUN, {}, Identity(3, 8, 1, 2, "torchrun", True), id="nested"),
        pytest.param(
            TORCHRUN, torch_at(3, 8), Identity(3, 8, 1, 2, "torch", True), id="torch-with-locals"
        ),
        pytest.param(
            TORCHRUN,
            torch_at(4, 8),
            Identity(4, 8, None, None, "torch", True),
            id="torch-disagrees",
        ),
        pytest.param(
            {"RANK": "x", "WORLD_SIZE": "y"},
            torch_at(4, 8),
            Identity(4, 8, None, None, "torch", True),
            id="torch-beside-nonsense",
        ),
        pytest.param(
            TORCHRUN,
            torch_at(0, 1, initialized=False),
            Identity(3, 8, 1, 2, "torchrun", True),
            id="torch-not-initialised",
        ),
        pytest.param(
            {}, torch_at(-1, 2), Identity(0, 1, None, None, "single", False), id="torch-outside"
        ),
        pytest.param(
            {},
            {"torch.distributed": module(), "horovod.torch": module()},
            Identity(0, 1, None, None, "single", False),
            id="half-imported",
        ),
        pytest.param(
            {},
            horovod_at(5, 6) | torch_at(0, 1),
            Identity(5, 6, 1, 2, "horovod", True),
            id="horovod",
        ),
        pytest.param(
            HOROVODRUN,
            horovod_at(0, 1, initialized=False),
            Identity(2, 4, 0, 2, "horovodrun", True),
            id="horovod-not-initialised",
        ),
        pytest.param(
            TORCHRUN | {"SMDIST_RANK": "1", "SMDIST_WORLD_SIZE": "2"},
            torch_at(3, 8),
            Identity(1, 2, None, None, "explicit", True),
            id="override",
        ),
        pytest.param(
            TORCHRUN | {"SMDIST_RANK": "7"},
            {},
            Identity(7, 8, None, None, "explicit", True),
            id="override-of-the-rank",
        ),
        pytest.param(
            {"SMDIST_WORLD_SIZE": "2"},
            {},
            Identity(0, 2, None, None, "explicit", False),
            id="override-of-the-world",
        ),
    ],
)
def test_sources(
    environ: dict[str, str], modules: dict[str, ModuleType], expected: Identity
) -> None:
    assert resolve_rank(environ=environ, modules=modules) == expected


def test_arguments_win() -> None:
    environ = TORCHRUN | {"SMDIST_RANK": "7", "SMDIST_WORLD_SIZE": "9"}
    found = resolve_rank(3, 8, environ, {})
    assert found == Identity(3, 8, 1, 2, "explicit", True)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SMDIST_RANK": "one"}, ["SMDIST_RANK='one'"]),
        ({"SMDIST_RANK": "2"}, ["SMDIST_RANK=2", "world size 1"]),
        ({"SMDIST_RANK": "-1", "SMDIST_WORLD_SIZE": "2"}, ["SMDIST_RANK=-1"]),
        ({"SMDIST_WORLD_SIZE": "0"}, ["SMDIST_WORLD_SIZE=0"]),
        (TORCHRUN | {"RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        (TORCHRUN | {"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE=9"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "many"}, ["OMPI_COMM_WORLD_SIZE='many'"]),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, ["SM_CURRENT_HOST='algo-3'"]),
    ],
)
def test_nonsense_is_named(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        resolve_rank(environ=environ, modules={})
    assert all(word in str(raised.value) for word in words), str(raised.value)


def tf_config(kind: str, index: int, **cluster: list[str]) -> dict[str, str]:
    document = {"cluster": cluster, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(document)}


WORKERS = {"worker": ["a:1", "b:1", "b:2"]}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (tf_config("worker", 0, **WORKERS), (0, 3, 0, 1)),
        (tf_config("worker", 2, **WORKERS), (2, 3, 1, 2)),
        (tf_config("chief", 0, chief=["a:1"], ps=["c:1"], **WORKERS), (0, 4, 0, 2)),
        (tf_config("worker", 1, chief=["a:1"], ps=["c:1"], **WORKERS), (2, 4, 0, 2)),
    ],
)
def test_a_task_of_a_tensorflow_cluster(
    environ: dict[str, str], expected: tuple[int, int, int, int]
) -> None:
    assert resolve_rank(environ=environ, modules={}) == Identity(*expected, "tf_config", True)
    # Launchers that number every process know better; a name of a machine does not.
    assert resolve_rank(environ=environ | TORCHRUN, modules={}).source == "torchrun"
    assert resolve_rank(environ=environ | SAGEMAKER, modules={}).source == "tf_config"


@pytest.mark.parametrize("text", ["", "  ", "{}", '{"environment": "cloud"}', '{"cluster": {}}'])
def test_tensorflow_without_a_cluster(text: str) -> None:
    assert resolve_rank(environ={"TF_CONFIG": text}, modules={}).source == "single"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TF_CONFIG": "{"}, "cannot be read"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "cannot be read: KeyError"),
        (tf_config("worker", 3, **WORKERS), "task worker 3 of TF_CONFIG is none of the 3"),
    ],
)
def test_a_tensorflow_cluster_that_makes_no_sense(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_rank(environ=environ, modules={})
    assert resolve_rank(1, 2, environ=environ, modules={}).rank == 1


@pytest.mark.parametrize("kind", ["evaluator", "ps"])
def test_a_task_that_trains_nothing(kind: str) -> None:
    environ = tf_config(kind, 0, **WORKERS)
    with pytest.raises(NoRank, match=f"a task of type '{kind}'"):
        resolve_rank(environ=environ, modules={})
    assert resolve_rank(1, 2, environ=environ, modules={}).rank == 1
    assert resolve_rank(environ=environ | TORCHRUN, modules={}).source == "torchrun"


def test_a_world_that_nobody_could_read_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=f"up to {MAX_RANKS} ranks"):
        resolve_rank(0, MAX_RANKS + 1, {}, {})
    assert resolve_rank(0, MAX_RANKS, {}, {}).world_size == MAX_RANKS
