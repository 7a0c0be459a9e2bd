"""What rules answer: a verdict with its evidence, as data. Pure.

The same sentences appear in the terminal, in JSON and in `trial.findings()`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from smdist.identity import ModeKeys

__all__ = ["Finding", "Verdict"]


class Verdict(Enum):
    """FIRES: the condition holds. QUIET: it does not. UNDECIDED: what it needs was not saved."""

    FIRES = "FIRES"
    QUIET = "QUIET"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer of one rule. A rule that FIRES at several places gives one finding for each."""

    rule: str
    verdict: Verdict
    message: str  # one sentence: what, where, how much
    first_step: int | None = None  # the step in its mode (mode_step)
    mode: ModeKeys | None = None
    attempt: int | None = None
    tensor: str | None = None
    ranks: tuple[int, ...] = ()
    value: float | None = None
    threshold: float | None = None
    needs: str | None = None  # UNDECIDED: what to save so that the rule can decide
    advice: str | None = None  # FIRES: what to try next

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. Numbers that JSON does not have become text: "nan", "inf"."""
        found = asdict(self)
        found["verdict"] = self.verdict.value
        found["mode"] = None if self.mode is None else self.mode.name
        found["ranks"] = list(self.ranks)
        for key in ("value", "threshold"):
            number = found[key]
            if number is not None and not abs(number) < float("inf"):
                found[key] = str(number)
        return found
