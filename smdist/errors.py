"""Every error smdist raises, in one leaf module.

    SmdistError
    ├── ConfigurationError (ValueError)      wrong setting; raised when it is written down
    │   ├── UnknownKey                       names the nearest known key
    │   ├── NoConfigurationFile              (FileNotFoundError) there is none to read
    │   ├── InvalidCollectionConfiguration   a custom collection that can match nothing
    │   ├── RunExists                        out_dir already holds a run
    │   └── NoRank                           this process of a job is none that trains
    ├── CaptureError (RuntimeError)          our own trouble beside a training job
    │   ├── SpoolUnavailable                 no place for the buffer
    │   └── DrainTimeout                     close() gave up waiting for the uploader
    ├── StoreError                           names url, key and operation
    │   ├── ObjectNotFound
    │   ├── ObjectExists                     a conditional put lost
    │   ├── StoreFull
    │   ├── StoreForbidden
    │   └── CorruptObject                    a checksum or a format says no
    ├── CoordinationError                    about who writes the merged view of a run
    │   ├── AlreadyCoordinated               another coordinator does; names it and the remedy
    │   └── Superseded                       another one has taken over from this one
    └── TrialError                           a question about a run that has no answer
        ├── NoSuchRun
        ├── RunReplaced                      another run was begun in the place of this trial's
        ├── StepUnavailable                  that step was not saved
        ├── StepNotYetAvailable              the job is live and has not come so far
        ├── TensorUnavailable
        ├── TensorUnavailableForStep
        ├── ShapeUnavailableForStep
        ├── InvalidWorker
        ├── NoMoreData
        ├── WaitTimeout
        └── RuleEvaluationConditionMet

Errors carry their facts as attributes and survive pickling.
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
    "ObjectExists",
    "ObjectNotFound",
    "RuleEvaluationConditionMet",
    "RunExists",
    "RunReplaced",
    "ShapeUnavailableForStep",
    "SmdistError",
    "SpoolUnavailable",
    "StepNotYetAvailable",
    "StepUnavailable",
    "StoreError",
    "StoreForbidden",
    "StoreFull",
    "Superseded",
    "TensorUnavailable",
    "TensorUnavailableForStep",
    "TrialError",
    "UnknownKey",
    "WaitTimeout",
]


class SmdistError(Exception):
    """Root of the tree. Subclasses pass all their facts to `Exception.args`, so pickling works."""


# -- configuration ---------------------------------------------------------------------------


class ConfigurationError(SmdistError, ValueError):
    pass


class UnknownKey(ConfigurationError):
    def __init__(self, key: str, known: Iterable[str], where: str) -> None:
        self.key, self.known, self.where = key, tuple(sorted(known)), where
        super().__init__(key, self.known, where)

    def __str__(self) -> str:
        near = get_close_matches(self.key, self.known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(self.known)}"
        return f"unknown key {self.key!r} in {self.where}; {hint}"


class NoConfigurationFile(ConfigurationError, FileNotFoundError):
    pass


class NoRank(ConfigurationError):
    pass


class InvalidCollectionConfiguration(ConfigurationError):
    """`included`: it is one of those to be saved; `known`: names that it may have been meant for."""

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
            f"collection {self.name!r} can match no tensor: it has neither include_regex nor "
            f"tensor_names; {hint}{remedy}"
        )


class RunExists(ConfigurationError):
    def __init__(self, out_dir: str, worker: str) -> None:
        self.out_dir, self.worker = out_dir, worker
        super().__init__(out_dir, worker)

    def __str__(self) -> str:
        return (
            f"{self.worker}: {self.out_dir} already holds a run; choose another out_dir, or pass "
            "resume=True to continue that run as a new attempt"
        )


# -- beside a training job -------------------------------------------------------------------


class CaptureError(SmdistError, RuntimeError):
    pass


class SpoolUnavailable(CaptureError):
    pass


class DrainTimeout(CaptureError):
    pass


# -- stores ----------------------------------------------------------------------------------


class StoreError(SmdistError):
    def __init__(self, url: str, key: str, operation: str, detail: str = "") -> None:
        self.url, self.key, self.operation, self.detail = url, key, operation, detail
        super().__init__(url, key, operation, detail)

    def __str__(self) -> str:
        what = f"{self.operation} {self.key!r}" if self.key else self.operation
        text = f"{what} in {self.url}"
        return f"{text}: {self.detail}" if self.detail else text


class ObjectNotFound(StoreError):
    pass


class ObjectExists(StoreError):
    pass


class StoreFull(StoreError):
    pass


class StoreForbidden(StoreError):
    pass


class CorruptObject(StoreError):
    pass


# -- coordination ----------------------------------------------------------------------------


class CoordinationError(SmdistError):
    pass


class AlreadyCoordinated(CoordinationError):
    """`free_in_s`: when its lease ends, unless it is renewed."""

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
    def __init__(self, url: str, writer: str, by: str, epoch: int) -> None:
        self.url, self.writer, self.by, self.epoch = url, writer, by, epoch
        super().__init__(url, writer, by, epoch)

    def __str__(self) -> str:
        return (
            f"{self.url}: coordinator {self.writer} stopped, as {self.by} has taken over "
            f"(epoch {self.epoch}); nothing is lost. To have this one write again: "
            "smdist coordinator stop, then smdist coordinator start --take-over"
        )


# -- questions about a run -------------------------------------------------------------------


class TrialError(SmdistError):
    pass


class NoSuchRun(TrialError):
    def __init__(self, url: str) -> None:
        self.url = url
        super().__init__(url)

    def __str__(self) -> str:
        return f"no run at {self.url}: check the path, or wait until the job's first rank started"


class RunReplaced(TrialError):
    """Another run was begun in the place of the one that a trial has opened."""

    def __init__(self, url: str, run_id: str, other: str) -> None:
        self.url, self.run_id, self.other = url, run_id, other
        super().__init__(url, run_id, other)

    def __str__(self) -> str:
        return (
            f"{self.url} holds run {self.other} by now; this trial is of run {self.run_id}, which "
            "was removed, and stays as it is: open another one"
        )


class _StepError(TrialError):
    def __init__(self, step: int, mode: ModeKeys = ModeKeys.GLOBAL) -> None:
        self.step, self.mode = step, mode
        super().__init__(step, mode)


class StepUnavailable(_StepError):
    def __str__(self) -> str:
        return f"step {self.step} of mode {self.mode.name} was not saved"


class StepNotYetAvailable(_StepError):
    def __str__(self) -> str:
        return f"step {self.step} of mode {self.mode.name} is not there yet; the job still runs"


class TensorUnavailable(TrialError):
    def __init__(self, tname: str, near: Sequence[str] = ()) -> None:
        self.tname, self.near = tname, tuple(near)
        super().__init__(tname, self.near)

    def __str__(self) -> str:
        hint = f"; did you mean {', '.join(map(repr, self.near))}?" if self.near else ""
        return f"tensor {self.tname!r} was not saved by this run{hint}"


class TensorUnavailableForStep(TrialError):
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
    def __init__(self, tname: str, step: int, mode: ModeKeys = ModeKeys.GLOBAL) -> None:
        self.tname, self.step, self.mode = tname, step, mode
        super().__init__(tname, step, mode)

    def __str__(self) -> str:
        return f"shape of {self.tname!r} was not saved at step {self.step} of {self.mode.name}"


class InvalidWorker(TrialError):
    def __init__(self, worker: str, workers: Sequence[str] = ()) -> None:
        self.worker, self.workers = worker, tuple(workers)
        super().__init__(worker, self.workers)

    def __str__(self) -> str:
        known = ", ".join(self.workers[:8]) + (", ..." if len(self.workers) > 8 else "")
        return f"no worker {self.worker!r} in this run; it has {known or 'none yet'}"


class NoMoreData(TrialError):
    def __init__(self, step: int, mode: ModeKeys, last_step: int | None) -> None:
        self.step, self.mode, self.last_step = step, mode, last_step
        super().__init__(step, mode, last_step)

    def __str__(self) -> str:
        return (
            f"the job ended; step {self.step} of mode {self.mode.name} will not come "
            f"(last step: {self.last_step})"
        )


class WaitTimeout(TrialError, TimeoutError):
    pass


class RuleEvaluationConditionMet(TrialError):
    def __init__(self, rule_name: str, step: int, end_of_rule: bool = False) -> None:
        self.rule_name, self.step, self.end_of_rule = rule_name, step, end_of_rule
        super().__init__(rule_name, step, end_of_rule)

    def __str__(self) -> str:
        return f"rule {self.rule_name} fired at step {self.step}"
