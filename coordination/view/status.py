"""What a coordinator says about a run: plain frozen data, for JSON, a screen, or another process."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["AttemptLine", "RankLine", "RunState", "RunStatus", "StepCompleteness", "StepReport"]

RunState = Literal[
    "waiting", "opening", "watching", "finished", "refused", "superseded", "stopped", "failed"
]
"""Of the coordinator's work on a run, not of the job.

"waiting": there is no run yet, or it cannot be read. "refused": another coordinator has it; tried
again when its lease may have ended. "superseded": another one has taken over.
"""

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
