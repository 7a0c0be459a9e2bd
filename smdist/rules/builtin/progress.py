"""`StalledTrainingRule`: ranks that have not saved a step for long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from smdist.identity import ModeKeys
from smdist.rules.builtin.base import BuiltInRule, Place

if TYPE_CHECKING:
    from smdist.rules.evidence import Evidence
    from smdist.rules.findings import Finding

__all__ = ["StalledTrainingRule"]


@dataclass(frozen=True)
class StalledTrainingRule(BuiltInRule):
    """Fires when a job that has not ended saves nothing for `threshold` seconds.

    It tells a job that stands still, and the rank that stopped first, from ranks that lag behind.
    """

    threshold: float = 1800.0
    stop_training_on_fire: bool = False
    training_job_name_prefix: str | None = None
    advice: ClassVar[str] = "look at the stack of the rank that stopped first: py-spy dump"

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return one finding for the job, or one for the ranks that lag."""
        if evidence.ended:
            return self.quiet("the job has ended")
        times = evidence.last_progress
        if not times:
            needs = "a first saved step of any rank"
            return self.undecided(needs, "no rank has saved a step yet")
        first = min(times, key=lambda rank: (times[rank], rank))
        late = sorted(rank for rank, when in times.items() if self._idle(evidence, when))
        if not late:
            return self.quiet(
                f"all {len(times)} ranks saved a step in the last {self.threshold:.0f} s"
            )
        newest = max(times.values())
        idle = evidence.now - (newest if len(late) == len(times) else times[first])
        if len(late) == len(times):
            text = (
                f"all {len(times)} ranks stand still for {idle:.0f} s; rank {first} stopped first"
            )
        else:
            text = f"{len(late)} of {len(times)} ranks lag behind; rank {first} for {idle:.0f} s"
        place = self._last(evidence, first)
        return [
            self.fires(
                text,
                place=place,
                value=idle,
                threshold=self.threshold,
                ranks=self._order(evidence, late),
            )
        ]

    def _idle(self, evidence: Evidence, when: float) -> bool:
        return evidence.now - when > self.threshold

    @staticmethod
    def _order(evidence: Evidence, late: list[int]) -> list[int]:
        """Return the ranks, the one that stopped first in front."""
        return sorted(late, key=lambda rank: (evidence.last_progress[rank], rank))

    @staticmethod
    def _last(evidence: Evidence, rank: int) -> Place | None:
        rows = evidence.rows
        at = np.flatnonzero(rows["rank"] == rank)
        if not len(at):
            return None
        row = int(at[np.lexsort([rows["step"][at], rows["attempt"][at]])[-1]])
        step, mode = int(rows["mode_step"][row]), ModeKeys(int(rows["mode"][row]))
        attempt = int(rows["attempt"][row])
        return Place(row, attempt, mode, step, int(rows["step"][row]), 0, (rank,))
