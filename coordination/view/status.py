"""The status of a run as frozen data: for JSON, a terminal, or another process."""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

__all__ = ["AttemptLine", "RankLine", "RunState", "RunStatus", "StepCompleteness", "StepReport"]


class RunState(str, Enum):
    """The state of a coordinator's work on one run, not of the training job."""

    WAITING = "waiting"  # there is no run yet, or it cannot be read
    OPENING = "opening"
    WATCHING = "watching"
    FINISHED = "finished"  # the last snapshot says that no rank writes any more
    REFUSED = "refused"  # another coordinator holds the lease; tried again when it may have ended
    SUPERSEDED = "superseded"  # another coordinator has taken over
    STOPPED = "stopped"
    FAILED = "failed"

    __str__ = str.__str__

    @property
    def is_final(self) -> bool:
        """Return whether this coordinator will learn nothing more about the run."""
        return self in (RunState.SUPERSEDED, RunState.STOPPED, RunState.FAILED)

    @property
    def serves_queries(self) -> bool:
        """Return whether answers are current: another coordinator may know more otherwise."""
        return self not in (RunState.REFUSED, RunState.SUPERSEDED)

    @property
    def is_error(self) -> bool:
        """Return whether a person should act on it."""
        return self in (RunState.REFUSED, RunState.SUPERSEDED, RunState.FAILED)

    @property
    def is_starting(self) -> bool:
        """Return whether the run was not read yet."""
        return self in (RunState.WAITING, RunState.OPENING)


StepCompleteness = Literal["complete", "partial", "pending", "not saved"]
"""`partial`: a rank is missing of which nothing more is expected. `pending`: it may still come."""


class RankLine(msgspec.Struct, frozen=True):
    """A rank of the newest attempt, as of the status's `time`. `step` -1: it has closed none."""

    rank: int
    status: str  # of membership.RankStatus
    step: int
    behind_steps: int  # than the rank that is furthest, in global steps
    behind_s: float
    last_seen: float
    reason: str = ""


class AttemptLine(msgspec.Struct, frozen=True):
    attempt: int
    expected: int
    ranks: dict[str, int]  # rank status -> how many


class RunStatus(msgspec.Struct, frozen=True):
    url: str
    run_id: str
    state: RunState
    detail: str  # why it is superseded or failed, in words
    time: float
    writer: str
    epoch: int
    number: int  # of the newest snapshot, 0 for none
    snapshot_time: float
    final: bool
    attempts: tuple[AttemptLine, ...]
    ranks: tuple[RankLine, ...]
    latest_complete: dict[str, int]  # mode name -> step as that mode counts; "GLOBAL" always
    last_step: int  # greatest global step of which there is anything, -1 for none
    steps: int
    complete_steps: int
    manifests: int  # read since this coordinator was started
    hints: int
    troubles: tuple[str, ...] = ()

    @property
    def lagging(self) -> tuple[RankLine, ...]:
        return tuple(line for line in self.ranks if line.status == "lagging")

    @property
    def lost(self) -> tuple[RankLine, ...]:
        return tuple(line for line in self.ranks if line.status == "lost")


class StepReport(msgspec.Struct, frozen=True):
    """A step of its newest attempt. `missing`: rank -> reason, empty exactly when complete."""

    step: int
    mode: str
    standing: StepCompleteness
    attempt: int = -1
    missing: dict[int, str] = {}

    @property
    def complete(self) -> bool:
        return self.standing == "complete"
