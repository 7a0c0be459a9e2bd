"""Every error that smdist raises to its callers.

    SmdistError
    ├── ConfigurationError (ValueError)      a setting is wrong
    │   ├── UnknownKey                       a setting has an unknown name
    │   ├── NoConfigurationFile              (FileNotFoundError) the configuration file is missing
    │   ├── InvalidCollectionConfiguration   a custom collection selects no tensor
    │   ├── RunExists                        out_dir already holds a run
    │   └── NoRank                           this process is not a training process of its job
    ├── CaptureError (RuntimeError)          capturing or uploading failed
    │   ├── SpoolUnavailable                 there is no usable local buffer
    │   │   ├── SpoolBusy                    another uploader works on the spool
    │   │   ├── TrainerAlive                 the process that fills the spool may still run
    │   │   └── NotPrivate                   (PermissionError) other users could have changed it
    │   └── DrainTimeout                     close() stopped waiting for the uploader
    ├── StoreError                           an operation on a store failed
    │   ├── ObjectNotFound                   the object does not exist
    │   ├── ObjectExists                     the object exists already
    │   ├── StoreFull                        the store has no space left
    │   ├── StoreForbidden                   the store denied access
    │   └── CorruptObject                    the object is damaged or of another format
    ├── CoordinationError                    a coordinator cannot write the merged view
    │   ├── AlreadyCoordinated               another coordinator writes it
    │   └── Superseded                       another coordinator has taken over
    └── TrialError                           a question about a run has no answer
        ├── NoSuchRun                        there is no run at this location
        ├── UnsupportedFormat                a newer smdist wrote the run
        ├── RunReplaced                      another run replaced the opened one
        ├── StepUnavailable                  the step was not saved
        ├── StepNotYetAvailable              the running job has not reached the step
        ├── TensorUnavailable                no tensor of this name was saved
        ├── TensorUnavailableForStep         the tensor was not saved at this step
        ├── ShapeUnavailableForStep          the shape was not saved at this step
        ├── InvalidWorker                    the run has no such worker
        ├── NoMoreData                       the job ended before the step
        ├── WaitTimeout (TimeoutError)       a wait reached its deadline
        └── RuleEvaluationConditionMet       a rule fired

Errors carry their facts as attributes and survive pickling.

Internal exceptions never reach a caller and live beside the code that handles them:
RetryDeadlineExceeded, ForeignObject (workers/upload/retry.py), RankRejected, RunNotAtThisLocation
(workers/upload/run_guard.py), LateManifestFound (workers/upload/commit.py), JournalFileFull
(workers/spool/journal.py), BufferLimitReached (workers/capture/journal_room.py), NoReceipt and
RequestFailed (storage/s3/errors.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from smdist.identity import ModeKeys

__all__ = [
    "AlreadyCoordinated",
    "CaptureError",
    "ConfigurationError",
    "CoordinationError",
    "CorruptObject",
    "DrainTimeout",
    "InvalidCollectionConfiguration",
    "InvalidWorker",
    "NoConfigurationFile",
    "NoMoreData",
    "NoRank",
    "NoSuchRun",
    "NotPrivate",
    "ObjectExists",
    "ObjectNotFound",
    "RuleEvaluationConditionMet",
    "RunExists",
    "RunReplaced",
    "ShapeUnavailableForStep",
    "SmdistError",
    "SpoolBusy",
    "SpoolUnavailable",
    "StepNotYetAvailable",
    "StepUnavailable",
    "StoreError",
    "StoreForbidden",
    "StoreFull",
    "Superseded",
    "TensorUnavailable",
    "TensorUnavailableForStep",
    "TrainerAlive",
    "TrialError",
    "UnknownKey",
    "UnsupportedFormat",
    "WaitTimeout",
]


class SmdistError(Exception):
    """Base of all errors. Subclasses pass their facts to `Exception.args`, so pickling works."""


# -- configuration ---------------------------------------------------------------------------


class ConfigurationError(SmdistError, ValueError):
    """A setting is wrong. Raised where the setting is given."""


class UnknownKey(ConfigurationError):
    """A setting has an unknown name. The message suggests the nearest known one."""

    def __init__(self, key: str, known: Iterable[str], where: str) -> None:
        self.key, self.known, self.where = key, tuple(sorted(known)), where
        super().__init__(key, self.known, where)

    def __str__(self) -> str:
        near = get_close_matches(self.key, self.known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(self.known)}"
        return f"unknown key {self.key!r} in {self.where}; {hint}"


class NoConfigurationFile(ConfigurationError, FileNotFoundError):
    """The configuration file does not exist."""


class NoRank(ConfigurationError):
    """A process of a training job is not one of its training processes."""


class InvalidCollectionConfiguration(ConfigurationError):
    """A custom collection selects no tensor.

    `included`: it is among the collections to save. `known`: names that were perhaps meant.
    """

    def __init__(self, c_name: str, included: bool = True, known: Iterable[str] = ()) -> None:
        self.name = self.c_name = c_name
        self.included, self.known = included, tuple(sorted(known))
        super().__init__(c_name, included, self.known)

    def __str__(self) -> str:
        near = get_close_matches(self.name, self.known, n=1)
        hint = f"did you mean {near[0]!r}? Else " if near else ""
        include = f"call hook.get_collection({self.name!r}).include(regex)"
        remedy = (
            f"{include} or drop it from include_collections"
            if self.included
            else f"{include} and name it in include_collections, or do not create it"
        )
        return (
            f"collection {self.name!r} has neither include_regex nor tensor_names, so it selects no "
            f"tensor; {hint}{remedy}"
        )


class RunExists(ConfigurationError):
    """The output directory already holds a run."""

    def __init__(self, out_dir: str, worker: str) -> None:
        self.out_dir, self.worker = out_dir, worker
        super().__init__(out_dir, worker)

    def __str__(self) -> str:
        return (
            f"{self.worker}: {self.out_dir} already holds a run; choose another out_dir, or pass "
            "resume=True to continue that run as a new attempt"
        )


# -- capture and upload ----------------------------------------------------------------------


class CaptureError(SmdistError, RuntimeError):
    """Capturing or uploading tensors failed."""


class SpoolUnavailable(CaptureError):
    """There is no usable local buffer (spool)."""


class SpoolBusy(SpoolUnavailable):
    """Another uploader works on this spool."""


class TrainerAlive(SpoolUnavailable):
    """The training process that fills this spool runs, or may still run."""


class NotPrivate(SpoolUnavailable, PermissionError):
    """A file or folder of the spool could have been made or changed by another user."""

    def __init__(self, cause: str, remedy: str) -> None:
        self.cause, self.remedy = cause, remedy
        super().__init__(cause, remedy)

    def __str__(self) -> str:
        return f"{self.cause}: nothing is sent or removed; {self.remedy}"


class DrainTimeout(CaptureError):
    """`close()` stopped waiting before the uploader had stored everything."""


# -- stores ----------------------------------------------------------------------------------


class StoreError(SmdistError):
    """An operation on a store failed. The message names URL, key and operation."""

    def __init__(self, url: str, key: str, operation: str, detail: str = "") -> None:
        self.url, self.key, self.operation, self.detail = url, key, operation, detail
        super().__init__(url, key, operation, detail)

    def __str__(self) -> str:
        what = f"{self.operation} {self.key!r}" if self.key else self.operation
        text = f"{what} in {self.url}"
        return f"{text}: {self.detail}" if self.detail else text


class ObjectNotFound(StoreError):
    """The object does not exist."""


class ObjectExists(StoreError):
    """A conditional write failed because the object exists already."""


class StoreFull(StoreError):
    """The store has no space left."""


class StoreForbidden(StoreError):
    """The store denied access."""


class CorruptObject(StoreError):
    """The object is damaged, of another format, or a copy of another object."""


# -- coordination ----------------------------------------------------------------------------


class CoordinationError(SmdistError):
    """A coordinator cannot write the merged view of a run."""


class AlreadyCoordinated(CoordinationError):
    """Another coordinator writes the merged view.

    `free_in_s`: seconds until its lease expires, unless it is renewed.
    """

    def __init__(
        self, url: str, writer: str, host: str, pid: int, since: float, free_in_s: float
    ) -> None:
        self.url, self.writer, self.host, self.pid = url, writer, host, pid
        self.since, self.free_in_s = since, free_in_s
        super().__init__(url, writer, host, pid, since, free_in_s)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return (
            f"{self.url} already has a coordinator: {self.writer}, process {self.pid} on "
            f"{self.host}, since {since}; stop that one, wait {max(self.free_in_s, 0.0):.0f} s if "
            "it is dead, or start with --take-over to make it stop"
        )


class Superseded(CoordinationError):
    """Another coordinator has taken over from this one."""

    def __init__(self, url: str, writer: str, by: str, epoch: int) -> None:
        self.url, self.writer, self.by, self.epoch = url, writer, by, epoch
        super().__init__(url, writer, by, epoch)

    def __str__(self) -> str:
        return (
            f"{self.url}: coordinator {self.writer} stopped because {self.by} took over "
            f"(epoch {self.epoch}); nothing is lost. To take over again: "
            "smdist coordinator stop, then smdist coordinator start --take-over"
        )


# -- questions about a run -------------------------------------------------------------------


class TrialError(SmdistError):
    """A question about a run has no answer."""


class NoSuchRun(TrialError):
    """There is no run at this location."""

    def __init__(self, url: str) -> None:
        self.url = url
        super().__init__(url)

    def __str__(self) -> str:
        return f"no run at {self.url}; check the path, or wait until the first rank has started"


class UnsupportedFormat(TrialError, ConfigurationError, CoordinationError):
    """The run was written by a newer smdist. Hooks, coordinators and trials all raise this one."""

    def __init__(self, url: str, found: int, supported: int) -> None:
        self.url, self.found, self.supported = url, found, supported
        super().__init__(url, found, supported)

    def __str__(self) -> str:
        return (
            f"{self.url} holds a run in format {self.found}; this version of smdist supports up to "
            f"{self.supported}. Install a newer version."
        )


class RunReplaced(TrialError):
    """Another run was started at the location of the opened one."""

    def __init__(self, url: str, run_id: str, other: str) -> None:
        self.url, self.run_id, self.other = url, run_id, other
        super().__init__(url, run_id, other)

    def __str__(self) -> str:
        return (
            f"{self.url} now holds run {self.other}; run {self.run_id} of this trial was removed. "
            "Open a new trial"
        )


class _StepError(TrialError):
    def __init__(self, step: int, mode: ModeKeys = ModeKeys.GLOBAL) -> None:
        self.step, self.mode = step, mode
        super().__init__(step, mode)


class StepUnavailable(_StepError):
    """The step was not saved."""

    def __str__(self) -> str:
        return f"step {self.step} of mode {self.mode.name} was not saved"


class StepNotYetAvailable(_StepError):
    """The job still runs and has not reached the step."""

    def __str__(self) -> str:
        return f"step {self.step} of mode {self.mode.name} is not available yet; the job is running"


class TensorUnavailable(TrialError):
    """No tensor of this name was saved."""

    def __init__(self, tname: str, near: Sequence[str] = ()) -> None:
        self.tname, self.near = tname, tuple(near)
        super().__init__(tname, self.near)

    def __str__(self) -> str:
        hint = f"; did you mean {', '.join(map(repr, self.near))}?" if self.near else ""
        return f"tensor {self.tname!r} was not saved by this run{hint}"


class TensorUnavailableForStep(TrialError):
    """The tensor was not saved at this step."""

    def __init__(
        self,
        tname: str,
        step: int,
        mode: ModeKeys = ModeKeys.GLOBAL,
        has_reductions: bool = False,
        detail: str = "",
    ) -> None:
        self.tname, self.step, self.mode = tname, step, mode
        self.has_reductions, self.detail = has_reductions, detail
        super().__init__(tname, step, mode, has_reductions, detail)

    def __str__(self) -> str:
        text = f"tensor {self.tname!r} has no value at step {self.step} of mode {self.mode.name}"
        if self.has_reductions:
            text += "; its reductions were saved: use reduction_value()"
        return f"{text}; {self.detail}" if self.detail else text


class ShapeUnavailableForStep(TrialError):
    """The shape of the tensor was not saved at this step."""

    def __init__(self, tname: str, step: int, mode: ModeKeys = ModeKeys.GLOBAL) -> None:
        self.tname, self.step, self.mode = tname, step, mode
        super().__init__(tname, step, mode)

    def __str__(self) -> str:
        return f"shape of {self.tname!r} was not saved at step {self.step} of {self.mode.name}"


class InvalidWorker(TrialError):
    """The run has no worker of this name."""

    def __init__(self, worker: str, workers: Sequence[str] = ()) -> None:
        self.worker, self.workers = worker, tuple(workers)
        super().__init__(worker, self.workers)

    def __str__(self) -> str:
        known = ", ".join(self.workers[:8]) + (", ..." if len(self.workers) > 8 else "")
        return f"no worker {self.worker!r} in this run; its workers: {known or 'none yet'}"


class NoMoreData(TrialError):
    """The job ended before it reached the step."""

    def __init__(self, step: int, mode: ModeKeys, last_step: int | None) -> None:
        self.step, self.mode, self.last_step = step, mode, last_step
        super().__init__(step, mode, last_step)

    def __str__(self) -> str:
        return (
            f"the job ended before step {self.step} of mode {self.mode.name} "
            f"(last step: {self.last_step})"
        )


class WaitTimeout(TrialError, TimeoutError):
    """A wait reached its deadline."""


class RuleEvaluationConditionMet(TrialError):
    """The condition of a rule holds at this step."""

    def __init__(self, rule_name: str, step: int, end_of_rule: bool = False) -> None:
        self.rule_name, self.step, self.end_of_rule = rule_name, step, end_of_rule
        super().__init__(rule_name, step, end_of_rule)

    def __str__(self) -> str:
        return f"rule {self.rule_name} fired at step {self.step}"
