"""Which rank this process is, found late and without talking to anybody.

Asked when the answer is first needed, so that a hook built before `init_process_group` works. No
collective is called and no framework is imported: one that this process has not imported cannot
have numbered it. The first source that knows wins:

    explicit arguments > SMDIST_RANK, SMDIST_WORLD_SIZE > Horovod, initialised
    > torch.distributed, initialised > torchrun > horovodrun > Open MPI, MVAPICH, PMI > srun
    > TF_CONFIG > the hosts of a SageMaker job > a process on its own

An explicit rank without a world size takes the world size from the sources after it, and the other
way round.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, NamedTuple

from smdist.errors import ConfigurationError
from smdist.limits import MAX_RANKS
from smdist.workers.join.tf_config import tf_task

__all__ = ["Identity", "Source", "resolve_rank"]

Source = Literal[
    "explicit",
    "horovod",
    "torch",
    "torchrun",
    "horovodrun",
    "mpi",
    "slurm",
    "tf_config",
    "sagemaker",
    "single",
]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is among the processes of its job.

    `local_rank` and `local_world_size` are None when nothing tells them. `settled` is False while
    a later answer may differ: environment variables that count machines rather than processes on
    some clusters, or nothing at all, when `init_process_group` may still come. Whoever can wait
    until the first step before using an unsettled identity should.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    source: Source
    settled: bool


class _Launcher(NamedTuple):
    source: Source
    rank: str
    world: str
    local_rank: str
    local_world: str
    settled: bool  # it starts one process per rank, so the variables are this process's own


_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", True),
    _Launcher(
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        True,
    ),
    # One task per machine that spawns its own processes is common under these two.
    _Launcher(
        "mpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        False,
    ),
    _Launcher(
        "mpi",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        False,
    ),
    _Launcher("mpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", False),
    # SLURM_PROCID and SLURM_NTASKS are set in a batch script and an interactive shell too, where
    # the process is no rank. Only srun sets the size of its step.
    _Launcher("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", False),
)

_HOROVOD = (
    "horovod.torch",
    "horovod.tensorflow.keras",
    "horovod.tensorflow",
    "horovod.keras",
    "horovod.mxnet",
)


def resolve_rank(
    explicit_rank: int | None = None,
    explicit_world: int | None = None,
    environ: Mapping[str, str] = os.environ,
    modules: Mapping[str, ModuleType] = sys.modules,
) -> Identity:
    """Return the identity of this process as far as it is known now.

    Raises ConfigurationError if the settings contradict each other.
    """
    rank, rank_name = explicit_rank, f"rank={explicit_rank}"
    if rank is None and (rank := _number(environ, "SMDIST_RANK")) is not None:
        rank_name = f"SMDIST_RANK={rank}"
    world, world_name = explicit_world, f"world_size={explicit_world}"
    if world is None and (world := _number(environ, "SMDIST_WORLD_SIZE")) is not None:
        world_name = f"SMDIST_WORLD_SIZE={world}"
    if rank is None and world is None:
        return next(_found(environ, modules))
    if rank is not None and world is not None:
        return _explicit(rank, world, rank_name, world_name, environ, settled=True)
    other = next(_found(environ, modules))
    if rank is None:
        rank, rank_name = other.rank, f"rank {other.rank} ({other.source})"
    if world is None:
        world, world_name = other.world_size, f"world size {other.world_size} ({other.source})"
    return _explicit(rank, world, rank_name, world_name, environ, settled=other.settled)


def _explicit(
    rank: int,
    world: int,
    rank_name: str,
    world_name: str,
    environ: Mapping[str, str],
    *,
    settled: bool,
) -> Identity:
    _check(rank, world, rank_name, world_name)
    return _localised(Identity(rank, world, None, None, "explicit", settled), environ)


def _found(environ: Mapping[str, str], modules: Mapping[str, ModuleType]) -> Iterator[Identity]:
    """Every source that knows an answer, best first; the last one always does."""
    yield from _horovod(modules)
    for identity in _torch(modules):
        yield _localised(identity, environ)
    yield from _launched(environ)
    yield from _tensorflow(environ)
    yield from _sagemaker(environ)
    yield Identity(0, 1, None, None, "single", False)


def _horovod(modules: Mapping[str, ModuleType]) -> Iterator[Identity]:
    for name in _HOROVOD:
        hvd: Any = modules.get(name)
        # A module that is still being imported has no such function yet.
        if hvd is None or not hasattr(hvd, "is_initialized") or not hvd.is_initialized():
            continue
        rank, world = int(hvd.rank()), int(hvd.size())
        yield Identity(rank, world, int(hvd.local_rank()), int(hvd.local_size()), "horovod", True)


def _torch(modules: Mapping[str, ModuleType]) -> Iterator[Identity]:
    distributed: Any = modules.get("torch.distributed")
    if distributed is None or not hasattr(distributed, "is_initialized"):
        return
    if not distributed.is_available() or not distributed.is_initialized():
        return
    rank = int(distributed.get_rank())
    if rank >= 0:  # -1: this process is in no group
        yield Identity(rank, int(distributed.get_world_size()), None, None, "torch", True)


def _launched(environ: Mapping[str, str]) -> Iterator[Identity]:
    for launcher in _LAUNCHERS:
        # One without the other says too little; RANK alone is also a name people use otherwise.
        if not environ.get(launcher.rank) or not environ.get(launcher.world):
            continue
        rank, world = _number(environ, launcher.rank), _number(environ, launcher.world)
        if rank is None or world is None:  # blank
            continue
        _check(rank, world, f"{launcher.rank}={rank}", f"{launcher.world}={world}")
        local_rank = _number(environ, launcher.local_rank)
        local_world = (
            _slurm_local_world(environ, local_rank, world)
            if launcher.source == "slurm"
            else _number(environ, launcher.local_world)
        )
        _check_local(launcher, local_rank, local_world, world)
        # Kubernetes operators set RANK and WORLD_SIZE per pod, to be replaced by torchrun's.
        settled = launcher.settled and local_rank is not None
        yield Identity(rank, world, local_rank, local_world, launcher.source, settled)


def _localised(identity: Identity, environ: Mapping[str, str]) -> Identity:
    """With the local numbers of a launcher that agrees on who this is."""
    try:
        launched = list(_launched(environ))
    except ConfigurationError:  # of a source that was overruled: its nonsense does not matter
        return identity
    for other in launched:
        if (other.rank, other.world_size) == (identity.rank, identity.world_size):
            return replace(
                identity, local_rank=other.local_rank, local_world_size=other.local_world_size
            )
    return identity


def _tensorflow(environ: Mapping[str, str]) -> Iterator[Identity]:
    task = tf_task(environ)
    if task is not None:
        yield Identity(*task, "tf_config", True)


def _sagemaker(environ: Mapping[str, str]) -> Iterator[Identity]:
    hosts_text, current = environ.get("SM_HOSTS"), environ.get("SM_CURRENT_HOST")
    if not hosts_text or not current:
        return
    try:
        hosts = json.loads(hosts_text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or current not in hosts:
        raise ConfigurationError(
            f"SM_CURRENT_HOST={current!r} is not one of SM_HOSTS={hosts_text!r}; "
            "set SMDIST_RANK and SMDIST_WORLD_SIZE"
        )
    # algo-10 comes after algo-2.
    hosts = sorted(map(str, hosts), key=lambda host: (len(host), host))
    yield Identity(hosts.index(current), len(hosts), 0, 1, "sagemaker", False)


def _slurm_local_world(
    environ: Mapping[str, str], local_rank: int | None, world: int
) -> int | None:
    """`4(x2),3` of SLURM_STEP_TASKS_PER_NODE at place SLURM_NODEID, else SLURM_NTASKS_PER_NODE."""
    text, node = environ.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(environ, "SLURM_NODEID")
    if text and node is not None:
        counts: list[int] = []
        for item in text.split(","):
            found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
            if found is None:
                raise ConfigurationError(f"SLURM_STEP_TASKS_PER_NODE={text!r} cannot be read")
            counts += [int(found[1])] * int(found[2] or 1)
        if node < len(counts):
            return counts[node]
    # This one may be the allocation's and not the step's: believed only where it can be true.
    per_node = _number(environ, "SLURM_NTASKS_PER_NODE")
    return per_node if per_node is not None and (local_rank or 0) < per_node <= world else None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip() if name else ""
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is not a whole number") from None


def _check(rank: int, world: int, rank_name: str, world_name: str) -> None:
    if world < 1:
        raise ConfigurationError(f"{world_name}: a world has at least one rank")
    if world > MAX_RANKS:
        raise ConfigurationError(f"{world_name}: runs of up to {MAX_RANKS} ranks can be read")
    if not 0 <= rank < world:
        raise ConfigurationError(
            f"{rank_name} is no rank of a world with {world_name}: ranks go from 0 to {world - 1}"
        )


def _check_local(
    launcher: _Launcher, local_rank: int | None, local_world: int | None, world: int
) -> None:
    if local_rank is not None and not 0 <= local_rank < (local_world or world):
        among = f"{launcher.local_world}={local_world}" if local_world else f"a world of {world}"
        raise ConfigurationError(
            f"{launcher.local_rank}={local_rank} is no local rank among {among}"
        )
    if local_world is not None and not 1 <= local_world <= world:
        name = launcher.local_world or "tasks per node"
        raise ConfigurationError(f"{name}={local_world} does not fit into a world of {world}")
