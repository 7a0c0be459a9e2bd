"""`Straggler`: a rank that is slower than the others."""

from __future__ import annotations

from dataclasses import dataclass

from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict

__all__ = ["Straggler"]


@dataclass(frozen=True)
class Straggler:
    """Tells which rank keeps the others waiting. Always UNDECIDED: busy times are not saved yet.

    Averaging gradients makes all steps equally long, so the time at which a step was saved does not
    tell who waited for whom. Only the time that a rank computes by itself does.
    """

    warn_below: float = 0.9
    fire_below: float = 0.75
    window: int = 20

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        del evidence
        return [
            Finding(
                rule=type(self).__name__,
                verdict=Verdict.UNDECIDED,
                message="how long each rank computes by itself in a step is not saved yet",
                needs="the busy time of each rank and step, from its start to its last own gradient",
            )
        ]
