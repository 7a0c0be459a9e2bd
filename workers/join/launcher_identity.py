"""What identifies the launcher's invocation that started this process, and facts about processes.

`Launch.id` is `<kind>:<text>`. Ranks of one launch have the same one, except for the last two
kinds, where no launcher told an identity and the parent process stands for it: it is the same for
ranks that one process spawned on one machine; ranks on other machines, or each behind a shell of
its own, differ.

    given         SMDIST_LAUNCH
    torchelastic  torchrun's run id; without one, the step of srun it runs in
    slurm         job and step
    pmix          the namespace of an MPI launch
    horovod       the address of its rendezvous
    sagemaker     the training job
    agent         machine, boot, torchrun's process on this machine and its start
    parent        machine, boot, parent process and its start
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from smdist.errors import ConfigurationError
from smdist.processes import is_alive, start_ticks

__all__ = [
    "REQUEUE",
    "Launch",
    "ParentProcess",
    "is_running",
    "launch_identity",
    "machine",
    "parent_process",
    "process_started",
]

REQUEUE = 1000  # what a requeue of the job adds to `restart`; below it are torchrun's own restarts
_FIRST_PID_NAMESPACE = "4026531836"  # the kernel's constant for the one that is no container


@dataclass(frozen=True, slots=True)
class ParentProcess:
    pid: int
    start_ticks: int  # clock ticks since boot; 0 when unknown
    boot: str


@dataclass(frozen=True, slots=True)
class Launch:
    id: str  # "" when nothing identifies it
    restart: int  # grows whenever the launcher starts the job again


def launch_identity(environ: Mapping[str, str], parent: ParentProcess, host: str) -> Launch:
    """Pure: what the environment and the parent process tell."""
    return Launch(_launch_id(environ, parent, host), _restart(environ))


def _launch_id(environ: Mapping[str, str], parent: ParentProcess, host: str) -> str:
    if given := environ.get("SMDIST_LAUNCH"):
        return f"given:{given}"
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    if elastic not in ("", "none"):
        return f"torchelastic:{elastic}"
    process = f"{host}:{parent.boot}:{parent.pid}:{parent.start_ticks}"
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    if "TORCHELASTIC_RESTART_COUNT" in environ:
        # A batch script without srun may start torchrun several times, each time on one machine.
        return f"torchelastic:slurm-{job}.{step}" if job and step else f"agent:{process}"
    if job:
        return f"slurm:{job}.{step or ''}"
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"):
        if namespace := environ.get(name):
            return f"pmix:{namespace}"
    for prefix in ("HOROVOD_GLOO_RENDEZVOUS", "HOROVOD_RENDEZVOUS"):
        address, port = environ.get(f"{prefix}_ADDR"), environ.get(f"{prefix}_PORT")
        if address and port:
            return f"horovod:{address}:{port}"
    if job := environ.get("TRAINING_JOB_NAME"):
        return f"sagemaker:{job}"
    # Process 1 adopts whatever lost its parent: sharing it means nothing.
    return f"parent:{process}" if parent.pid > 1 and parent.start_ticks else ""


def _restart(environ: Mapping[str, str]) -> int:
    if "SMDIST_RESTART" in environ:
        return _count(environ, "SMDIST_RESTART")
    # A requeued job starts torchrun anew, which counts from 0 again.
    return REQUEUE * _count(environ, "SLURM_RESTART_COUNT") + _count(
        environ, "TORCHELASTIC_RESTART_COUNT"
    )


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise ConfigurationError(f"{name}={text!r} is not a whole number from 0 on")
    return int(text or 0)


def machine() -> str:
    """Return the host name, with the container's id where it has process ids of its own.

    Containers on a host network all carry the host's name, while process numbers of one mean
    nothing in another.
    """
    name = socket.gethostname()
    try:
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return name
    return name if namespace == _FIRST_PID_NAMESPACE else f"{name}/{namespace}"


def parent_process() -> ParentProcess:
    pid = os.getppid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        boot = ""
    return ParentProcess(pid, start_ticks(pid), boot)


def process_started(pid: int) -> float:
    """Wall-clock time at which the process started; 0.0 when there is none or no way to tell."""
    ticks = start_ticks(pid)
    if not ticks:
        return 0.0
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    # Sandboxes with a boot of their own can give nonsense here.
    return time.time() - age if age >= 0 else 0.0


def is_running(pid: int, seen: float) -> bool:
    """Whether the process that had this number on this machine at the time `seen` still runs."""
    # A second of tolerance: the clock may have been set since.
    return is_alive(pid) and process_started(pid) <= seen + 1.0
